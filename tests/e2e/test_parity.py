"""Hugging Face and vLLM give the same tokens, at float32."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from e2e import scenarios, tiny
from e2e.conftest import Engines
from e2e.oracle import Oracle, v1_noise, v2_noise
from e2e.scenarios import Asked, describe

GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 60, "top_p": 0.95}


@contextmanager
def drawing(seeds: Sequence[int], prompt_lengths: Sequence[int], runner: str) -> Iterator[None]:
    """Inside, ``torch.multinomial`` makes vLLM's seeded draw for each row: the rest of sampling is transformers' own."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    original, step = torch.multinomial, 0

    def multinomial(probs: torch.Tensor, num_samples: int, **_: Any) -> torch.Tensor:
        nonlocal step
        assert (num_samples, len(probs)) == (1, len(seeds))
        drawn = []
        for row, generator, seed, length in zip(probs, generators, seeds, prompt_lengths, strict=True):
            if runner == "v2":
                noise = v2_noise(seed, length - 1 + step, len(row))
            else:
                noise = v1_noise(int(torch.randint(0, 2**31, (1,), generator=generator)), len(row))
            drawn.append(int((row.double().log() + torch.from_numpy(noise)).argmax()))
        step += 1
        return torch.tensor(drawn)[:, None]

    torch.multinomial = multinomial  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.multinomial = original


def hugging_face(model: Any, batch: Sequence[Asked], runner: str, **options: Any) -> list[list[int]]:
    """What ``generate`` of a steered model gives for a batch, padded on the left; all rows sample in the same way."""
    width = max(len(asked.prompt) for asked in batch)
    pad = model.generation_config.pad_token_id or 0
    ids = torch.tensor([[pad] * (width - len(asked.prompt)) + asked.prompt for asked in batch])
    mask = torch.tensor([[0] * (width - len(asked.prompt)) + [1] * len(asked.prompt) for asked in batch])
    params = dict(batch[0].params)
    sampling = {name: params[name] for name in ("temperature", "top_k", "top_p") if name in params}
    if sampling["temperature"]:
        options |= {"do_sample": True, **sampling}
    else:
        options |= {"do_sample": False}
    with drawing([asked.params.get("seed", 0) for asked in batch], [len(asked.prompt) for asked in batch], runner):
        sequences = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=params["max_tokens"],
            steer=[{"name": "reflection_cycle", **asked.steer} if asked.steer is not None else None for asked in batch],
            pad_token_id=pad,
            **options,
        )
    eos = model.generation_config.eos_token_id
    ends = eos if isinstance(eos, list) else [eos]
    rows = []
    for row in sequences[:, width:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        rows.append(row[:end])
    return rows


def mixed(params: dict[str, Any], prompts: Sequence[list[int]], steers: Sequence[dict[str, Any] | None]) -> list[Asked]:
    seeded = bool(params["temperature"])
    return [
        Asked(prompt, {**params, **({"seed": 100 + i} if seeded else {})}, steer)
        for i, (prompt, steer) in enumerate(zip(prompts, steers, strict=True))
    ]


STEERS: list[dict[str, Any] | None] = [
    {"amplitude": 20.0, "period": 7.5},
    None,
    {"amplitude": 15.0, "period": 6.0, "origin": "output", "after_end": "continue", "phase": 0.25},
    {"schedule": "constant", "amplitude": -100.0, "token_ids": list(range(30, 400)), "origin": "output"},
    {"preset": "reference", "amplitude": 30.0, "period": 5.0},
    {"schedule": "piecewise", "points": [[0, 30], [5, -30], [10, 30]], "words": ["Wait"], "origin": "output"},
]


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_tiny_models(
    engines: Engines, tiny_folder: Callable[[str], Path], oracle: Callable[[Path], Oracle], architecture: str, runner: str
) -> None:
    """Greedy and sampled, steered and not, in one batch on each side; and the oracle agrees with both."""
    from llm_steer import steer, unsteer

    folder = tiny_folder(architecture)
    rng = random.Random(architecture)
    prompts = [[*scenarios.words(rng, length), scenarios.OPEN] for length in (3, 12, 7, 1, 9, 5)]
    prompts[1] = prompts[0]
    length = {"max_tokens": 12 if runner == "v2" else 32}
    batches = [mixed({**params, **length}, prompts, STEERS) for params in (GREEDY, SAMPLED)]

    engine = engines.get(folder, runner, one_process=True)
    assert engine.info["v2"] == (runner == "v2")
    got = engine.generate([asked.to_engine() for batch in batches for asked in batch])
    tokens = [output["token_ids"] for (output,) in got]

    expert = oracle(folder)
    model = steer(expert.model, "off", tokenizer=expert.tokenizer)
    try:
        ours = [row for batch in batches for row in hugging_face(model, batch, runner)]
    finally:
        unsteer(model)
    for asked, vllm, hf in zip([a for batch in batches for a in batch], tokens, ours, strict=True):
        want = expert.generate(asked.prompt, asked.params, asked.steer, runner)
        assert vllm == want.token_ids, f"vLLM: {describe(asked, want, vllm)}"
        assert hf == want.token_ids, f"HF: {describe(asked, want, hf)}"
    assert tokens[0] != tokens[1]
    assert len({tuple(t) for t in tokens}) > len(tokens) * 0.8


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_smollm2(engines: Engines, smollm2: Path, oracle: Callable[[Path], Oracle], runner: str) -> None:
    """A real model: its tokenizer has no think markers, so that the wave runs from the first token."""
    from llm_steer import steer, unsteer

    expert = oracle(smollm2)
    texts = ["The capital of France is", "Once upon a time, there was", "To solve 3x + 5 = 11, we", "Wait, but"]
    prompts = [expert.tokenizer(text).input_ids for text in texts]
    steers = [{"amplitude": 12.0, "period": 8.0, "leading_space": True}, None, {"amplitude": 9.0, "period": 12.5}, None]
    plain = {**steers[0], "words": ["Wait", "But"], "leading_space": False}
    steers = [plain, None, steers[2], {"schedule": "constant", "amplitude": 8.0, "token_ids": [30, 198]}]
    length = {"max_tokens": 4 if runner == "v2" else 24}
    kinds = [GREEDY] if runner == "v2" else [GREEDY, SAMPLED]
    batches = [mixed({**params, **length}, prompts, steers) for params in kinds]
    engine = engines.get(smollm2, runner, one_process=True, max_model_len=128)
    got = engine.generate([asked.to_engine() for batch in batches for asked in batch])
    tokens = [output["token_ids"] for (output,) in got]
    model = steer(expert.model, "off", tokenizer=expert.tokenizer)
    try:
        ours = [row for batch in batches for row in hugging_face(model, batch, runner)]
    finally:
        unsteer(model)
    for asked, vllm, hf in zip([a for batch in batches for a in batch], tokens, ours, strict=True):
        want = expert.generate(asked.prompt, asked.params, asked.steer, runner)
        assert vllm == want.token_ids, f"vLLM: {describe(asked, want, vllm)}"
        assert hf == want.token_ids, f"HF: {describe(asked, want, hf)}"
