"""Numbers of a folder against the same numbers counted by hand; and runs against each other."""

from __future__ import annotations

import json
import math
import statistics as plain
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from llm_steer.eval.compare import compare
from llm_steer.eval.config import RunConfig
from llm_steer.eval.grade import regrade
from llm_steer.eval.report import markdown
from llm_steer.eval.run import run
from llm_steer.eval.store import Folder
from llm_steer.eval.summary import summarize

from llm_steer import SteerError
from llm_steer.engines.base import Response
from support.fake_engine import FakeEngine, answer_by_seed, sums

METHODS = ["reflection_cycle:period=50", "none"]


def answer(request):
    """As the fake engine does; some answers are cut off, some have none, steered ones tell what was done."""
    response = answer_by_seed(request)
    kind = (request.sampling.seed or 0) % 7
    if kind == 1:
        return Response(text="Wait, but", tokens=100, finish="length")
    if kind == 2:
        return Response(text="no</think>thing", tokens=5)
    if request.steer != "off":
        trace = {"plugins": [{"name": "reflection_cycle", "steered_steps": 6, "positions": [0], "deltas": [1.5]}]}
        return Response(text=response.text, tokens=response.tokens, seconds=0.5, steering=trace)
    return response


@pytest.fixture
def folder(tmp_path) -> Path:
    config = RunConfig(**{**sums(tmp_path, 12), "steer": METHODS, "samples": 4})
    run(config, FakeEngine(answer))
    return Path(config.out)


def test_against_another_method(folder):
    (ours,), (theirs,) = (summarize(folder, against).tasks[0].against for against in (METHODS[0], "none"))
    assert (ours.method, ours.base) == (theirs.base, theirs.method) == ("none", METHODS[0])
    assert ours.accuracy.difference.value == -theirs.accuracy.difference.value
    assert ours.accuracy.p == theirs.accuracy.p
    with pytest.raises(SteerError, match="a method of this run: reflection_cycle"):
        summarize(folder, "tip")


def test_the_numbers(folder):
    summary = summarize(folder)
    (task,) = summary.tasks
    rows, grades = list(Folder(folder).results()), Folder(folder).grades()
    assert [score.method for score in task.scores] == METHODS
    for score in task.scores:
        own = [(row, grades[row["key"]]) for row in rows if row["method"] == score.method]
        assert score.answers == len(own) == 48
        assert score.missing == 0
        assert score.accuracy.value == pytest.approx(plain.mean(g["correct"] for _, g in own))
        assert score.pass_at[1] == pytest.approx(score.accuracy.value)
        by_problem = {}
        for row, grade in own:
            by_problem.setdefault(row["id"], []).append(grade["correct"])
        assert score.pass_at[4] == pytest.approx(plain.mean(any(c) for c in by_problem.values()))
        assert score.tokens.value == pytest.approx(plain.mean(r["tokens"] for r, _ in own))
        assert score.median_tokens == plain.median(r["tokens"] for r, _ in own)
        assert score.truncated == pytest.approx(plain.mean(r["finish"] == "length" for r, _ in own))
        # Cut-off answers are counted apart from those that ended without one.
        assert score.unanswered == pytest.approx(plain.mean(r["text"].endswith("thing") for r, _ in own))
        assert score.think_tokens + score.answer_tokens == pytest.approx(score.tokens.value)
        assert {level: n for level, (n, _) in score.levels.items()} == {"0": 6, "1": 6}
    steered, plain_ = task.scores
    assert steered.steered_steps == 6
    assert plain_.steered_steps is None
    (against,) = task.against
    assert (against.method, against.base) == ("reflection_cycle:period=50", "none")
    assert against.accuracy.difference.value == 0
    assert against.tokens.difference.value == pytest.approx(steered.tokens.value - plain_.tokens.value)
    assert summary.wall_seconds >= 0
    json.dumps(summary.document(), allow_nan=False)


def test_label_tasks(tmp_path):
    given = sums(tmp_path, 9)
    task = Path(given["tasks"][0])
    text = task.read_text().replace("grader: exact", "grader: label").replace("answer: sum", "answer: truth")
    task.write_text(text + 'labels: {"True": [], "False": [], "Uncertain": []}\n')
    rows = [{"n": n, "a": n, "b": 0, "truth": "True" if n < 6 else "False"} for n in range(9)]
    Path(given["data"]["sums"]).write_text("".join(json.dumps(r) + "\n" for r in rows))
    answers = iter(["True", "Uncertain", "maybe", "False"] * 9)
    run(RunConfig(**given), FakeEngine(lambda r: Response(text=f"</think>\\boxed{{{next(answers)}}}", tokens=1)))
    (task_,) = summarize(Path(given["out"])).tasks
    (score,) = task_.scores
    assert task_.majority_class == ("True", pytest.approx(6 / 9))
    counts = Counter()
    for row in score.confusion.values():
        counts.update(row)
    assert counts == {"True": 3, "Uncertain": 2, "no label": 2, "False": 2}
    assert score.unanswered == 0
    assert sum(score.confusion["True"].values()) == 6


def test_what_is_no_label(tmp_path):
    given = sums(tmp_path, 4)
    task = Path(given["tasks"][0])
    text = task.read_text().replace("grader: exact", "grader: label").replace("answer: sum", "answer: truth")
    task.write_text(text + 'labels: {"Yes": [], "No": []}\n')
    Path(given["data"]["sums"]).write_text(
        "".join(json.dumps({"n": n, "a": n, "b": 0, "truth": "Yes"}) + "\n" for n in range(4))
    )
    boxed = Response(text="</think>\\boxed{perhaps}", tokens=1)
    answers = iter([boxed, Response(text="</think>", tokens=1), Response(text="", tokens=1, finish="length")])
    run(RunConfig(**given), FakeEngine(lambda r: next(answers, Response(text="</think>\\boxed{Yes}", tokens=1))))
    (score,) = summarize(Path(given["out"])).tasks[0].scores
    assert score.confusion == {"Yes": {"Yes": 1, "no label": 1, "no answer": 1, "cut off": 1}}
    assert (score.unanswered, score.truncated) == (0.25, 0.25)
    assert markdown.confusion_table(score) == (
        ["right ↓ given →", "Yes", "no label", "cut off", "no answer"],
        [["Yes", "1", "1", "1", "1"]],
    )


def test_grades_are_replaced(folder):
    path = folder / "grades.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["correct"] = not rows[0]["correct"]
    rows[0]["version"] = 0
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert summarize(folder).old_grades == 1
    results = (folder / "results.jsonl").read_bytes()
    assert regrade(folder) == [rows[0]["key"]]
    assert regrade(folder) == []
    assert summarize(folder).old_grades == 0
    assert (folder / "results.jsonl").read_bytes() == results
    with pytest.raises(SteerError, match=r"no run\.json"):
        regrade(folder.parent)


def test_runs_against_each_other(folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    given = sums(other, 8)
    run(RunConfig(**{**given, "samples": 2}), FakeEngine(lambda r: Response(text="</think>\\boxed{0}", tokens=1)))
    document, text = compare([folder, Path(given["out"])])
    found = document["comparisons"]
    assert [row["method"] for row in found] == ["none", "none"]
    shared = found[1]["comparison"]
    assert shared["problems"] == 8
    assert shared["difference"]["value"] < 0
    assert not math.isnan(shared["difference"]["low"])
    assert str(folder) in text
    with pytest.raises(SteerError, match="each folder once"):
        compare([folder, folder])
    with pytest.raises(SteerError, match="at least two"):
        compare([folder])


def test_a_run_that_goes_on(tmp_path):
    """What is there can be reported at any time."""
    given = {**sums(tmp_path, 6), "samples": 2}
    run(RunConfig(**{**given, "limit": 3, "samples": 1}), FakeEngine())
    assert summarize(Path(given["out"])).tasks[0].problems == 3
    run(RunConfig(**given), FakeEngine(lambda r: Response(finish="error", error="down")))
    (task,) = summarize(Path(given["out"])).tasks
    assert (task.problems, task.scores[0].answers, task.scores[0].missing) == (6, 3, 9)


def test_a_run_that_shares_no_problem_is_told(folder, tmp_path):
    """Also where the first run has methods of its own to compare."""
    other = tmp_path / "other"
    other.mkdir()
    given = sums(other, 8)
    rows = Path(given["data"]["sums"])
    rows.write_text(rows.read_text().replace('"a": ', '"a": 9'))
    run(RunConfig(**given), FakeEngine())
    with pytest.raises(SteerError, match="asked some of the problems"):
        compare([folder, Path(given["out"])])


def test_what_a_run_could_have_seen_holds_for_every_method(folder):
    task = summarize(folder).tasks[0]
    one = task.against[0]
    others = [replace(one, accuracy=replace(one.accuracy, detectable=d)) for d in (0.02, 0.11, math.nan)]
    (line,) = [line for line in markdown.seen(replace(task, against=others)) if "could have seen" in line]
    assert "a difference of 11.0 points in every comparison" in line
