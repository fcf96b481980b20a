"""Tuning on some problems, reporting on others."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llm_steer.eval import tasks
from llm_steer.eval.config import RunConfig
from llm_steer.eval.methods import NONE, parse_methods, split
from llm_steer.eval.run import Outcome, load_tasks, run
from llm_steer.eval.store import Folder
from llm_steer.eval.summary import Summary, summarize

from llm_steer.engines.base import Engine
from llm_steer.errors import SteerError, UnsupportedError
from llm_steer.formats import from_option

MAX_CONFIGURATIONS = 10_000

Grid = Mapping[str, Sequence[Any]]
"""Values to try, by parameter."""


@dataclass(frozen=True)
class Plan:
    """What is tuned, and on what."""

    config: RunConfig
    """A run. Its methods that a grid names are tuned, with their other parameters as they are; the rest are reported as
    they are."""
    grids: Mapping[str, Grid]
    """By a method's label; a plugin's name stands for the plugin with its defaults."""
    report_tasks: Sequence[str] = field(default_factory=tuple)
    """Tasks to report on; if there are none, the tasks of the run are split."""
    share: float = 0.5
    """Of the problems of a split task that are tuned on."""
    report_samples: int | None = None
    """Answers to each problem that is reported on; as many as the run's if left out."""
    controls: Callable[[Mapping[str, Any]], Sequence[dict[str, Any]]] = lambda _: ()
    """Further methods to report, made from what was chosen: a label's parameters."""


def parse_grids(texts: Sequence[str]) -> dict[str, dict[str, list[Any]]]:
    """``tip.alpha=1,3,5`` and the like, by method and parameter."""
    grids: dict[str, dict[str, list[Any]]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        label, dot, parameter = name.rpartition(".")
        if not (equals and dot and values):
            raise SteerError("--grid", text, "written METHOD.parameter=value,value,...")
        if parameter in grids.setdefault(label, {}):
            raise SteerError("--grid", name, "given once")
        grids[label][parameter] = [from_option(value) for value in values.split(",")]
    if not grids:
        raise SteerError("--grid", None, "given at least once: METHOD.parameter=value,value,...")
    return grids


def for_tuning(item: tasks.Item, share: float) -> bool:
    """Whether a problem of a split task is tuned on: by a hash of what is asked, so the same in every run and order, and
    for a problem that is there twice."""
    return int(hashlib.sha256(f"tune/{item.words}".encode()).hexdigest()[:8], 16) / 2**32 < share


def sweep(
    plan: Plan,
    engine: Engine | None = None,
    *,
    tokenizer: Any = None,
    progress: Callable[..., Any] | None = None,
    say: Callable[[str], None] = print,
) -> Summary:
    """Run every configuration on the tuning problems, then each method's best on the others.

    Folders ``tune`` and ``report`` of the run's folder hold the two; the same call goes on where they were broken off.

    Raises:
        SteerError: problems that would be tuned on and reported on alike.
        UnsupportedError: requests got no answer, so nothing can be chosen yet.
    """
    config = plan.config
    fixed, configurations = split_methods(config, plan.grids)
    counts = {label: len(steers) for label, steers in configurations.items()}
    if len(set(counts.values())) > 1:
        say(f"The grids are of unequal size, which favours the larger: {counts}")

    def tunes(item: tasks.Item) -> bool:
        return bool(plan.report_tasks) or for_tuning(item, plan.share)

    def reports(item: tasks.Item) -> bool:
        return bool(plan.report_tasks) or not for_tuning(item, plan.share)

    tried = [{"label": _label(m, s), "steer": s} for m, steers in configurations.items() for s in steers]
    tune = _part(config, "tune", config.tasks, [NONE, *tried])
    final = _part(config, "report", plan.report_tasks or config.tasks, fixed)
    final = final.model_copy(update={"samples": plan.report_samples or config.samples})
    refuse_overlap(
        {key: item.id for task in load_tasks(tune) for item in task.items if tunes(item) for key in _keys(item)},
        {key: item.id for task in load_tasks(final) for item in task.items if reports(item) for key in _keys(item)},
        asked_before(Path(tune.out)),
        asked_before(Path(final.out)),
        config.out,
    )
    if engine is None:
        from llm_steer.eval.engine import open_engine

        engine, tokenizer = open_engine(config, parse_methods([NONE, *tried]) + parse_methods(fixed))

    say(f"Tuning {len(tried)} configurations of {len(counts)} methods")
    _complete(run(tune, engine, tokenizer=tokenizer, progress=progress, only=tunes))
    table = _table(summarize(Path(tune.out)), configurations)
    chosen = best(table)
    for row in chosen:
        say(f"Chosen: {row['label']}")
    final = final.model_copy(
        update={
            "steer": [
                *fixed,
                *({"label": row["method"], "steer": row["steer"]} for row in chosen),
                *plan.controls({row["method"]: row["steer"] for row in chosen}),
            ]
        }
    )
    where = ", ".join(plan.config.tasks) + (
        "" if plan.report_tasks else f", {100 * plan.share:g} % by a hash of the problem"
    )
    notes = {"tuning": table, "tuned on": where, "configurations tried": counts}
    _complete(run(final, engine, tokenizer=tokenizer, progress=progress, only=reports, notes=notes))
    return summarize(Path(final.out))


def split_methods(
    config: RunConfig, grids: Mapping[str, Grid]
) -> tuple[list[str | dict[str, Any]], dict[str, list[dict[str, Any]]]]:
    """The methods that stay as they are, and every configuration of those that are tuned, by label."""
    methods = [part for m in config.steer for part in (split(m) if isinstance(m, str) else [m])]
    by_label = {m if isinstance(m, str) else str(m.get("label")): m for m in methods}
    configurations: dict[str, list[dict[str, Any]]] = {}
    for label, grid in grids.items():
        given = by_label.pop(label, label)
        method = parse_methods([given])[0]
        base = method.loop.identity() if method.loop else method.steer
        if not isinstance(base, dict):
            raise SteerError("--grid", label, "a method of one plugin")
        steers = [{**base, **dict(zip(grid, values, strict=True))} for values in itertools.product(*grid.values())]
        if len(steers) > MAX_CONFIGURATIONS:
            raise SteerError("--grid", f"{label}: {len(steers)}", f"at most {MAX_CONFIGURATIONS} configurations")
        configurations[label] = steers
    return list(by_label.values()) or [NONE], configurations


def asked_before(folder: Path) -> dict[str, str]:
    """Problems that a folder has already: by their keys, their ids."""
    problems = Folder(folder).problems().values()
    return {key: p["id"] for p in problems for key in (p.get("words", p["fingerprint"]), p["fingerprint"])}


def _keys(item: tasks.Item) -> tuple[str, str]:
    """What two problems must not share. The prompt, too: a folder may hold the words as another version read them."""
    return item.words, item.fingerprint


def refuse_overlap(
    tune: Mapping[str, str],
    report: Mapping[str, str],
    tuned: Mapping[str, str] = {},
    reported: Mapping[str, str] = {},
    out: str = "",
) -> None:
    """Raise if a problem is tuned on and reported on.

    Args:
        tune, report: ids of problems by their keys, as they will be asked.
        tuned, reported: as the folders have them from earlier calls, which may have split otherwise.
        out: the folder of both.
    """
    if not tune or not report:
        raise SteerError("--share", None, "such that problems are left to tune on and to report on")
    if both := [*dict.fromkeys(id_ for key, id_ in report.items() if key in tune)]:
        raise SteerError(
            "--report-tasks",
            both[0],
            f"tasks without the problems that are tuned on: {len(both)} are in both, so their accuracy would be flattered",
        )
    ever_tuned = {**tune, **tuned}
    if both := [*dict.fromkeys(id_ for key, id_ in {**report, **reported}.items() if key in ever_tuned)]:
        told = f"{len(both)} would be tuned and reported on, problem {both[0]} among them"
        raise SteerError("--out", out, f"a new folder: an earlier call split its problems otherwise, {told}")


def _part(config: RunConfig, name: str, wanted: Sequence[str], steer: Sequence[Any]) -> RunConfig:
    names = {tasks.find(task).name for task in wanted}
    data = {task: file for task, file in config.data.items() if task in names}
    out = str(Path(config.out) / name)
    return config.model_copy(update={"out": out, "tasks": list(wanted), "data": data, "steer": list(steer)})


def _label(method: str, steer: Mapping[str, Any]) -> str:
    return f"{method}: " + ", ".join(f"{k}={v}" for k, v in steer.items() if k != "name")


def _table(summary: Summary, configurations: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Accuracy and tokens of every configuration, averaged over tasks."""
    rows = []
    for method, steers in configurations.items():
        for steer in steers:
            label = _label(method, steer)
            scores = [score for task in summary.tasks for score in task.scores if score.method == label]
            accuracy = sum(score.accuracy.value for score in scores) / len(scores)
            tokens = sum(score.tokens.value for score in scores) / len(scores)
            rows.append({"method": method, "label": label, "steer": dict(steer), "accuracy": accuracy, "tokens": tokens})
    return rows


def best(table: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The row of each method that comes out first."""
    methods = dict.fromkeys(row["method"] for row in table)
    return [max((row for row in table if row["method"] == method), key=_rank) for method in methods]


def _rank(row: Mapping[str, Any]) -> tuple[float, float]:
    """Accuracy; of two that are equal, the one that takes fewer tokens."""
    return row["accuracy"], -row["tokens"]


def _complete(outcome: Outcome) -> None:
    if outcome.failed:
        raise UnsupportedError(
            f"{len(outcome.failed)} requests got no answer, so nothing can be chosen yet; the same command asks for them "
            f"again. The first error: {outcome.failed[0]}"
        )
