"""What steering one request does to the others: nothing. And what installing the plugin does: nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from e2e import scenarios
from e2e.conftest import Engines
from e2e.engine_client import Engine
from e2e.oracle import Oracle
from e2e.scenarios import OPEN, Asked, describe

REQUESTS = 64
SMALL: dict[str, Any] = {
    "one_process": True,
    "max_model_len": 128,
    "max_num_seqs": 10,
    "block_size": 32,
    "num_gpu_blocks_override": 13,
    "enable_prefix_caching": True,
    "logprobs_mode": "processed_logits",
    "max_logprobs": -1,
}
"""A KV cache that holds only a few of the requests that run: they preempt each other."""


def story(seed: int) -> tuple[dict[str, Asked], list[dict[str, list[str]]]]:
    """64 requests, and for each step which of them are added and aborted.

    How long a request runs does not depend on its tokens, so that the same schedule is met with and without steering.
    """
    rng = random.Random(seed)
    requests = {}
    for number in range(REQUESTS):
        asked = scenarios.asked(rng, tokens=20, longest=26, steered=number % 2 == 0)
        requests[f"r{number}"] = Asked(asked.prompt, {**asked.params, "ignore_eos": True, "min_tokens": 0}, asked.steer)
    waiting, running, script = list(requests), [], []
    while waiting:
        step: dict[str, list[str]] = {"add": [], "abort": []}
        for _ in range(rng.choice((0, 0, 1, 2, 5))):
            if waiting:
                step["add"].append(waiting.pop())
        if running and rng.random() < 0.15:
            step["abort"].append(running.pop(rng.randrange(len(running))))
        running += step["add"]
        script.append(step)
    return requests, script


def play(engine: Engine, seed: int, *, steered: bool = True) -> dict[str, Any]:
    requests, script = story(seed)
    steps = [
        {**step, "add": [{"id": name, **requests[name].to_engine(steered=steered)} for name in step["add"]]}
        for step in script
    ]
    result: dict[str, Any] = engine.call("play", script=steps)
    return result


@pytest.fixture(scope="session")
def seeds(runner: str) -> Sequence[int]:
    return range(1) if runner == "v2" else range(4)


PROBES = [
    {"temperature": 0.0, "max_tokens": 6},
    {"temperature": 0.9, "seed": 4, "max_tokens": 6},
    {"temperature": 0.9, "seed": 5, "max_tokens": 6, "logit_bias": {"8": 2.0}, "repetition_penalty": 1.3},
]


def probe(engine: Engine) -> Any:
    prompts = [[20, 30, 40, OPEN], [50], [60, 70, 80, 90, 100, 110]]
    return engine.generate(
        [
            {"prompt_token_ids": prompt, "params": {**params, "logprobs": -1}}
            for prompt, params in zip(prompts, PROBES, strict=True)
        ]
    )


@dataclass(frozen=True)
class Plain:
    """What an engine says that has no plugin."""

    info: dict[str, Any]
    stories: list[dict[str, Any]]
    """Nobody steers in them."""
    probes: Any


@pytest.fixture(scope="session")
def plain(engines: Engines, llama: Path, runner: str, seeds: Sequence[int]) -> Plain:
    engine = engines.get(llama, runner, hidden=True, **SMALL)
    probes = probe(engine)
    return Plain(engine.info, [play(engine, seed, steered=False) for seed in seeds], probes)


def test_unused_it_changes_no_bit(engines: Engines, llama: Path, runner: str, plain: Plain) -> None:
    """Every logit of every step, compared as a float; and the runner that vLLM chooses."""
    engine = engines.get(llama, runner, **SMALL)
    assert (engine.info["steering_loaded"], plain.info["steering_loaded"]) == (True, False)
    assert {**engine.info, "steering_loaded": False} == plain.info
    assert probe(engine) == plain.probes
    # Nor after others have steered.
    steered = {"prompt_token_ids": [20, OPEN], "params": {"max_tokens": 9, "extra_args": {"steer": "reflection_cycle"}}}
    engine.generate([steered])
    assert probe(engine) == plain.probes


def test_64_requests_that_come_go_and_preempt_each_other(
    engines: Engines,
    llama: Path,
    oracle: Callable[[Path], Oracle],
    runner: str,
    seeds: Sequence[int],
    plain: Plain,
) -> None:
    engine = engines.get(llama, runner, **SMALL)
    for seed, quiet in zip(seeds, plain.stories, strict=True):
        requests, script = story(seed)
        aborted = {name for step in script for name in step["abort"]}
        mixed = play(engine, seed)
        assert mixed["preemptions"] > 0
        assert (mixed["preemptions"], mixed["steps"]) == (quiet["preemptions"], quiet["steps"])
        assert mixed["widest"] > 4
        solo_count = 0
        for name, asked in requests.items():
            got = mixed["tokens"].get(name, [])
            if asked.steer is None:
                assert got == quiet["tokens"].get(name, []), (seed, name, asked)
                continue
            want = oracle(llama).generate(asked.prompt, asked.params, asked.steer, runner)
            if name in aborted:
                assert got == want.token_ids[: len(got)], describe(asked, want, got)
                continue
            assert got == want.token_ids, describe(asked, want, got)
            if runner != "v2" or solo_count < 3:  # alone: through the interpreter, a few will do
                solo_count += 1
                ((alone,),) = engine.generate([asked.to_engine()])
                assert got == alone["token_ids"], (seed, name, asked)
