"""The benchmarks run, and give the figures that they promise. No figure is judged here: other work shares the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script: str, *options: str, timeout: float = 600) -> dict[str, Any]:
    command = [sys.executable, str(BENCHMARKS / script), "--quick", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout)  # nothing but the result on stdout
    assert result["benchmark"] == Path(script).stem
    assert result["setup"]["when"]
    assert result["setup"]["cores"] >= 1
    return result


def test_logits():
    figures = run("logits.py", "--batches", "1", "16", "--length", "512", "--repeats", "2")["figures"]
    for size in (1, 16):
        for name in ("ours_us", "closure_us", "ratio"):
            low, median, high = (figures[f"batch_{size}.{name}{end}"] for end in ("_q1", "", "_q3"))
            assert 0 < low <= median <= high
    assert figures["batch_16.cold.ratio"] > 0
    for name in ("length_128.ours_us", "length_2048.ours_us", "length_32768.ours_us", "one_steers.ours_us"):
        assert figures[name] > 0
    assert figures["flatness"] >= 1
    assert {type(figures["met.ratio"]), type(figures["met.flat"])} == {bool}


def test_logits_prints_a_table_without_json():
    command = [sys.executable, str(BENCHMARKS / "logits.py"), "--quick", "--batches", "2", "--length", "64", "--repeats=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    assert "ratio at batch 2" in done.stdout


def test_the_wave_s_own_offsets_are_reported_once(script):
    testbed = script("reflection_testbed")
    wave = {"name": "reflection_cycle", "amplitude": 2, "period": 40}
    own = {**wave, "schedule": "shuffled"}
    (control,) = testbed.same_offsets({"wave": wave, "shuffled": {**own, "amplitude": 6}})
    assert control == {"label": "same offsets", "steer": own}
    assert testbed.same_offsets({"wave": wave, "shuffled": own}) == []


@pytest.mark.e2e
def test_reflection_testbed():
    figures = run("reflection_testbed.py")["figures"]
    for method in ("none", "wave", "shuffled", "constant", "silver", "tip", "no_wait", "s1", "alpha_one"):
        assert 0 <= figures[f"{method}.accuracy"] <= 1
        if method != "none":
            low, middle, high = (figures[f"{method}.against_none{end}"] for end in ("_low", "", "_high"))
            assert low <= middle <= high


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.975, 0.985, "met"),
        (0.970, 1.200, "met"),
        (0.950, 1.010, "unresolved"),
        (0.955, 0.975, "not met"),
        (0.800, 0.960, "not met"),
    ],
)
def test_the_verdict_on_an_interval(script, low, high, verdict):
    vllm_throughput = script("vllm_throughput")

    assert vllm_throughput.verdict(low, high) == verdict


def test_time_in_hooks_leaves_out_what_they_call(script, monkeypatch):
    vllm_throughput = script("vllm_throughput")

    now = 0.0

    def passes(seconds):
        nonlocal now
        now += seconds

    monkeypatch.setattr(vllm_throughput.time, "perf_counter", lambda: now)
    clock = vllm_throughput.HookClock()
    theirs = clock.theirs(lambda: passes(10))
    inner = clock.ours(lambda: passes(2))

    def wrapper():
        passes(1)
        inner()
        theirs()
        passes(1)

    theirs()
    assert clock.seconds == 0
    clock.ours(wrapper)()
    assert clock.seconds == 4


def test_the_interval_holds_the_median_and_narrows(script):
    measuring = script("measuring")

    few, many = ([1 + 0.01 * (i % 7 - 3) for i in range(count)] for count in (14, 700))
    for values in (few, many):
        low, high = measuring.bootstrap_interval(values, draws=400)
        assert low <= measuring.Summary.of(values).median <= high
    low, high = measuring.bootstrap_interval(many, draws=400)
    wide_low, wide_high = measuring.bootstrap_interval(few, draws=400)
    assert high - low < wide_high - wide_low


@pytest.mark.e2e
@pytest.mark.timeout(1200)
def test_vllm_throughput():
    pytest.importorskip("vllm")
    figures = run("vllm_throughput.py", "--batches", "2", "--pairs", "2", "--starts", "1", timeout=1200)["figures"]
    assert figures["batch_2.pairs"] == 2
    assert figures["batch_2.ratio_low"] <= figures["batch_2.ratio"] <= figures["batch_2.ratio_high"]
    assert figures["batch_2.verdict"] in ("met", "not met", "unresolved")
    assert 0 < figures["batch_2.hook_share_unsteered"] < figures["batch_2.hook_share"] < 1
    assert figures["batch_2.idle_ratio"] > 0
    assert figures["idle.starts"] == 1
