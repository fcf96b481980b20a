"""Speculative decoding on Model Runner V2: drafted rows are steered for their own place, rejected ones leave no mark."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from e2e import residual, scenarios
from e2e.conftest import Engines
from e2e.engine_client import V2_SYNC
from e2e.oracle import Oracle
from e2e.scenarios import CLOSE, OPEN, Asked, describe

DRAFTS = {"method": "ngram_gpu", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
FEW = [OPEN, CLOSE, 8, 9, 20, 21]
"""With so few tokens to choose from, drafts are found at every step, think markers among them."""


def test_drafts(engines: Engines, llama: Path, oracle: Callable[[Path], Oracle]) -> None:
    engine = engines.get(llama, V2_SYNC, one_process=True, max_num_seqs=6, speculative_config=DRAFTS)
    rng = random.Random(7)
    params = {"temperature": 0.0, "max_tokens": 24, "allowed_token_ids": FEW, "ignore_eos": True}
    batch = [
        Asked(
            [rng.choice(FEW) for _ in range(rng.randint(2, 12))],
            params,
            {
                "amplitude": rng.choice((4.0, 12.0)),
                "period": rng.choice((5.3, 9.4)),
                "origin": origin,
                "after_end": after_end,
                **({"token_ids": [8, CLOSE, 20]} if rng.random() < 0.5 else {}),
            },
        )
        for origin in ("think", "output")
        for after_end in ("off", "restart", "continue")
    ]
    batch += [Asked(asked.prompt, params) for asked in batch[:3]]
    script = [{"add": [{"id": str(i), **asked.to_engine()} for i, asked in enumerate(batch)]}]
    played = engine.call("play", script=script)
    wanted = [oracle(llama).generate(asked.prompt, asked.params, asked.steer, "v2") for asked in batch]
    for i, (asked, want) in enumerate(zip(batch, wanted, strict=True)):
        assert played["tokens"][str(i)] == want.token_ids, describe(asked, want, played["tokens"][str(i)])
    # Some drafts were accepted, some were not, and spans ended and opened again among them.
    assert 2 * 24 / (1 + 3) < played["steps"] < 2 * 24
    assert any(want.ended_at is not None for want in wanted)
    assert any(want.reopened for want in wanted)


def test_default_steering(engines: Engines, llama: Path, oracle: Callable[[Path], Oracle]) -> None:
    """It starts, where the V1 runner refuses."""
    named = ["reflection_cycle:amplitude=25,period=9.4"]
    engine = engines.get(llama, V2_SYNC, one_process=True, speculative_config=DRAFTS, logits_processors=named)
    params = {"temperature": 0.0, "max_tokens": 10}
    prompt = [*scenarios.words(random.Random(1), 6), OPEN]
    want = oracle(llama).generate(prompt, params, {"amplitude": 25.0, "period": 9.4})
    assert engine.one(prompt, **params)["token_ids"] == want.token_ids


def test_open_loops_on_hidden_states(
    engines: Engines, llama: Path, oracle: Callable[[Path], Oracle], tmp_path: Path
) -> None:
    """Drafted tokens are pushed like drawn ones, by their positions."""
    toys = {"PYTHONPATH": str(residual.install(tmp_path))}
    named = ['push:{"layers": [0, 1], "strength": 0.0}']
    options = {"max_num_seqs": 6, "speculative_config": DRAFTS, "logits_processors": named, "env": toys}
    engine = engines.get(llama, V2_SYNC, one_process=True, **options)
    rng = random.Random(4)
    params = {"temperature": 0.0, "max_tokens": 20, "allowed_token_ids": FEW, "ignore_eos": True}
    pushes: list[tuple[dict[str, Any], ...]] = [
        (),
        ({"layers": [0], "strength": 60.0, "seed": 1, "positions": "output"},),
        ({"layers": [0, 1], "strength": -40.0, "seed": 2, "positions": "all"},),
    ]
    batch = [residual.Asked([rng.choice(FEW) for _ in range(8)], params, push) for push in pushes for _ in range(2)]
    played = engine.call("play", script=[{"add": [{"id": str(i), **asked.to_engine()} for i, asked in enumerate(batch)]}])
    for i, asked in enumerate(batch):
        want = asked.want(oracle(llama), "v2")
        assert played["tokens"][str(i)] == want.token_ids, residual.describe(asked, want, played["tokens"][str(i)])
    assert 20 / (1 + 3) < played["steps"] < 20, "some drafts were accepted, some were not"
