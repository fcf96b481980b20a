"""Runs against each other, on the problems that they share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llm_steer.eval import statistics
from llm_steer.eval.report import markdown
from llm_steer.eval.statistics import Comparison
from llm_steer.eval.summary import Summary, Table, finite, summarize

from llm_steer.errors import SteerError


def compare(folders: Sequence[Path]) -> tuple[dict[str, Any], str]:
    """Every method of every run against the first method of the first run, task by task.

    Problems are matched by what was asked, not by their ids.

    Returns:
        JSON types, and Markdown.

    Raises:
        SteerError: fewer than two runs, or none of their problems is the same.
    """
    if len(folders) < 2:
        raise SteerError("folders", [str(f) for f in folders], "at least two runs' folders")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise SteerError("folders", [str(f) for f in folders], "each folder once")
    runs = [summarize(folder) for folder in folders]
    found: list[dict[str, Any]] = []
    for task in dict.fromkeys(name for run in runs for name in run.run["tasks"]):
        found += _compare(task, runs)
    for run in runs[1:]:
        if not any(row["run"] == str(run.folder) for row in found):
            raise SteerError("folders", str(run.folder), f"a run that was asked some of the problems of {runs[0].folder}")
    for row, p in zip(found, statistics.holm([row["comparison"].p for row in found]), strict=True):
        row["p_holm"] = p
    head = [
        "task",
        "run",
        "method",
        "against",
        "problems",
        "accuracy, points [95 %]",
        "better/worse",
        "p",
        "Holm",
        "detectable",
    ]
    lines = [
        [row["task"], row["run"], row["method"], row["against"], *_cells(row["comparison"], row["p_holm"])] for row in found
    ]
    document = finite({"comparisons": [{**row, "comparison": vars(row["comparison"])} for row in found]})
    for row in document["comparisons"]:
        row["comparison"]["difference"] = finite(vars(row["comparison"]["difference"]))
    return document, markdown.table(head, lines)


def _compare(task: str, runs: Sequence[Summary]) -> list[dict[str, Any]]:
    asked = [{p["fingerprint"]: id_ for (name, id_), p in run.problems.items() if name == task} for run in runs]
    tables = []
    for run, places in zip(runs, asked, strict=True):
        fingerprints = list(asked[0])
        by_id = {id_: fingerprint for fingerprint, id_ in places.items()}
        for method in run.run["methods"]:
            table = Table(fingerprints, run.run["samples"])
            for row in run.rows:
                if row["task"] == task and row["method"] == method and row["id"] in by_id:
                    table.put({**row, "id": by_id[row["id"]]}, run.grades[row["key"]])
            if table.answers:
                tables.append((str(run.folder), method, table))
    if not tables:
        return []
    (first, base, table), *others = tables
    return [
        {"task": task, "run": run, "method": method, "against": f"{first}: {base}", "comparison": comparison}
        for run, method, other in others
        if (comparison := statistics.compare(other.correct, table.correct)).problems
    ]


def _cells(comparison: Comparison, holm: float) -> list[str]:
    return [
        str(comparison.problems),
        markdown.interval(comparison.difference, sign=True),
        f"{comparison.better}/{comparison.worse}",
        markdown.p_value(comparison.p),
        markdown.p_value(holm),
        markdown.percent(comparison.detectable),
    ]
