"""Whether two answers are the same, by rules that need no computer algebra; None where only that can tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llm_steer import normal
from llm_steer.normal import Form

MAX_ANSWER = 1000
"""Characters; a longer answer is not compared."""


@dataclass(frozen=True)
class Verdict:
    """What a response answered, and whether that is right."""

    answer: str | None
    """As it was written; None for no answer."""
    value: str | None
    """In a normal form: two answers with one value are one vote."""
    correct: bool
    how: str
    """``exact``, ``number``, ``text``, ``convention``, ``label``, ``math-verify``, ``program``; or why there is no verdict:
    ``none`` (no answer), ``too long``, ``timeout``, ``error``."""

    def row(self) -> dict[str, Any]:
        return {"answer": self.answer, "value": self.value, "correct": self.correct, "how": self.how}


NO_ANSWER = Verdict(None, None, False, "none")


def compare(gold: str, answer: str) -> tuple[bool, str] | None:
    """Whether an answer is right and which rule says so; None if mathematics has to be understood for it."""
    a, b = Form.of(gold), Form.of(answer)
    if a.word is not None:
        said = b.word or normal.plain_text(answer).casefold()
        return a.word == (said.strip("()") if len(a.word) == 1 else said), "text"
    if normal.spelling(gold) == normal.spelling(answer):
        return True, "exact"
    if {a.unit, b.unit} == {"dollar", "cent"}:
        amounts = [normal.rational(form.text) for form in (a, b)]
        cents = [n and n * (100 if form.unit == "dollar" else 1) for n, form in zip(amounts, (a, b), strict=True)]
        return cents[0] is not None and cents[0] == cents[1], "number"
    if a.unit and b.unit and a.unit != b.unit:
        return False, "convention"
    if a.variable and b.variable and a.variable != b.variable:
        return False, "convention"
    x, y = a.text, b.text
    if ("=" in x) != ("=" in y):
        x, y = normal.without_name(x), normal.without_name(y)
    if x == y:
        return True, "exact"
    signs = ("'", "%")  # minutes, seconds, derivatives; percent signs that are no unit
    if any(x.count(sign) != y.count(sign) for sign in signs) or normal.ellipses(x) != normal.ellipses(y):
        return False, "convention"
    numbers = normal.rational(x), normal.rational(y)
    if numbers[0] is not None and numbers[1] is not None:
        return numbers[0] == numbers[1], "number"
    others = zip(numbers, (y, x), strict=True)
    if any(n is not None and "," in text and not normal.takes_several(text) for n, text in others):
        return False, "convention"
    if (residue := normal.residue(x)) and (other := normal.residue(y)):
        return residue[1] == other[1] and (residue[0] - other[0]) % residue[1] == 0, "number"
    counts = normal.listed(x), normal.listed(y)
    if None not in counts and counts[0] != counts[1]:
        return False, "convention"
    bases = normal.based(x), normal.based(y)
    if any(bases):
        digits = [base[0] if base else text for base, text in zip(bases, (x, y), strict=True)]
        same_base = len({base[1] for base in bases if base}) == 1
        sound = all(normal.written_in(*base) for base in bases if base)
        return digits[0] == digits[1] and same_base and sound, "convention"
    if a.prose or b.prose:
        return False, "text"
    around = normal.brackets(x), normal.brackets(y)
    if {"{}"} != set(around) - {""} and around[0] != around[1]:
        return False, "convention"
    if b.word is not None and len(b.word) > 1:
        return False, "text"
    return None


def for_algebra(gold: str, answer: str) -> tuple[str, str]:
    """Both as math-verify reads them best."""
    texts = [Form.of(a).text for a in (gold, answer)]
    if ("=" in texts[0]) != ("=" in texts[1]):
        texts = [normal.without_name(t) for t in texts]
    numbers = [normal.rational(t) for t in texts]  # 2e6 is no product
    first, second = (t if n is None else str(n) for t, n in zip(texts, numbers, strict=True))
    return first, second
