"""The tables of a run in Markdown; the command line prints the same."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llm_steer.eval.statistics import Estimate
from llm_steer.eval.summary import CUT_OFF, NO_ANSWER, NO_LABEL, Score, Summary, TaskSummary

HASHES = ("config", "tokenizer", "chat_template")
"""What the engine's identity has of these."""


def percent(value: float | None, digits: int = 1) -> str:
    return "" if value is None or math.isnan(value) else f"{100 * value:.{digits}f}"


def interval(estimate: Estimate, scale: float = 100.0, digits: int = 1, sign: bool = False) -> str:
    if math.isnan(estimate.value):
        return ""
    plus = "+" if sign else ""
    value = f"{scale * estimate.value:{plus}.{digits}f}"
    if math.isnan(estimate.low):
        return value
    return f"{value} [{scale * estimate.low:{plus}.{digits}f}, {scale * estimate.high:{plus}.{digits}f}]"


def number(value: float | None, digits: int = 1) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def p_value(p: float) -> str:
    return "<0.0001" if p < 1e-4 else f"{p:.4f}"


def score_table(task: TaskSummary) -> tuple[list[str], list[list[str]]]:
    """Header and rows: what every method reached."""
    ks = [k for k in (task.scores[0].pass_at if task.scores else {}) if k > 1]
    head = [
        "method",
        "accuracy, % [95 %]",
        *(f"pass@{k}" for k in ks),
        "maj",
        "tokens [95 %]",
        "median",
        "thinking",
        "answer",
    ]
    head += ["cut off, %", "no answer, %", "reflections", "steered steps", "s/answer"]
    return head, [_score_row(score, ks) for score in task.scores]


def _score_row(score: Score, ks: Sequence[int]) -> list[str]:
    about = "" if score.think_exact else "≈"
    return [
        score.method,
        interval(score.accuracy),
        *(percent(score.pass_at[k]) for k in ks),
        percent(score.majority),
        interval(score.tokens, 1.0, 0),
        number(score.median_tokens, 0),
        about + number(score.think_tokens, 0),
        about + number(score.answer_tokens, 0),
        percent(score.truncated),
        percent(score.unanswered),
        number(score.reflections, 2),
        number(score.steered_steps),
        number(score.seconds, 2),
    ]


def against_table(task: TaskSummary) -> tuple[list[str], list[list[str]]]:
    """Header and rows: every method against one."""
    head = [
        "method",
        "against",
        "accuracy, points [95 %]",
        "better/worse",
        "sign test p",
        "Holm",
        "detectable",
        "tokens [95 %]",
    ]
    return head, [
        [
            a.method,
            a.base,
            interval(a.accuracy.difference, sign=True),
            f"{a.accuracy.better}/{a.accuracy.worse}",
            p_value(a.accuracy.p),
            p_value(a.p_holm),
            percent(a.accuracy.detectable),
            interval(a.tokens.difference, 1.0, 0, sign=True),
        ]
        for a in task.against
    ]


def level_table(task: TaskSummary) -> tuple[list[str], list[list[str]]]:
    levels = list(dict.fromkeys(level for score in task.scores for level in score.levels))
    head = ["level", "problems", *(score.method for score in task.scores)]
    rows = []
    for level in levels:
        cells = [score.levels.get(level) for score in task.scores]
        rows.append([level, str(max(c[0] for c in cells if c)), *(percent(c[1]) if c else "" for c in cells)])
    return head, rows


def confusion_table(score: Score) -> tuple[list[str], list[list[str]]]:
    golds = list(score.confusion)
    given = {answer for counts in score.confusion.values() for answer in counts}
    none = [column for column in (NO_LABEL, CUT_OFF, NO_ANSWER) if column in given or column == NO_ANSWER]
    answers = [*golds, *sorted(given - {*golds, *none}), *none]
    rows = [[gold, *(str(score.confusion[gold].get(answer, 0)) for answer in answers)] for gold in golds]
    return ["right ↓ given →", *answers], rows


def tuning_table(tuning: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: every configuration that a sweep has tried."""
    rows = [[t["method"], t["label"], percent(t["accuracy"]), number(t["tokens"], 0)] for t in tuning]
    return ["method", "configuration", "accuracy, %", "tokens"], rows


def seen(task: TaskSummary) -> list[str]:
    """What the numbers can and cannot show."""
    lines = []
    if task.against:
        known = [a.accuracy.detectable for a in task.against if a.accuracy.detectable > 0]
        if not known:
            lines.append("No difference was seen on any problem, so how large a one this run could have seen is not known.")
        else:
            n = min(a.accuracy.problems for a in task.against)
            method_by_method = " in every comparison (the table has each method's)" if len(known) > 1 else ""
            lines.append(
                f"With {n} problems in pairs, this run could have seen (5 %, two-sided, four times out of five) a "
                f"difference of {percent(max(known))} points{method_by_method}; smaller ones may be there and not show."
            )
    if task.scores:
        errors = task.scores[0].errors
        if math.isnan(errors.sampling):
            lines.append("One answer to each problem: sampling error cannot be told from that of the choice of problems.")
        else:
            lines.append(
                f"Standard error of {task.scores[0].method}'s accuracy: {percent(errors.total, 2)} points, "
                f"{percent(errors.problems, 2)} from the choice of problems and {percent(errors.sampling, 2)} from sampling."
            )
    if task.majority_class:
        lines.append(f"Always answering {task.majority_class[0]} would be right in {percent(task.majority_class[1])} %.")
    missing = sum(score.missing for score in task.scores)
    if missing:
        lines.append(f"{missing} answers are missing: the run is not finished, or some requests failed.")
    ungraded = max((score.ungraded for score in task.scores), default=0.0)
    if ungraded:
        lines.append(f"Up to {percent(ungraded, 2)} % of a method's answers ended the grader's time, and count as wrong.")
    return lines


def about(summary: Summary) -> list[tuple[str, str]]:
    """What the run is, as names and values."""
    run = summary.run
    engine = run["engine"]
    facts = [
        ("model", str(run["model"])),
        (
            "engine",
            ", ".join(f"{k} {v}" for k, v in engine.items() if k not in ("model", *HASHES)),
        ),
        ("hashes", ", ".join(f"{k} {engine[k]}" for k in HASHES if k in engine)),
        ("samples, seed", f"{run['samples']}, {run['seed']}"),
        ("chat template arguments", json.dumps(run["template"]) if run["template"] else ""),
        (
            "time",
            f"{summary.wall_seconds:.0f} s in {summary.starts} starts, {summary.tokens_per_second:.0f} tokens/s",
        ),
    ]
    notes = {key: value for key, value in run["notes"].items() if key != "tuning"}
    facts += [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in notes.items()]
    facts += [("server given up", text) for text in summary.dropped]
    if summary.old_grades:
        facts.append(("grades", f"{summary.old_grades} are of an older grader: llm-steer eval regrade FOLDER"))
    return [(name, value) for name, value in facts if value]


def source(task: TaskSummary) -> str:
    t = task.about
    sampling = ", ".join(f"{k} {v}" for k, v in t["sampling"].items())
    licence = f", licence: {t['licence']}" if t["licence"] else ""
    return f"{task.problems} problems, {t['source']} (sha256 {t['sha256'][:16]}…){licence}. Sampling: {sampling}."


def tables(summary: Summary) -> str:
    """The main tables of every task."""
    parts = []
    for task in summary.tasks:
        parts.append(f"## {plain(task.about['title'])}\n\n{plain(source(task))}\n")
        parts.append(table(*score_table(task)))
        if task.against:
            parts.append(table(*against_table(task)))
        parts += [f"{line}\n" for line in seen(task)]
    return "\n".join(parts)


def document(summary: Summary) -> str:
    """``report.md``."""
    parts = [f"# {plain(summary.run['model'])}\n", table(["", ""], [[n, v] for n, v in about(summary)]), tables(summary)]
    for task in summary.tasks:
        if any(score.levels for score in task.scores):
            parts.append(f"### {plain(task.about['title'])}: accuracy by level, %\n\n{table(*level_table(task))}")
        for score in task.scores:
            if score.confusion:
                title = plain(f"{task.about['title']}: {score.method}")
                parts.append(f"### {title}\n\n{table(*confusion_table(score))}")
    methods = {label: m["loop"] or m["steer"] for label, m in summary.run["methods"].items()}
    listed = [[label, json.dumps(steer, ensure_ascii=False)] for label, steer in methods.items()]
    parts.append("### Methods\n\n" + table(["label", "steer"], listed))
    if tuning := summary.run["notes"].get("tuning"):
        parts.append("### Tuning, on other problems\n\n" + table(*tuning_table(tuning)))
    return "\n".join(parts)


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(plain(c) for c in line) + " |" for line in lines) + "\n"


def plain(text: Any) -> str:
    """Text of others as it is: nothing in it is markup. Underscores within words are none to begin with."""
    return re.sub(r"(?<!\w)_|_(?!\w)|[\\`*|~]|<(?=[A-Za-z/!?])|(?<=\])[(\[]|^[#>]", r"\\\g<0>", " ".join(str(text).split()))
