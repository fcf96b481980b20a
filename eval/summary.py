"""What a run's folder says, in numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from llm_steer.eval import statistics
from llm_steer.eval.grading.graders import VERSION
from llm_steer.eval.methods import NONE
from llm_steer.eval.statistics import Comparison, Errors, Estimate, Matrix
from llm_steer.eval.store import Folder

from llm_steer.errors import SteerError
from llm_steer.spec import OFF

NO_ANSWER, NO_LABEL, CUT_OFF = "no answer", "no label", "cut off"
"""Beside the labels: the text ended without an answer; the answer is no label; the text was cut off before there was one."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Score:
    """One method on one task."""

    method: str
    accuracy: Estimate
    errors: Errors
    pass_at: dict[int, float]
    majority: float
    tokens: Estimate
    median_tokens: float
    think_tokens: float
    answer_tokens: float
    think_exact: bool
    """The two were counted, not estimated from the text."""
    truncated: float
    """Share of answers that the length limit cut off."""
    unanswered: float
    """Share of answers that ended by themselves and hold no answer."""
    ungraded: float
    """Share on which the grader ran out of time or failed; counted as wrong."""
    reflections: float
    steered_steps: float | None
    """Mean over the answers that say; None where none does."""
    seconds: float
    answers: int
    missing: int
    """Answers that the run asks for and does not have."""
    levels: dict[str, tuple[int, float]]
    """Problems and accuracy by level."""
    confusion: dict[str, dict[str, int]]
    """Of label tasks: how often each answer was given where each label is right, those that are none included."""


@dataclass(frozen=True)
class Against:
    """A method compared with the one that was asked for: by default the unsteered one."""

    method: str
    base: str
    accuracy: Comparison
    tokens: Comparison
    p_holm: float = math.nan
    """The sign test's, adjusted for all comparisons of the report."""


@dataclass(frozen=True)
class TaskSummary:
    name: str
    about: Mapping[str, Any]
    """From ``run.json``."""
    problems: int
    scores: list[Score]
    against: list[Against]
    majority_class: tuple[str, float] | None
    """Of label tasks: the most frequent label, and the accuracy of always saying it."""


@dataclass(frozen=True)
class Summary:
    """A run."""

    folder: Path
    run: Mapping[str, Any]
    tasks: list[TaskSummary]
    wall_seconds: float
    tokens_per_second: float
    starts: int
    old_grades: int
    """Verdicts of an earlier version of the grader."""
    dropped: list[str]
    """Servers that a start of the run stopped asking, and why."""
    rows: list[Row] = field(repr=False, default_factory=list)
    grades: Mapping[str, Row] = field(repr=False, default_factory=dict)
    problems: Mapping[tuple[str, str], Row] = field(repr=False, default_factory=dict)

    def document(self) -> dict[str, Any]:
        """JSON types."""
        plain = {"run": dict(self.run), "tasks": [asdict(task) for task in self.tasks]}
        timing = {"wall_seconds": self.wall_seconds, "tokens_per_second": self.tokens_per_second, "starts": self.starts}
        found: dict[str, Any] = finite({**plain, **timing, "old_grades": self.old_grades, "dropped": self.dropped})
        return found


def finite(value: Any) -> Any:
    """NaN, which is no JSON, as None; keys as text."""
    if isinstance(value, dict):
        return {str(key): finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def summarize(path: Path, against: str | None = None) -> Summary:
    """Read a run's folder.

    Args:
        against: the method that the others are compared with; the unsteered one, or else the first, if left out.

    Raises:
        SteerError: there is no run in it, or it is damaged; or the run has no such method.
    """
    folder = Folder(path)
    run, problems, grades = folder.needed(), folder.problems(), folder.grades()
    if against is not None and against not in run["methods"]:
        raise SteerError("--against", against, f"a method of this run: {', '.join(run['methods'])}")
    answered = list(folder.results())
    if lost := grades.keys() - {row["key"] for row in answered}:
        valid = f"a folder with the answers to all of its verdicts: {len(lost)} are missing; `llm-steer eval` asks again"
        raise SteerError("folder", str(path), valid)
    rows: list[Row] = [row for row in answered if row["key"] in grades]
    for row in rows:
        if (row["task"], row["id"]) not in problems:
            valid = f"a folder whose problems.jsonl has {row['id']!r} of {row['task']}, which an answer is to"
            raise SteerError("folder", str(path), valid)
    tasks = [_task(name, run, problems, rows, grades, against) for name in run["tasks"]]
    adjusted = iter(statistics.holm([a.accuracy.p for task in tasks for a in task.against]))
    for task in tasks:
        task.against[:] = [Against(a.method, a.base, a.accuracy, a.tokens, next(adjusted)) for a in task.against]
    wall = _wall(folder.sessions(), rows)
    tokens = sum(row["tokens"] for row in rows)
    old = sum(grade["version"] < VERSION for grade in grades.values())
    return Summary(
        path,
        run,
        tasks,
        wall,
        tokens / wall if wall else math.nan,
        len(folder.sessions()),
        old,
        [row["text"] for row in folder.dropped()],
        rows,
        grades,
        problems,
    )


def _task(
    name: str,
    run: Row,
    problems: Mapping[tuple[str, str], Row],
    rows: Sequence[Row],
    grades: Mapping[str, Row],
    against: str | None,
) -> TaskSummary:
    ids = [id_ for task, id_ in problems if task == name]
    table = {method: Table(ids, run["samples"]) for method in run["methods"]}
    for row in rows:
        if row["task"] == name and row["method"] in table:
            table[row["method"]].put(row, grades[row["key"]])
    golds = {id_: problems[name, id_] for id_ in ids}
    scores = [_score(method, filled, golds) for method, filled in table.items() if filled.answers]
    names = [score.method for score in scores]
    wanted = (NONE, OFF) if against is None else (against,)
    base = next((n for n in names if n in wanted), names[0] if names else "")
    others = [n for n in names if n != base]
    compared = [
        Against(
            method,
            base,
            statistics.compare(table[method].correct, table[base].correct),
            statistics.compare(table[method].tokens, table[base].tokens),
        )
        for method in others
    ]
    labels = Counter(golds[id_]["gold"] for id_ in ids if golds[id_]["labels"])
    most = next(((label, count / len(ids)) for label, count in labels.most_common(1)), None)
    return TaskSummary(name, run["tasks"][name], len(ids), scores, compared, most)


class Table:
    """One method's answers to one task: matrices ``[problems, samples]``."""

    def __init__(self, ids: Sequence[str], samples: int) -> None:
        self._place = {id_: i for i, id_ in enumerate(ids)}
        self.ids = ids
        self.correct, self.tokens = (np.full((len(ids), samples), math.nan) for _ in range(2))
        self.answers: list[tuple[Row, Row]] = []

    def put(self, row: Row, grade: Row) -> None:
        place = self._place.get(row["id"]), row["sample"]
        if place[0] is None or place[1] >= self.correct.shape[1]:
            return
        self.correct[place] = grade["correct"]
        self.tokens[place] = row["tokens"]
        self.answers.append((row, grade))


def _score(method: str, table: Table, problems: Mapping[str, Row]) -> Score:
    answers, count = table.answers, len(table.answers)
    votes: dict[str, list[tuple[str | None, bool]]] = {}
    confusion: dict[str, Counter[str]] = {}
    levels: dict[str, list[str]] = {}
    for row, grade in answers:
        votes.setdefault(row["id"], []).append((grade["value"], grade["correct"]))
        problem = problems[row["id"]]
        if problem["labels"]:
            confusion.setdefault(problem["gold"], Counter())[_given(row, grade)] += 1
    for id_ in votes:
        if problems[id_]["level"] is not None:
            levels.setdefault(problems[id_]["level"], []).append(id_)
    steered = [steps for row, _ in answers if (steps := steered_steps(row)) is not None]

    def share(test: Any) -> float:
        return sum(bool(test(row, grade)) for row, grade in answers) / count

    def average(name: str) -> float:
        return sum(float(row[name]) for row, _ in answers) / count

    cut = [row["finish"] == "length" for row, _ in answers]
    think = average("think_tokens")
    return Score(
        method=method,
        accuracy=statistics.avg_at_k(table.correct),
        errors=statistics.errors(table.correct),
        pass_at={k: statistics.pass_at_k(table.correct, k) for k in _ks(table.correct.shape[1])},
        majority=statistics.maj_at_k(list(votes.values())),
        tokens=statistics.avg_at_k(table.tokens),
        median_tokens=float(np.nanmedian(table.tokens)),
        think_tokens=think,
        answer_tokens=average("tokens") - think,
        think_exact=all(row["think_exact"] for row, _ in answers),
        truncated=sum(cut) / count,
        unanswered=share(lambda row, grade: row["finish"] != "length" and grade["answer"] is None),
        ungraded=share(lambda _, grade: grade["how"] in ("timeout", "error")),
        reflections=average("reflections"),
        steered_steps=sum(steered) / len(steered) if steered else None,
        seconds=average("seconds"),
        answers=count,
        missing=table.correct.size - count,
        levels={
            level: (len(levels[level]), float(_rows(table, levels[level]).mean())) for level in sorted(levels, key=_natural)
        },
        confusion={gold: dict(counts) for gold, counts in sorted(confusion.items())},
    )


def _given(row: Row, grade: Row) -> str:
    """A column of the confusion table."""
    if grade["value"] is not None:
        return str(grade["value"])
    if grade["answer"] is not None:
        return NO_LABEL
    return CUT_OFF if row["finish"] == "length" else NO_ANSWER


def steered_steps(row: Row) -> int | None:
    """Generated tokens whose logits or hidden states were moved, summed over plugins; None where nothing was traced."""
    steps = [p["steered_steps"] for p in (row["steering"] or {}).get("plugins", ()) if "steered_steps" in p]
    return sum(steps) if steps else None


def _rows(table: Table, ids: Sequence[str]) -> Matrix:
    wanted = set(ids)
    return statistics.per_problem(table.correct[[i for i, id_ in enumerate(table.ids) if id_ in wanted]])


def _ks(samples: int) -> list[int]:
    """1, 2, 4 ... and the number of samples."""
    return sorted({*(2**i for i in range(samples.bit_length()) if 2**i <= samples), samples})


def _natural(level: str) -> tuple[bool, float, str]:
    try:
        return (False, float(level), level)
    except ValueError:
        return (True, 0.0, level)


def _wall(sessions: Sequence[Row], rows: Sequence[Row]) -> float:
    """Seconds in which the run was at work: of each start, until its last answer."""
    last: dict[int, float] = {}
    for row in rows:
        last[row["session"]] = max(last.get(row["session"], 0.0), row["at"])
    starts = [s for s in sessions if s["rank"] == 0]
    return math.fsum(max(last.get(s["session"], s["began"]) - s["began"], 0.0) for s in starts)
