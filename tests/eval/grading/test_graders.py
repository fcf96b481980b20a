"""Choices, labels and exact answers; and the process that does mathematics, on input that is out to break it."""

from __future__ import annotations

import os
import signal

import pytest
from llm_steer.eval.grading import GRADERS, Gold, MathPool

LABELS = {"True": (), "False": (), "Uncertain": ("Unknown", "cannot be determined")}
OPTIONS = ("True", "False", "Uncertain")


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ("True", "True"),
        ("\\text{false}", "False"),
        ("Unknown", "Uncertain"),
        ("Cannot be determined.", "Uncertain"),
        ("B", "False"),
        ("(C)", "Uncertain"),
        ("A) True", "True"),
        ("C) Uncertain", "Uncertain"),
        ("D", None),
        ("maybe", None),
        ("not True", None),
    ],
)
def test_labels(answer, label):
    verdict = GRADERS["label"]().judge(Gold("Uncertain", OPTIONS, LABELS), answer)
    assert verdict.value == label
    assert verdict.correct is (label == "Uncertain")


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("C", "C"),
        ("(c)", "C"),
        ("\\text{C}", "C"),
        ("\\textbf{(C)}", "C"),
        ("C. 12 m/s", "C"),
        ("Option B", "B"),
        ("12 m/s", "C"),
        ("E", None),
        ("Cannot tell", None),
        ("12", None),
    ],
)
def test_choices(answer, letter):
    assert GRADERS["choice"]().judge(Gold("C", ("3 m/s", "7 m/s", "12 m/s", "0")), answer).value == letter


def test_exact_answers():
    grader = GRADERS["exact"]()
    assert grader.grade(Gold("33"), "</think>\\boxed{33}", thinking_required=True).correct
    assert not grader.grade(Gold("33"), "</think>\\boxed{33.0}", thinking_required=True).correct
    assert grader.grade(Gold("33"), "\\boxed{33}", thinking_required=True).how == "none"


def test_hostile_answers_end_in_time_and_the_next_one_is_graded():
    with MathPool(seconds=1) as pool:
        grader = GRADERS["math"](pool)
        assert grader.judge(Gold("2\\sqrt{3}"), "\\sqrt{12}").correct
        verdict = grader.judge(Gold("5+x"), "9^{9^{9^{9^9}}}")  # which would run for years
        assert verdict.how in ("timeout", "error")
        assert not verdict.correct
        assert grader.judge(Gold("2\\sqrt{3}"), "\\sqrt{12}").correct


def test_a_worker_that_was_killed_is_replaced():
    with MathPool() as pool:
        grader = GRADERS["math"](pool)
        assert grader.judge(Gold("p-q"), "-q+p").correct
        os.kill(pool._started[0].process.pid, signal.SIGKILL)
        pool._started[0].process.wait()
        assert grader.judge(Gold("p-q"), "-q+p").correct
    assert all(worker.process.poll() is not None for worker in pool._started)


def test_odd_answers_are_wrong_and_break_nothing():
    odd = ["\\frac{1}{0}", "}{", "\\" * 50, "\x00", "\ud800", "x" * 900, "(" * 90, "1/0", "[1,2", "\\text{", "_", "^", "5_"]
    with MathPool(seconds=1) as pool:
        grader = GRADERS["math"](pool)
        assert not any(grader.judge(Gold("2k+2"), answer).correct for answer in odd)


def fenced(*programs: str) -> str:
    return "<think>```python\nprint(0)\n```</think>" + "".join(f"So:\n```python\n{program}\n```\n" for program in programs)


@pytest.mark.parametrize(
    ("response", "value", "correct", "how"),
    [
        (fenced("print(6 * 7)"), "42", True, "program"),
        (fenced("print(1)", "print('so')\nprint(42.0)"), "42", True, "program"),
        (fenced("print(43)"), "43", False, "program"),
        (fenced("x = 42"), None, False, "program: printed nothing"),
        (fenced("print(42)\nraise SystemExit(1)"), None, False, "program: error"),
        (fenced("while True: pass"), None, False, "program: fuel"),
        (fenced("print(open('/etc/passwd').read())"), None, False, "program: error"),
        (fenced(), None, False, "none"),
        ("\\boxed{42}", None, False, "none"),
    ],
)
def test_programs_run_in_the_sandbox(response, value, correct, how):
    pytest.importorskip("wasmtime")
    verdict = GRADERS["program"]().grade(Gold("42"), response)
    assert (verdict.value, verdict.correct, verdict.how) == (value, correct, how)


def test_without_a_sandbox_no_program_is_graded(monkeypatch):
    monkeypatch.setattr("llm_steer.sandbox.available", lambda: False)
    with pytest.raises(ImportError, match=r"llm-steer-plugin\[sandbox\]"):
        GRADERS["program"]()
