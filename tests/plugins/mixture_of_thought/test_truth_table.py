"""Truth tables that a model wrote."""

from __future__ import annotations

from itertools import pairwise

import pytest
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
     table(rows="| R | W |\n|---|---|\n| True | maybe |\n" + "| x | y |\n")],
)  # fmt: skip
def test_what_cannot_be_read(text: str) -> None:
    if "maybe" in text:
        assert not check(read(text)).rows_right or not read(text).rows
        return
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
