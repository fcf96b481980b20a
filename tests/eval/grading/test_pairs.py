r"""Hard pairs of a gold answer and an answer. Most are the kind that public reports about graders turn on: MATH's own
spellings, Math-Verify's surprises (``{1,2}`` = ``(1,2)``, ``4343_6`` = ``4343_7``, ``10\%`` = ``0.1``), leading zeros."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from llm_steer.eval.grading import GRADERS, Gold, MathPool
from llm_steer.eval.grading.graders import Grader

RIGHT = [
    # sizes of brackets
    ("(1,2)", "\\bigl(1,2\\bigr)"),
    ("[0,1]", "\\Big[ 0,1 \\Big]"),
    # what is counted
    ("5", "5 \\text{ zebras}"),
    ("5 \\text{ zebras}", "5"),
    # constants with i and e
    ("-1", "e^{i\\pi}"),
    ("e^{i\\pi}", "-1"),
    ("0", "e^{i\\pi}+1"),
    ("-1", "i^2"),
    ("2", "i^2+3"),
    ("i", "\\sqrt{-1}"),
    # a letter without its case
    ("C", "c"),
    ("\\text{C}", "c"),
    ("c", "\\text{C}"),
    # commas with spaces behind them, and without
    ("100, 200, 300", "100,200,300"),
    ("100,200,300", "100200300"),
    # leading zeros, signs, thousands, currency, decimals
    ("070", "70"),
    ("70", "070"),
    ("005", "5"),
    ("336^\\circ", "336"),
    ("-3", "-3.0"),
    ("+4", "4"),
    ("1,000", "1000"),
    ("10,\\!080", "10080"),
    ("1{,}000{,}000", "1000000"),
    ("11,\\! 111,\\! 111,\\! 100", "11,111,111,100"),
    ("58,500", "58500"),
    ("\\$32,\\!348", "32348"),
    ("\\$18.90", "18.9"),
    ("18", "\\$18.00"),
    (".35625", "0.35625"),
    ("27", "27.0"),
    ("9" * 900, "0" + "9" * 900),
    # fractions and mixed numbers
    ("\\frac43", "\\frac{4}{3}"),
    ("\\frac9{19}", "\\dfrac{9}{19}"),
    ("\\frac 59", "5/9"),
    ("\\frac{1}{2}", "0.5"),
    ("-\\frac{1}{2}", "\\frac{-1}{2}"),
    ("\\frac{2}{4}", "\\tfrac12"),
    ("1\\frac{4}{5}", "\\frac{9}{5}"),
    ("137 \\frac{1}{2}", "137.5"),
    ("137 \\frac{1}{2}", "137 1/2"),
    ("\\frac{3\\sqrt{3}}{4}", "\\frac{3}{4}\\sqrt{3}"),
    # roots, powers, constants, algebra
    ("11\\sqrt2", "11\\sqrt{2}"),
    ("2\\sqrt{3}", "\\sqrt{12}"),
    ("\\frac{\\sqrt{3}}{3}", "\\frac{1}{\\sqrt{3}}"),
    ("10^3", "1000"),
    ("288 \\pi", "\\pi \\cdot 288"),
    ("p - q", "-q+p"),
    ("(a+5)(b+2)", "(b+2)(a+5)"),
    ("x^2+2x+1", "(x+1)^2"),
    ("6 - 5i", "-5i+6"),
    ("xy", "yx"),
    ("x=5", "5"),
    ("5", "x = 5"),
    ("y = 2x + 3", "2x+3"),
    ("y = 2x + 3", "y=3+2x"),
    ("\\cot x", "\\cot{x}"),
    # degrees, percent, units
    ("90^\\circ", "90"),
    ("90^{\\circ}", "90^\\circ"),
    ("30", "30^\\circ"),
    ("\\frac{270}7\\text{ degrees}", "\\frac{270}{7}"),
    ("10\\%", "10"),
    ("10", "10\\%"),
    ("15\\mbox{ cm}^2", "15"),
    ("15\\mbox{ cm}^2", "15 \\text{ square centimeters}"),
    ("864 \\mbox{ inches}^2", "864 \\text{ in}^2"),
    ("5.4 \\text{ cents}", "5.4"),
    # bases
    ("4343_6", "4343_{6}"),
    ("2516_8", "2516"),
    ("4210_{5}", "4210_5"),
    # lists, sets, tuples, intervals, matrices
    ("1,-2", "-2,1"),
    ("3, 5, 7", "\\{7,5,3\\}"),
    ("\\{1\\pm\\sqrt{5},-2\\}", "-2, 1+\\sqrt{5}, 1-\\sqrt{5}"),
    ("1 \\pm \\sqrt{19}", "1+\\sqrt{19}, 1-\\sqrt{19}"),
    ("\\{1,2\\}", "1,2"),
    ("(3, \\frac{\\pi}{2})", "\\left(3,\\pi/2\\right)"),
    ("(3,4]", "\\left(3, 4\\right]"),
    ("(-\\infty, 2) \\cup (3, \\infty)", "(3,\\infty)\\cup(-\\infty,2)"),
    ("x \\in [-2,7]", "[-2,7]"),
    ("[-2,7]", "-2 \\le x \\le 7"),
    ("(2,\\infty)", "x > 2"),
    ("\\begin{pmatrix} 1/5 \\\\ -18/5 \\end{pmatrix}", "\\begin{bmatrix} 0.2 \\\\ -3.6 \\end{bmatrix}"),
    ("\\begin{pmatrix} -1 & 0 \\\\ 0 & -1 \\end{pmatrix}", "\\begin{pmatrix}-1&0\\\\0&-1\\end{pmatrix}"),
    # text
    ("\\text{Evelyn}", "Evelyn"),
    ("\\text{east}", "East."),
    ("\\text{(C)}", "(C)"),
    ("\\text{(C)}", "C"),
    ("\\text{even}", "\\mathrm{even}"),
    ("no solution", "\\text{No solution}"),
    # words between and behind numbers: alternatives, factors, units, signs set upright
    ("1,2", "x=1 \\text{ or } x=2"),
    ("x=1 \\text{ or } x=2", "x=1,x=2"),
    ("x=1 \\text{ or } x=2", "x = 2 \\quad\\text{or}\\quad x = 1"),
    ("3,4", "3 or 4"),
    ("3 \\text{ cm or } 4 \\text{ cm}", "3 \\text{ cm or } 4 \\text{ cm}"),
    ("3,4", "3 \\text{ cm} \\text{ or } 4 \\text{ cm}"),
    ("(-\\infty,1]\\cup[3,\\infty)", "x\\geq 3 \\text{ or } x\\leq 1"),
    ("3 \\text{ million}", "3000000"),
    ("3000000", "3 \\text{ million dollars}"),
    ("4.2 \\text{ billion}", "4200000000"),
    ("7", "7 \\text{ apples}"),
    ("60", "60 \\text{ miles per hour}"),
    ("60 \\text{ mph}", "60 \\text{ miles/hour}"),
    ("12", "12 \\text{ sq. units}"),
    ("5\\sqrt{3}", "5\\sqrt{3}\\text{ cm}"),
    ("5 m", "5m"),
    ("2", "2 m^2"),
    ("3+2\\mathrm{i}", "3+2i"),
    ("2\\mathrm{e}", "2e"),
    ("7\\text{:}30", "7:30"),
    # other spellings
    ("\\varnothing", "\\emptyset"),
    ("\\varnothing", "\\{\\}"),
    ("\\frac13", "0.\\overline{3}"),
    ("\\frac16", "0.1\\overline{6}"),
    ("[1,3)", "3>x\\ge1"),
    ("(-\\infty,3)", "3 > x"),
    ("-5", "–5"),
    ("1000", "1e3"),
    ("1,2", "1 2"),
    ("10 000", "10000"),
]
WRONG = [
    # what changes a number is nothing that is counted
    ("2", "2 \\text{ thirds}"),
    ("3", "3 \\text{ dozens}"),
    ("3", "3 \\text{ thousands}"),
    ("5", "5 \\text{ is less}"),
    ("5", "5 \\text{ perhaps}"),
    ("2", "2 \\text{ scores}"),
    ("5", "5 \\text{ tens}"),
    ("30", "30'"),
    ("5''", "5"),
    # constants that are near, and those that have no size
    ("\\infty", "-\\infty"),
    ("\\infty", "0"),
    ("0", "\\infty"),
    ("10^{1000}", "10^{1001}"),
    ("10^{400}", "10^{400}+1"),
    ("i", "-i"),
    ("-1", "e^{2i\\pi}"),
    ("2", "i^2+2"),
    ("\\frac13", "0.33333333333333333333"),
    ("\\pi", "\\frac{355}{113}"),
    ("70", "7"),
    ("-3", "3"),
    ("3", "-3"),
    ("\\frac{1}{2}", "\\frac{2}{1}"),
    ("\\frac{1}{2}", "12"),
    ("1\\frac{1}{2}", "\\frac{11}{2}"),
    ("1\\frac{1}{2}", "11/2"),
    ("\\frac{1}{3}", "0.333"),
    ("\\frac{14}{3}", "4.6667"),
    ("\\pi", "3.14159"),
    ("2", "2.0000001"),
    ("9" * 900, "9" * 899 + "8"),
    ("1000", "1,0000"),
    # conventions: percent, sets, tuples, intervals, bases, units
    ("10\\%", "0.1"),
    ("0.1", "10\\%"),
    ("\\{1,2\\}", "(1,2)"),
    ("(1,2)", "\\{1,2\\}"),
    ("(1,2)", "1,2"),
    ("(1,2)", "(2,1)"),
    ("(2,-1)", "(2,1)"),
    ("(1,2)", "[1,2]"),
    ("(3,4]", "(3,4)"),
    ("[2,5]", "2 < x < 5"),
    ("1,-2", "1"),
    ("1,-2", "1,-2,3"),
    ("4343_6", "4343_7"),
    ("4343_6", "4334"),
    ("5 \\text{ cm}", "5 \\text{ m}"),
    ("15\\mbox{ cm}^2", "15 \\text{ cm}"),
    # algebra
    ("p - q", "p + q"),
    ("p - q", "q - p"),
    ("x<3", "x\\le 3"),
    ("x=5", "y=6"),
    ("6 - 5i", "6+5i"),
    ("x^3+3x-6", "x^3+3x+6"),
    ("\\sqrt{2}", "2"),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 3 \\end{pmatrix}"),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix} 1 & 2 \\end{pmatrix}"),
    # text
    ("\\text{on}", "no"),
    ("\\text{even}", "odd"),
    ("\\text{east}", "\\text{west}"),
    ("\\text{Evelyn}", "7"),
    ("7", "Evelyn"),
    ("\\text{(C)}", "(B)"),
    ("(-\\infty, 0]", "(-\\infty, 0)"),
    # words behind a number that are no unit
    ("3", "3 \\text{ or } 4"),
    ("3", "3 \\text{ and } 5"),
    ("3", "3 or 4"),
    ("1 \\text{ or } -2", "1"),
    ("x=1 \\text{ or } x=2", "x=1"),
    ("x\\geq 3 \\text{ or } x\\leq 1", "x\\geq 3"),
    ("1", "1 \\text{ if } x>0, -1 \\text{ otherwise}"),
    ("7 \\text{ AM}", "7 \\text{ PM}"),
    ("7", "7 \\text{ AM}"),
    ("3 \\text{ million}", "3"),
    ("3", "3 \\text{ million}"),
    ("3\\text{ hours }20\\text{ minutes}", "3"),
    ("3", "3\\text{ hours }20\\text{ minutes}"),
    ("5 \\text{ ft}", "5 \\text{ ft} \\text{ and } 3 \\text{ in}"),
    ("4", "4 \\text{ times } 3"),
    ("2", "2 \\text{ + } 3"),
    ("5", "5 \\text{ is impossible}"),
    ("12", "12 \\text{ or so}"),
    ("5", "\\text{not } 5"),
    ("60 \\text{ mph}", "60 \\text{ km/h}"),
    # letters behind an expression
    ("\\pi r^2 h", "\\pi r^2"),
    ("\\pi r^2", "\\pi r^2 h"),
    ("\\pi r^2", "\\pi r^2h"),
    ("2x^2 g", "2x^2"),
    ("\\frac{1}{2}h", "\\frac12"),
    ("\\frac12", "\\frac{1}{2} h"),
    ("5", "5m"),
    ("5m", "5"),
    ("5", "5 g h"),
    ("2", "2\\mathrm{i}"),
    ("2\\mathrm{i}", "2"),
    ("2", "2\\mathrm{e}"),
    ("3+2\\mathrm{i}", "3+2"),
    # spaces
    ("12", "1 2"),
    ("100200300", "100, 200, 300"),
]


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with MathPool() as pool:
        yield GRADERS["math"](pool)


def test_there_are_enough():
    assert len({*RIGHT, *WRONG}) == len(RIGHT) + len(WRONG) >= 80


@pytest.mark.parametrize(("gold", "answer", "correct"), [(*p, True) for p in RIGHT] + [(*p, False) for p in WRONG])
def test_a_pair(grader, gold, answer, correct):
    verdict = grader.grade(Gold(gold), f"So the answer is $\\boxed{{{answer}}}$.")
    assert (verdict.answer or "").startswith(answer[:20])
    assert verdict.correct is correct, verdict
    assert verdict.how not in ("timeout", "error"), verdict


def test_every_gold_equals_itself(grader):
    for gold in {gold for gold, _ in RIGHT + WRONG}:
        assert grader.judge(Gold(gold), gold).correct, gold


def test_a_long_answer_is_not_compared(grader):
    verdict = grader.judge(Gold("1"), "1+" * 600 + "1")
    assert (verdict.correct, verdict.how) == (False, "too long")
