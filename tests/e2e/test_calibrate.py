"""Calibration with outputs from vLLM: what it writes is what the same command says on Hugging Face."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from e2e.conftest import Engines
from e2e.test_residual_methods import talkative

__all__ = ["talkative"]  # a fixture


def calibrate(model: Path, data: Path, out: Path, *options: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Outputs and report of a whole run."""
    command = [sys.executable, "-c", "from llm_steer.cli import main; main()", "calibrate", "rebalance", str(model)]
    command += ["--data", str(data), "--out", str(out), "--temperature", "0", "--max-tokens", "60", "--layer", "0"]
    command += ["--dtype", "float32", "--device", "cpu", "--json"]
    vllm = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*command, *options], env={**os.environ, **vllm}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    _, *lines = (out / "outputs.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], json.loads((out / "report.json").read_text())


def test_vllm_generates(engines: Engines, talkative: Path, tmp_path: Path) -> None:
    engines.close()
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"problem": f"so w{i} <think>"}) for i in range(100, 140)))
    expected, theirs = calibrate(talkative, data, tmp_path / "hf", "--batch-size", "20")
    found, ours = calibrate(talkative, data, tmp_path / "vllm", "--batch-size", "20", "--engine", "vllm")
    assert len(found) == len(expected) == 40
    for one, other in zip(found, expected, strict=True):
        for name in ("prompt", "ids", "boundary", "thinking"):
            assert one[name] == other[name]
        assert one["confidences"] == pytest.approx(other["confidences"], abs=1e-4)
    assert ours["steps"] == theirs["steps"] >= 100
    assert ours["constants"] == pytest.approx(theirs["constants"], rel=1e-2, abs=1e-4)
    # Outputs of another engine are others: a run does not go on from them.
    assert (tmp_path / "hf" / "outputs.jsonl").read_text().splitlines()[0] != (
        (tmp_path / "vllm" / "outputs.jsonl").read_text().splitlines()[0]
    )
