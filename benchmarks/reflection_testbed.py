"""CyclicReflex against its baselines on the testbed's arithmetic, each tuned with the same number of configurations.

    python benchmarks/reflection_testbed.py --out FOLDER [--quick] [--json] [--engine hf] [--problems 500]

It is ``llm-steer eval sweep``: half of the problems, by a hash of their words, are tuned on with one answer each; on the
other half the best of each method is reported, in pairs, against no steering and against the wave. The same command goes on
with a folder where it was broken off, and more problems can be added to it.

Every method gets eight configurations: a wave its amplitude and period, its control a wave's offsets in a random order, the
others what their papers tune. *Same offsets* is not tuned: the chosen wave's own offsets in a random order.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from measuring import in_words, machine, print_json, say, table

WORDS: dict[str, Any] = {"words": ["Wait", "But", "Hmm", "Alternatively"], "leading_space": True}
WAVE: dict[str, Any] = {"amplitude": [1, 2, 4, 6], "period": [40, 120]}

METHODS: dict[str, tuple[dict[str, Any], dict[str, list[Any]]]] = {
    "wave": ({"name": "reflection_cycle", **WORDS}, WAVE),
    "shuffled": ({"name": "reflection_cycle", "schedule": "shuffled", **WORDS}, WAVE),
    "constant": (
        {"name": "reflection_cycle", "schedule": "constant", **WORDS},
        {"amplitude": [-3, -2, -1, -0.5, 0.5, 1, 2, 3]},
    ),
    "silver": (
        {"name": "reflection_cycle", "schedule": "silver", **WORDS},
        {"amplitude": [0.05, 0.1, 0.2, 0.4, 0.7, 1, 1.5, 2]},
    ),
    "tip": ({"name": "tip", **WORDS}, {"alpha": [1, 2, 3, 5], "beta": [20, 60]}),
    "no_wait": ({"name": "no_wait"}, {"penalty": [0.5, 1, 2, 3, 4, 6, 10, 100]}),
    "s1": ({"name": "s1"}, {"ignore": [1, 2, 3, 4], "word": ["Wait", "Hmm"]}),
    # This model thinks for 80 tokens on average.
    "alpha_one": ({"name": "alpha_one", "think_tokens": 80}, {"alpha": [0.2, 0.5, 0.8, 1.0, 1.2, 1.4, 1.7, 2.0]}),
}
"""By label: what stays, and what is tried."""


def plan(options: argparse.Namespace, out: str) -> Any:
    from llm_steer.eval.config import RunConfig
    from llm_steer.eval.sweep import Plan
    from llm_steer.eval.testbed import MODELS

    grids = {label: grid for label, (_, grid) in METHODS.items()}
    if options.quick:
        grids = {label: {name: values[:1] for name, values in grid.items()} for label, grid in grids.items()}
    config = RunConfig(
        model=str(MODELS / "arithmetic"),
        tasks=["testbed_arithmetic"],
        steer=["none", *({"label": label, "steer": METHODS[label][0]} for label in grids)],
        limit=options.problems,
        max_tokens=256,
        engine=options.engine,
        batch_size=256,
        engine_args={"max_model_len": 512, "enforce_eager": True} if options.engine == "vllm" else {},
        trace=False,
        out=out,
    )
    return Plan(config, grids, report_samples=options.report_samples, controls=same_offsets)


def same_offsets(chosen: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The wave that was chosen, its offsets in a random order; nothing where tuning chose just that for its control."""
    steer = {**chosen["wave"], "schedule": "shuffled"}
    return [] if chosen["shuffled"] == steer else [{"label": "same offsets", "steer": steer}]


def figures(folder: Path) -> tuple[dict[str, Any], str]:
    """Figures by name, and the table."""
    from llm_steer.eval.summary import summarize
    from llm_steer.eval.sweep import best

    (task,) = (unsteered := summarize(folder)).tasks
    (waves,) = summarize(folder, "wave").tasks
    chosen = {row["method"]: row["label"] for row in best(unsteered.run["notes"]["tuning"])}
    from_none = {a.method: a for a in task.against}
    from_wave = {a.method: a for a in waves.against}
    found: dict[str, Any] = {"problems": task.problems}
    rows = []
    for score in task.scores:
        row = [score.method, _interval(score.accuracy, ""), f"{score.tokens.value:.0f}", f"{score.reflections:.2f}"]
        found[f"{score.method}.accuracy"] = score.accuracy.value
        found[f"{score.method}.tokens"] = score.tokens.value
        for base, others in (("none", from_none), ("wave", from_wave)):
            a = others.get(score.method)
            row += [_interval(a.accuracy.difference, "+"), f"{a.p_holm:.3f}"] if a else ["", ""]
            if a:
                difference = a.accuracy.difference
                found[f"{score.method}.against_{base}"] = difference.value
                found[f"{score.method}.against_{base}_low"] = difference.low
                found[f"{score.method}.against_{base}_high"] = difference.high
        rows.append([*row, chosen.get(score.method, "").partition(": ")[2]])
    head = ["", "accuracy, %", "tokens", "reflections", "- none, points", "Holm", "- wave, points", "Holm", "chosen"]
    return found, table(head, rows)


def _interval(estimate: Any, sign: str) -> str:
    low, value, high = (f"{100 * v:{sign}.1f}" for v in (estimate.low, estimate.value, estimate.high))
    return f"{value} [{low}, {high}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the run's folder; a temporary one if left out")
    parser.add_argument("--engine", choices=("hf", "vllm"), default="hf")
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--report-samples", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="one configuration and few problems: shows that it runs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.problems, options.report_samples = 8, 1
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

    from llm_steer.eval.run import tqdm_progress
    from llm_steer.eval.sweep import sweep

    with tempfile.TemporaryDirectory() as temporary:
        out = options.out or Path(temporary)
        summary = sweep(plan(options, str(out)), progress=tqdm_progress, say=say)
        found, shown = figures(summary.folder)
    setup = {**machine(), "engine": options.engine, "problems": options.problems, "report_samples": options.report_samples}
    if options.json:
        print_json("reflection_testbed", setup, found)
    else:
        print(f"{in_words(setup)}\n{shown}")


if __name__ == "__main__":
    main()
