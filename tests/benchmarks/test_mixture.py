"""benchmarks/mixture_testbed.py on written answers instead of a model's: what it counts is checked against plain oracles."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llm_steer.eval.testbed.entailment import Entailment, make_problem, parse_prompt
from llm_steer.eval.testbed.grading import boxed, executed
from llm_steer.eval.testbed.recipes import RECIPES
from llm_steer.eval.testbed.traces import Mix, write

CLEAN = Mix(slip=(0, 0, 0), recheck=0.3, spoil=0, stop_early=0, storm=0)
COUNT = 40


@pytest.fixture
def bench(script: Callable[[str], Any]) -> Any:
    return script("mixture_testbed")


@pytest.fixture
def checks(script: Callable[[str], Any]) -> Any:
    return script("mixture_checks")


def traces(modality: str, mix: Mix, count: int = COUNT) -> list[Any]:
    """Problems and texts that solve them, as the test bed's model learns them."""
    task, rng = Entailment(modality), random.Random(modality)
    problems = [task.sample(rng, 3 + i % 3) for i in range(count)]
    return [(problem, write(task.walk(problem), rng, mix).text) for problem in problems]


@pytest.mark.parametrize("modality", ["code", "table"])
def test_checks_of_right_answers(checks: Any, modality: str) -> None:
    for problem, text in traces(modality, CLEAN):
        check = getattr(checks, modality)(text, None)
        assert check.answer == problem.answer
        assert check.sound


def test_a_wrong_cell_and_a_missing_row_are_found(checks: Any) -> None:
    found: Counter[str] = Counter()
    for problem, text in traces("table", Mix(slip=(0, 0, 0), recheck=0, stop_early=0, storm=0)):
        premises, _ = parse_prompt(problem.prompt)
        if len(set(premises)) < len(premises):
            continue  # said twice, the second counts
        thinking, _, rest = text.partition("</think>")
        for old, new in (("holds", "fails"), ("fails", "holds")):
            if old in thinking:
                flipped = checks.table(thinking.replace(old, new, 1) + "</think>" + rest, None)
                found["cells"] += 1
                found["cell"] += flipped.answer is None or not flipped.sound
        if problem.answer != "Uncertain":
            *rows, _last = thinking.strip().split("\n\nIt is ")
            shorter = checks.table("\n\nIt is ".join(rows) + "\n\n</think>" + rest, None)
            found["rows"] += 1
            found["row"] += shorter.answer is None or not shorter.sound
    assert found["cell"] == found["cells"] > COUNT
    assert found["row"] == found["rows"] > COUNT / 4


def test_texts_that_are_no_table(checks: Any) -> None:
    for text in ("", "so big", "If big then", "It is big. If big then old holds\n\nso old", "so big\n\nso old"):
        assert checks.table(text, None).answer is None
    cell = "Either big or old holds\n\nso big\n\n"
    rows = ["It is big and old. ", "It is big and not old and calm. "]  # of other atoms
    assert checks.table("".join(row + cell for row in rows), None).answer is None
    assert checks.table(rows[0] + cell, None).answer == "True"
    assert checks.code("no program", None).answer is None


def test_equal_counts(bench: Any) -> None:
    for mean, problems in ((2.5, 10), (1.0, 7), (4.26, 1000)):
        counts = bench.equal_counts(mean, problems)
        assert len(counts) == problems
        assert max(counts) - min(counts) <= 1
        assert sum(counts) == pytest.approx(mean * problems, abs=0.51)


@pytest.fixture
def written(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``measure`` with answers that are written, with many slips, instead of drawn from a model."""
    models = tmp_path / "models"
    models.mkdir()
    (models / "model.safetensors").write_bytes(b"none")
    mixes = {part.task.name: part.mix for part in RECIPES["logic"].parts}
    drawn: list[str] = []

    def sample(model: Any, tokenizer: Any, problems: Any, *, seed: int) -> Any:
        rng = random.Random(seed)
        drawn.append(problems[0].system)
        texts = [write(Entailment(p.system).walk(p), rng, mixes[f"entailment-{p.system}"]).text for p in problems]
        return bench.sampling.Answers([bench.sampling.Response(text.split(), text, finished=True) for text in texts], 1.0)

    monkeypatch.setattr(bench.sampling, "sample_hf", sample)
    monkeypatch.setattr(bench, "loaded", lambda models: (None, None))
    asked, chosen = bench.problems_of([3, 4], COUNT, 10, 0)
    assert not {p.canonical for p in asked} & {p.canonical for p in chosen}

    def run() -> Any:
        sides = (bench.Answers(tmp_path, models, asked, "asked"), bench.Answers(tmp_path, models, chosen, "selection"))
        return (sides[0], *bench.measure(*sides))

    return run, drawn


def test_what_is_counted(bench: Any, written: Any) -> None:
    run, _ = written
    answers, figures, text = run()
    truth = [problem.answer for problem in answers.problems]
    said = {m: [s.text for s in answers.of(m, 0)] for m in bench.SPOKEN}

    def accuracy(given: list[Any]) -> float:
        return sum(g == t for g, t in zip(given, truth, strict=True)) / len(truth)

    for modality, texts in said.items():
        assert figures[f"{modality}.accuracy"] == pytest.approx(accuracy([boxed(t) for t in texts]))
    assert figures["solver:code.accuracy"] == pytest.approx(accuracy([executed(t) for t in said["code"]]))
    assert figures["code:run.accuracy"] == pytest.approx(accuracy([executed(t) or boxed(t) for t in said["code"]]))
    assert figures["solver:question.accuracy"] == 1.0

    # The majority; ties go to the modality that was best elsewhere.
    order = sorted(bench.SPOKEN, key=lambda m: figures[f"elsewhere.{m}"], reverse=True)
    votes = []
    for i in range(len(truth)):
        given = [boxed(said[m][i]) for m in order]
        counts = Counter(g for g in given if g is not None)
        votes.append(next((g for g in given if g is not None and counts[g] == max(counts.values())), None))
    assert figures["majority.accuracy"] == pytest.approx(accuracy(votes))

    mixture = sum(len(said[m][i].split()) + 1 for m in said for i in range(len(truth))) / len(truth)
    assert figures["majority.tokens"] == pytest.approx(mixture)
    best = figures["best"]
    modality = best.partition(":")[0]
    three = sum(s.tokens for k in range(3) for s in answers.of(modality, k)) / len(truth)
    assert figures[f"{best}*3.tokens"] == pytest.approx(three)
    assert figures[f"{best}*tokens.tokens"] == pytest.approx(mixture, rel=0.25)
    for way in bench.VOTES:
        assert figures[f"early.{way}.same"] == 1.0
        assert 0 <= figures[f"early.{way}.tokens"] <= figures[f"early.{way}.requests"] < 1
    assert figures["early.majority.requests"] > 0
    assert f"against {best}*3" in text


def test_a_run_that_was_stopped_goes_on(written: Any, tmp_path: Path) -> None:
    run, drawn = written

    def figures() -> dict[str, Any]:
        return {key: value for key, value in run()[1].items() if key != "solver:question.seconds"}  # measured anew

    first, count = figures(), len(drawn)
    assert figures() == first
    assert len(drawn) == count  # nothing was drawn again
    chunk = sorted(tmp_path.glob("*/table-0-*.json"))[0]
    chunk.rename(chunk.with_suffix(".partial"))
    assert figures() == first
    assert drawn[count:] == ["table"]


def test_every_modality_is_asked_the_same(bench: Any) -> None:
    (problem,), others = bench.problems_of([4], 1, 2, 0)
    assert bench.problems_of([4], 3, 2, 0)[0][0] == problem
    assert problem not in others
    again = make_problem(*parse_prompt(problem.prompt), problem.level, "table")
    assert (again.prompt, again.answer, again.canonical) == (problem.prompt, problem.answer, problem.canonical)


@pytest.mark.e2e
@pytest.mark.timeout(1200)
def test_wall() -> None:
    pytest.importorskip("vllm")
    from benchmarks.test_benchmarks import run

    figures = run("mixture_wall.py", timeout=1200)["figures"]
    assert 0 < figures["ratio_low"] <= figures["ratio"] <= figures["ratio_high"]
    assert figures["one.best"] <= figures["one.seconds"]
    assert figures["met"] is (figures["ratio"] <= 1.6)
