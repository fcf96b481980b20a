"""A run that several processes share, started as users start it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from llm_steer.eval.store import Folder
from llm_steer.eval.testbed import MODELS

LAUNCH = {
    "torchrun": ["torch.distributed.run", "--nproc-per-node", "2", "--no-python"],
    "accelerate": ["accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1",
                   "--mixed_precision=no", "--dynamo_backend=no", "--no_python"],
}  # fmt: skip
TASK = """
name: chains
title: Chains
grader: exact
generated: {task: arithmetic, levels: [4], count: 40}
sampling: {max_tokens: 150, temperature: 1.0, top_p: 1.0}
"""


@pytest.mark.e2e
@pytest.mark.parametrize("launcher", LAUNCH)
def test_two_processes_one_killed(tmp_path: Path, launcher: str) -> None:
    (tmp_path / "task.yaml").write_text(TASK)
    out = tmp_path / "out"
    task = ["--tasks", str(tmp_path / "task.yaml"), "--samples", "2", "--batch-size", "4", "--out", str(out)]
    asked = [sys.executable, "-m", "llm_steer", "eval", str(MODELS / "arithmetic"), *task]
    command = [sys.executable, "-m", *LAUNCH[launcher], *asked]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    with (tmp_path / "log").open("w") as log:
        running = subprocess.Popen(command, env=variables, stdout=log, stderr=log)
        second = out / "results-1.jsonl"
        while running.poll() is None and not (second.exists() and second.stat().st_size):
            time.sleep(0.05)
        for child in Path("/proc").glob("[0-9]*/environ"):
            if is_the_second(child, out):
                os.kill(int(child.parent.name), signal.SIGKILL)
        assert running.wait(120) != 0, "the run was over before it could be killed"
        before = {row["key"] for row in Folder(out).results()}
        assert 0 < len(before) < 80
        subprocess.run(command, env=variables, stdout=log, stderr=log, check=True, timeout=300)
    keys = [json.loads(line)["key"] for path in out.glob("results-*.jsonl") for line in path.open()]
    assert len(keys) == len(set(keys)) == 80
    assert before <= set(keys)
    assert Folder(out).grades().keys() == set(keys)
    assert all(sum(1 for _ in (out / f"results-{rank}.jsonl").open()) == 40 for rank in (0, 1))


def is_the_second(environ: Path, out: Path) -> bool:
    """The process of rank 1 of this run."""
    try:
        command = (environ.parent / "cmdline").read_bytes()
        return str(out).encode() in command and b"\0RANK=1\0" in environ.read_bytes()
    except OSError:  # it has ended
        return False
