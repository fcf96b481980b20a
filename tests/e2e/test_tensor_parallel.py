"""A model split over two workers: each of them steers the same whole logits."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from e2e import scenarios
from e2e.conftest import Engines
from e2e.oracle import Oracle
from e2e.scenarios import describe


def test_two_workers(engines: Engines, llama: Path, oracle: Callable[[Path], Oracle]) -> None:
    engine = engines.get(llama, tensor_parallel_size=2, env={"VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    rng = random.Random(2)
    batch = [scenarios.asked(rng, tokens=12) for _ in range(16)]
    assert any(asked.steer for asked in batch)
    got = engine.generate([asked.to_engine() for asked in batch])
    for asked, (output,) in zip(batch, got, strict=True):
        want = oracle(llama).generate(asked.prompt, asked.params, asked.steer)
        assert output["token_ids"] == want.token_ids, describe(asked, want, output)
