"""MATH-500: each gold is right against its own reference solution, and wrong against one that is not equivalent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from llm_steer.eval.grading import GRADERS, Gold, MathPool, last_box

from llm_steer.normal import Form

DATA = Path(__file__).parents[3].parent / "shared" / "data" / "math500.jsonl"

pytestmark = pytest.mark.skipif(not DATA.exists(), reason="needs ../shared/data/math500.jsonl, which is not shipped")


@pytest.fixture(scope="module")
def rows():
    return [json.loads(line) for line in DATA.read_text(encoding="utf-8").split("\n") if line]


def test_the_golds_and_their_neighbours(rows):
    assert len(rows) == 500
    with MathPool() as pool:
        grader = GRADERS["math"](pool)
        own, other = [], []
        for row, following in zip(rows, rows[1:] + rows[:1], strict=True):
            verdict = grader.grade(Gold(row["answer"]), row["solution"])
            if not verdict.correct:
                own.append((row["unique_id"], row["answer"], verdict))
            verdict = grader.grade(Gold(following["answer"]), row["solution"])
            if verdict.correct and Form.of(row["answer"]).value != Form.of(following["answer"]).value:
                other.append((row["answer"], following["answer"], verdict))
        assert own == []
        assert other == []


def test_every_reference_solution_has_a_box(rows):
    assert all(last_box(row["solution"]) for row in rows)
