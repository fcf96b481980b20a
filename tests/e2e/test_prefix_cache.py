"""Steered and unsteered requests share every block that steering does not touch, and no other."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from e2e import residual, scenarios
from e2e.conftest import Engines
from e2e.engine_client import Engine

BLOCK = 32
PROMPT = scenarios.words(random.Random(3), 105)
OTHER = scenarios.words(random.Random(4), 70)
PARAMS = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
WHOLE = 96
"""Tokens of the prompt in full blocks."""

PUSH = {"name": "push", "strength": 60.0, "layers": [0], "seed": 1}
STEERS: dict[str, Any] = {
    "plain": "off",
    "output": {**PUSH, "positions": "output"},
    "stronger": {**PUSH, "positions": "output", "strength": 90.0},
    "all": {**PUSH, "positions": "all"},
    "all, stronger": {**PUSH, "positions": "all", "strength": 90.0},
    "closed": {"name": "thermostat", "gain": 300.0, "target": 0.3, "layer": 1},
    "logits": {"name": "reflection_cycle", "amplitude": 25.0, "period": 9.4, "origin": "output"},
}
SPARES_THE_PROMPT = ("plain", "output", "stronger", "closed", "logits")


@pytest.fixture(scope="module")
def engine(engines: Engines, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    toys = residual.install(tmp_path_factory.mktemp("toys"))
    return engines.get(
        llama,
        one_process=True,
        block_size=BLOCK,
        enable_prefix_caching=True,
        max_logprobs=-1,
        env={"PYTHONPATH": str(toys)},
        logits_processors=residual.DECLARED,
    )


def run(engine: Engine, steer: str, prompt: list[int] = PROMPT, **params: Any) -> Any:
    return engine.call("cached", prompt_token_ids=prompt, **{**PARAMS, **params, "extra_args": {"steer": STEERS[steer]}})


def cold(engine: Engine, steer: str, prompt: list[int] = PROMPT, **params: Any) -> Any:
    engine.call("reset_prefix_cache")
    result = run(engine, steer, prompt, **params)
    assert result["cached"] == 0
    return result["outputs"]


def same(got: Any, want: Any) -> None:
    """The same tokens, and log-probabilities up to rounding."""
    for a, b in zip(got, want, strict=True):
        assert a["token_ids"] == b["token_ids"]
        for first, second in zip(a["logprobs"], b["logprobs"], strict=True):
            table = dict(map(tuple, second))
            assert all(abs(value - table[token]) < 1e-3 for token, value in first)


def test_who_shares_with_whom(engine: Engine) -> None:
    """Every way after every other: nothing but the prompt where both spare it, and everything with the like."""
    expected = {steer: cold(engine, steer) for steer in STEERS}
    tokens = {tuple(outputs[0]["token_ids"]) for outputs in expected.values()}
    assert len(tokens) == len(STEERS), "all of them differ"
    for before in STEERS:
        for after in STEERS:
            cold(engine, before)
            got = run(engine, after)
            same(got["outputs"], expected[after])
            both = before in SPARES_THE_PROMPT and after in SPARES_THE_PROMPT
            assert got["cached"] == (WHOLE if both or before == after else 0), (before, after)


@pytest.mark.parametrize("first", list(STEERS))
def test_the_next_turn(engine: Engine, first: str) -> None:
    """The answer is a part of the next prompt: only one that was made like it may be found in the cache."""
    (answer,) = cold(engine, first)
    turn = [*PROMPT, *answer["token_ids"], *OTHER]
    expected = {second: cold(engine, second, turn) for second in STEERS}
    for second in STEERS:
        cold(engine, first)
        got = run(engine, second, turn)
        same(got["outputs"], expected[second])
        if first in ("plain", "logits") and second in SPARES_THE_PROMPT:
            shared = (len(PROMPT) + len(answer["token_ids"]) - 1) // BLOCK * BLOCK  # the last token was never fed
        elif first == second:  # of the answer too, where the prompt is steered like it
            shared = WHOLE if first in SPARES_THE_PROMPT else 128
        else:
            shared = WHOLE if first in SPARES_THE_PROMPT and second in SPARES_THE_PROMPT else 0
        assert got["cached"] == shared, second


def test_several_outputs_of_a_closed_loop(engine: Engine) -> None:
    """Each has a history of its own."""
    sampled = {"temperature": 1.0, "max_tokens": 30}
    expected = [cold(engine, "closed", **sampled, seed=5 + i)[0] for i in range(3)]
    assert len({tuple(o["token_ids"]) for o in expected}) == 3
    got = run(engine, "closed", **sampled, n=3, seed=5)  # vLLM counts the seeds up
    same(got["outputs"], expected)
    assert got["cached"] == WHOLE
