"""``examples/third_party_plugin``, installed by pip beside vLLM, which knows nothing of it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from e2e.conftest import Engines
from e2e.engine_client import EngineError
from e2e.oracle import Oracle
from e2e.scenarios import OPEN

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party_plugin"
PROMPT = [20, 30, 40, OPEN]
GREEDY = {"temperature": 0.0, "max_tokens": 20}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, target = tmp_path_factory.mktemp("source") / "plugin", tmp_path_factory.mktemp("site-packages")
    shutil.copytree(EXAMPLE, source)
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True)
    return target


def presence(penalty: float, first: int) -> Callable[[torch.Tensor, list[int]], None]:
    """What the example does, once more."""

    def change(logits: torch.Tensor, output: list[int]) -> None:
        if len(output) < first:
            logits[sorted(set(output))] -= penalty

    return change


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_on_vllm(engines: Engines, llama: Path, oracle: Callable[[Path], Oracle], installed: Path, runner: str) -> None:
    """Alone, with other values, and together with one of ours; next to requests that do not steer."""
    engine = engines.get(llama, runner, one_process=True, env={"PYTHONPATH": str(installed)})
    # The words of the prompt come again and again, until they are penalised.
    params: dict[str, Any] = {**GREEDY, "logit_bias": {"20": 9.0, "30": 8.5}}
    wave = {"amplitude": 25.0, "period": 9.4}
    strong = presence(30.0, 8)
    cases: list[tuple[Any, Any, Any]] = [
        ({"steer": "presence", "steer_penalty": 30.0, "steer_first": 8}, strong, None),
        ({"steer": {"name": "presence", "penalty": 3.0}}, presence(3.0, 64), None),
        (None, None, None),
        ({"steer": [{"name": "presence", "penalty": 30.0, "first": 8}, {"name": "reflection_cycle", **wave}]}, strong, wave),
    ]
    requests = [
        {"prompt_token_ids": PROMPT, "params": {**params, **({"extra_args": asked} if asked else {})}}
        for asked, _, _ in cases
    ]
    tokens = []
    for (asked, change, steer), (output,) in zip(cases, engine.generate(requests), strict=True):
        want = oracle(llama).generate(PROMPT, params, steer, runner, change=change)
        assert output["token_ids"] == want.token_ids, (asked, want, output)
        names = [plugin["name"] for plugin in output["steering"]["plugins"]] if asked else []
        assert names == ([] if not asked else ["presence"] if steer is None else ["presence", "reflection_cycle"])
        tokens.append(tuple(want.token_ids))
    assert len(set(tokens)) == len(cases)
    with pytest.raises(EngineError, match="steer_penalty: got 'high'"):
        engine.generate(
            [{"prompt_token_ids": PROMPT, "params": {"extra_args": {"steer": "presence", "steer_penalty": "high"}}}]
        )
