"""Hidden states are steered inside the model as a plain hook on Hugging Face's does it: token for token, at float32."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from e2e import residual
from e2e.conftest import Engines
from e2e.oracle import Oracle
from e2e.residual import Asked, describe

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "v1": ("v1", {}),
    "v1-chunks": ("v1", {"max_num_batched_tokens": 16}),
    "v1-async": ("v1-async", {}),
    "v1-dynamo": ("v1", {"enforce_eager": False, "env": {"VLLM_CPU_CI_ENV": "1"}}),
    "v2": ("v2", {}),
    "v2-chunks": ("v2-sync", {"max_num_batched_tokens": 16}),
    "v2-dynamo": ("v2", {"enforce_eager": False, "env": {"VLLM_CPU_CI_ENV": "1"}}),
}
"""Ways to run a model: model runner, options."""


@pytest.fixture(scope="session")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return residual.install(tmp_path_factory.mktemp("toys"))


@pytest.mark.parametrize("way", list(WAYS))
def test_mixed_batches(engines: Engines, llama: Path, oracle: Callable[[Path], Oracle], toys: Path, way: str) -> None:
    """Plain, open-loop and closed-loop requests beside each other, with vectors of their own."""
    runner, options = WAYS[way]
    env = {**options.get("env", {}), "PYTHONPATH": str(toys)}
    options = {**options, "env": env, "logits_processors": residual.DECLARED}
    engine = engines.get(llama, runner, one_process=True, **options)
    rng = random.Random(way)
    batch = residual.batch(rng, 16, tokens=10 if runner.startswith("v2") else 20)
    if way == "v1-chunks":  # vLLM's CPU sampler cannot rewind a seeded generator behind an unfinished chunk
        batch = [Asked(a.prompt, {**a.params, "temperature": 0.0}, a.pushes) for a in batch]
    expert, drawn = oracle(llama), "v2" if runner.startswith("v2") else "v1"
    got = engine.generate([asked.to_engine() for asked in batch])
    changed = 0
    for asked, (output,) in zip(batch, got, strict=True):
        want = asked.want(expert, drawn)
        assert output["token_ids"] == want.token_ids, describe(asked, want, output)
        changed += want.token_ids != Asked(asked.prompt, asked.params).want(expert, drawn).token_ids
    assert changed >= 8, "steering that shows"


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        pytest.param({"tensor_parallel_size": 2}, 12, id="tensor-parallel"),
        pytest.param({"pipeline_parallel_size": 2, "enforce_eager": False}, 12, id="pipeline-parallel"),
        pytest.param({"enforce_eager": False}, 10, id="inductor"),
    ],
)
def test_several_workers_and_compiled(
    engines: Engines, llama: Path, oracle: Callable[[Path], Oracle], toys: Path, options: dict[str, Any], tokens: int
) -> None:
    env = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONPATH": str(toys)}
    engine = engines.get(llama, env=env, logits_processors=residual.DECLARED, **options)
    batch = residual.batch(random.Random(5), 12, tokens=tokens)
    got = engine.generate([asked.to_engine() for asked in batch])
    for asked, (output,) in zip(batch, got, strict=True):
        want = asked.want(oracle(llama))
        assert output["token_ids"] == want.token_ids, describe(asked, want, output)


SMALL: dict[str, Any] = {
    "max_model_len": 128,
    "max_num_seqs": 10,
    "block_size": 32,
    "num_gpu_blocks_override": 13,
    "enable_prefix_caching": True,
}
"""A KV cache that holds only a few of the requests that run: they preempt each other."""


@pytest.mark.parametrize("runner", ["v1", "v1-async", "v2"])
def test_preemption(engines: Engines, llama: Path, oracle: Callable[[Path], Oracle], toys: Path, runner: str) -> None:
    """Recomputed tokens get what they got the first time, closed loops included."""
    slow = runner == "v2"
    options = {**SMALL, "env": {"PYTHONPATH": str(toys)}, "logits_processors": residual.DECLARED}
    if slow:
        options["num_gpu_blocks_override"] = 8
    engine = engines.get(llama, runner, one_process=True, **options)
    for seed in range(1 if slow else 3):
        rng = random.Random(seed)
        batch = residual.batch(rng, 12 if slow else 24, tokens=40 if slow else 60)
        batch = [Asked(a.prompt, {**a.params, "ignore_eos": True, "min_tokens": 0}, a.pushes) for a in batch]
        add = [{"id": str(i), **a.to_engine()} for i, a in enumerate(batch)]
        script = [{"add": add}] if slow else [{"add": [request]} for request in add]
        played = engine.call("play", script=script)
        assert played["preemptions"] > 0
        for i, asked in enumerate(batch):
            want = asked.want(oracle(llama), runner)
            assert played["tokens"][str(i)] == want.token_ids, describe(asked, want, played["tokens"][str(i)])
