"""Formulas against sympy."""

from __future__ import annotations

import itertools
import random

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_steer.plugins.mixture_of_thought.formula import (
    DEEPEST,
    LONGEST,
    Formula,
    FormulaError,
    columns,
    conjunction,
    parse,
)
from llm_steer.plugins.mixture_of_thought.truth_table import Table, _enumerate, _solve, verdict

SYMBOLS = {"and": "∧", "or": "∨", "implies": "→", "iff": "↔", "xor": "⊕"}
IN_SYMPY = {"and": sympy.And, "or": sympy.Or, "implies": sympy.Implies, "xor": sympy.Xor, "iff": sympy.Equivalent}


def text_of(formula: Formula) -> str:
    if formula.op == "var":
        return formula.name
    if formula.op in ("true", "false"):
        return "⊤" if formula.op == "true" else "⊥"
    if formula.op == "not":
        return f"¬{text_of(formula.parts[0])}"
    left, right = map(text_of, formula.parts)
    return f"({left} {SYMBOLS[formula.op]} {right})"


def in_sympy(formula: Formula) -> sympy.Basic:
    if formula.op == "var":
        return sympy.Symbol(formula.name)
    if formula.op in ("true", "false"):
        return sympy.true if formula.op == "true" else sympy.false
    parts = [in_sympy(part) for part in formula.parts]
    return sympy.Not(parts[0]) if formula.op == "not" else IN_SYMPY[formula.op](*parts)


def draw(rng: random.Random, names: list[str], size: int) -> Formula:
    if size <= 1:
        return Formula("var", name=rng.choice(names))
    if rng.random() < 0.25:
        return Formula("not", (draw(rng, names, size - 1),))
    left = rng.randint(1, size - 1)
    return Formula(rng.choice(list(SYMBOLS)), (draw(rng, names, left), draw(rng, names, size - left)))


def formulas(names: str) -> st.SearchStrategy[Formula]:
    variables = st.sampled_from(list(names)).map(lambda name: Formula("var", name=name))
    constants = st.sampled_from([Formula("true"), Formula("false")])
    return st.recursive(
        variables | constants,
        lambda inner: st.one_of(
            st.builds(lambda a: Formula("not", (a,)), inner),
            st.builds(lambda op, a, b: Formula(op, (a, b)), st.sampled_from(list(SYMBOLS)), inner, inner),
        ),
        max_leaves=8,
    )


@given(formulas("PQRS"))
def test_written_and_read_again(formula: Formula) -> None:
    assert parse(text_of(formula)) == formula


@given(formulas("PQRS"))
def test_bits_are_the_rows_of_a_truth_table(formula: Formula) -> None:
    names = ["P", "Q", "R", "S"]
    column, ones = columns(names)
    bits = formula.bits(column, ones)
    expression = in_sympy(formula)
    for row, values in enumerate(itertools.product([False, True], repeat=4)):
        assignment = dict(zip(names, values, strict=True))
        want = bool(expression.subs({sympy.Symbol(n): v for n, v in assignment.items()}))
        assert bool(bits >> row & 1) == want == formula.value(assignment)


@pytest.mark.parametrize("count", [3, 8, 14, 20])
def test_verdicts_agree_with_sympy(count: int) -> None:
    """Up to 16 variables by enumeration, beyond by python-sat."""
    rng = random.Random(count)
    names = [f"v{i}" for i in range(count)]
    seen = set()
    for _ in range(25):
        premises = [draw(rng, names, rng.randint(1, 5)) for _ in range(count // 2)]
        statement = draw(rng, names, rng.randint(1, 4))
        found = verdict(premises, statement)
        alive = in_sympy(conjunction(premises))
        holds = sympy.satisfiable(sympy.And(alive, in_sympy(statement))) is not False
        fails = sympy.satisfiable(sympy.And(alive, sympy.Not(in_sympy(statement)))) is not False
        assert found == {(True, False): "True", (False, True): "False", (True, True): "Uncertain"}.get((holds, fails))
        seen.add(found)
    assert {"True", "Uncertain"} <= seen


@settings(max_examples=60)
@given(st.lists(formulas("PQRS"), max_size=3), formulas("PQRS"), st.randoms(use_true_random=False))
def test_both_ways_of_checking_agree(premises: list[Formula], statement: Formula, rng: random.Random) -> None:
    head = tuple(Formula("var", name=name) for name in "PQR"[: rng.randint(1, 3)])
    rows = tuple(tuple(rng.random() < 0.5 for _ in head) for _ in range(rng.randint(1, 4)))
    table = Table(tuple(premises), statement, head, rows)
    enumerated, solved = _enumerate(table), _solve(table)
    assert enumerated.verdict == solved.verdict
    if enumerated.kind != "full":
        assert (enumerated.missing, enumerated.extra) == (solved.missing, solved.extra)


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("P -> Q -> R", "P → (Q → R)"),
        ("P & Q | R", "(P ∧ Q) ∨ R"),
        ("not P and Q", "(¬P) ∧ Q"),
        ("P <-> Q -> R", "P ↔ (Q → R)"),
        ("~~P", "¬¬P"),
        ("P iff not Q", "P ↔ ¬Q"),
        ("Rainy( today ) => Wet(the ground)", "Rainy(today) → Wet(theground)"),
        ("[P || Q] && !R", "(P ∨ Q) ∧ ¬R"),
        ("P implies Q or R", "P → (Q ∨ R)"),
        ("not(P)", "¬P"),
        ("p_1 ∧ x'", "p_1 ∧ x'"),
    ],
)
def test_spellings(text: str, same: str) -> None:
    assert parse(text) == parse(same)


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "P Q", "(P", "P)", "P ∧", "∧ P", "P ∧ ∧ Q", "∀x P(x)", "P = Q", "{P}", "P; import os", "P → ] Q", "(P]"),
        *("1 + 1", "(" * 500 + "P" + ")" * 500, "¬" * 5000 + "P", "P" * (LONGEST + 1)),
    ],
)
def test_what_is_no_formula(text: str) -> None:
    with pytest.raises(FormulaError):
        parse(text)


def test_deep_but_not_too_deep() -> None:
    depth = DEEPEST - 5
    assert parse("(" * depth + "P" + ")" * depth) == Formula("var", name="P")
    assert len(parse(" ∧ ".join(["P"] * 400)).variables) == 1
