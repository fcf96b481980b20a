"""Truth tables that a model wrote."""

from __future__ import annotations

from itertools import pairwise

import pytest
from llm_steer.plugins.mixture_of_thought import solving
from llm_steer.plugins.mixture_of_thought.modalities import CHECKS
from llm_steer.plugins.mixture_of_thought.truth_table import FormulaError, check, read

HEAD = "Letters:\nR = it rains\nW = the ground is wet\nPremises:\n1. R → W\n2. {second}\nStatement: {statement}\nRows:\n"
ROWS = {
    "full": "| R | W | R → W |\n|---|---|---|\n| F | F | T |\n| F | T | T |\n| T | F | F |\n| T | T | T |\n",
    "one": "| R | W |\n|:--|--:|\n| True | True |\n",
}


def table(second: str = "R", statement: str = "W", rows: str = ROWS["one"]) -> str:
    return HEAD.format(second=second, statement=statement) + rows


def test_survivors() -> None:
    found = check(read(table()))
    assert (found.verdict, found.rows_right, found.kind) == ("True", True, "survivors")
    assert check(read(table(statement="¬W"))).verdict == "False"


def test_uncertain() -> None:
    rows = "| R | W |\n|---|---|\n| 0 | 1 |\n| 1 | 1 |\n"
    found = check(read(table(second="W", statement="R", rows=rows)))
    assert (found.verdict, found.rows_right) == ("Uncertain", True)


def test_a_full_table() -> None:
    found = check(read(table(rows=ROWS["full"])))
    assert (found.verdict, found.kind, found.rows_right) == ("True", "full", True)


def test_a_wrong_cell() -> None:
    found = check(read(table(rows=ROWS["full"].replace("| T | F | F |", "| T | F | T |"))))
    assert (found.wrong, found.rows_right) == (1, False)
    assert "row 3" in found.problems[0]


def test_a_wrong_row() -> None:
    found = check(read(table(rows=ROWS["one"] + "| False | True |\n")))
    assert (found.extra, found.missing) == (1, 0)
    assert "R=False, W=True" in found.problems[0]


def test_a_missing_survivor() -> None:
    rows = "| R | W |\n|---|---|\n| 1 | 1 |\n"
    found = check(read(table(second="W", statement="R", rows=rows)))
    assert (found.missing, found.extra) == (1, 0)
    assert found.verdict == "Uncertain"


def test_a_wrong_verdict_is_seen_beside_the_text() -> None:
    made = CHECKS["table"](table() + "<answer>(B)", {"A": "True", "B": "False", "C": "Uncertain"})
    assert (made.answer, made.reason, made.sound) == ("True", "enumerated", True)


def test_columns_may_leave_variables_out() -> None:
    rows = "| W |\n|---|\n| True |\n"
    assert check(read(table(rows=rows))).rows_right


def test_premises_that_contradict_each_other() -> None:
    found = check(read(table(second="R ∧ ¬W")))
    assert found.verdict is None
    assert found.extra == 1


def test_beyond_enumeration() -> None:
    """A chain of 30 implications, by python-sat: right, with a row that does not belong, and with one missing."""
    names = [f"p{i}" for i in range(30)]
    text = "Premises:\n" + "\n".join(f"{i}. {a} → {b}" for i, (a, b) in enumerate(pairwise(names), 1))
    head = "\nStatement: p29\nRows:\n| " + " | ".join(names) + " |\n"
    true = "| " + " | ".join(["T"] * 30) + " |\n"
    found = check(read(text + "\n0. p0" + head + true))
    assert (found.verdict, found.rows_right) == ("True", True)
    bad = true.replace("T", "F", 1)
    found = check(read(text + "\n0. p0" + head + true + bad))
    assert (found.extra, found.missing) == (1, 0)
    found = check(read(text + "\n0. p1" + head + true))
    assert (found.verdict, found.missing) == ("True", 1)


@pytest.mark.parametrize(
    "text",
    ["", "no table here", "Premises:\n1. All dogs bark\nStatement: D", "Premises:\n1. P\n", "Statement: ∀x P(x)",
     table(rows="| R | W |\n|---|---|\n| True | maybe |\n")],
)  # fmt: skip
def test_what_cannot_be_read(text: str) -> None:
    with pytest.raises(FormulaError):
        read(text)


def test_many_shapes() -> None:
    text = """<truth_table>
**Let** P: it rains; Q: it pours
### Premises:
- P1: `P -> Q`   (premise 1)
* $P$.
**Conclusion:** Q
**Truth table**:
| P | Q |
|---|---|
| ✓ | ✓ |
<end_of_truth_table>"""
    found = check(read(text))
    assert (found.verdict, found.rows_right) == ("True", True)


FULL = "Premises:\nP → Q\nP\nStatement: Q\n"


@pytest.mark.parametrize(
    ("rows", "kind", "wrong", "missing", "extra"),
    [
        # a full table without one row that does not survive is one
        ("| P | Q |\n|---|---|\n| T | T |\n| T | F |\n| F | T |\n", "full", 0, 1, 0),
        ("| P | Q |\n|---|---|\n| T | F |\n| F | T |\n| F | F |\n", "full", 0, 1, 0),
        ("| P | Q |\n|---|---|\n| T | T |\n| F | T |\n", "survivors", 0, 0, 1),
        ("| P | Q |\n|---|---|\n| T | T |\n", "survivors", 0, 0, 0),
        # columns that number the rows, or are about something else
        ("| Row | P | Q |\n|---|---|---|\n| 1 | T | T |\n", "survivors", 0, 0, 0),
        ("| # | P | Q |\n|---|---|---|\n| 1 | T | T |\n| 2 | T | F |\n", "survivors", 0, 0, 1),
        ("| | P | Q |\n|---|---|---|\n| 1 | 1 | 1 |\n| 2 | 1 | 0 |\n| 3 | 0 | 1 |\n| 4 | 0 | 0 |\n", "full", 0, 0, 0),
        ("| P | Q | Remark |\n|---|---|---|\n| T | T | survives |\n", "survivors", 0, 0, 0),
        ("| P | Q | Premises | Conclusion |\n|---|---|---|---|\n| T | T | T | T |\n", "survivors", 0, 0, 0),
        ("| P | Q | Conclusion |\n|---|---|---|\n| T | T | F |\n", "survivors", 1, 0, 0),
        ("| P | Q | P |\n|---|---|---|\n| T | T | F |\n", "survivors", 1, 0, 0),
        ("| P → Q |\n|---|\n| T |\n", "none", 0, 0, 0),
        ("| Row |\n|---|\n| 1 |\n", "none", 0, 0, 0),
    ],
)
def test_what_a_table_is(rows: str, kind: str, wrong: int, missing: int, extra: int) -> None:
    found = check(read(FULL + rows))
    assert (found.kind, found.wrong, found.missing, found.extra) == (kind, wrong, missing, extra)
    assert found.verdict == "True"


def test_a_variable_may_be_called_row() -> None:
    found = check(read("Premises:\nRow\nStatement: Row\n| Row |\n|---|\n| T |\n"))
    assert (found.kind, found.rows_right) == ("survivors", True)


def test_long_tables_and_formulas() -> None:
    """No length of what a model writes is an exception."""
    many = "Premises:\n" + "1. P\n" * 900 + "Statement:\nP\n"
    chain = "Premises:\n" + "∧".join(["P"] * 3000) + "\nStatement:\nP\n"
    for text in (many, chain):
        assert CHECKS["table"](text, None).answer == "True"
    for part, count in (("P ∧ ", 3000), ("(", 3000), ("¬", 3000), ("P → ", 3000), ("1. P\n", 30_000), ("P ↔ ", 4000)):
        for text in (f"Premises:\n{part * count}P\nStatement:\nP\n", f"Premises:\nP\nStatement:\n{part * count}P\n"):
            assert CHECKS["table"](text, None).reason in ("unreadable", "no_rows")


def pigeons(holes: int) -> str:
    """One pigeon more than holes: what resolution needs exponentially many steps for."""
    lines = [" ∨ ".join(f"p{i}_{j}" for j in range(holes)) for i in range(holes + 1)]
    lines += [f"¬(p{a}_{j} ∧ p{b}_{j})" for j in range(holes) for a in range(holes + 1) for b in range(a)]
    return "Premises:\n" + "\n".join(lines) + "\nStatement:\np0_0\n"


def test_solving_ends_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CHECKS["table"](pigeons(4), None).reason == "premises_contradict"
    spent: list[dict[str, int]] = []
    leave = solving.Solver.__exit__

    def noted(self: solving.Solver, *why: object) -> None:
        spent.append(self._sat.accum_stats())
        leave(self, *why)

    monkeypatch.setattr(solving.Solver, "__exit__", noted)
    for holes in (9, 11):
        assert CHECKS["table"](pigeons(holes), None).reason == "undecided"
    # Counted at restarts.
    assert all(s["conflicts"] <= 2 * solving.CONFLICTS and s["propagations"] <= 2 * solving.PROPAGATIONS for s in spent)
    # With the verdict known, rows that take too long are told, and are not right.
    text = "Premises:\n" + "\n".join(f"a{i} ∨ b{i}" for i in range(12)) + "\nStatement: a0\n"
    names = [f"{x}{i}" for i in range(12) for x in "ab"]
    rows = f"| {' | '.join(names)} |\n|{'---|' * 24}\n| {' | '.join('T' * 24)} |\n"
    assert CHECKS["table"](text + rows, None).reason == "enumerated"
    monkeypatch.setattr(solving, "PROPAGATIONS", 70)
    found = CHECKS["table"](text + rows, None)
    assert (found.answer, found.reason, found.sound) == ("Uncertain", "enumerated", False)
