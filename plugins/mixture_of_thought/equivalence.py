"""Whether two free answers are the same: numbers by value, everything else by its normal form.

The relation is symmetric and transitive by construction, so groups do not depend on the order in which answers came.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]+)\}|(\d))\s*(?:\{([^{}]+)\}|(\d))")
_THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\}|\\,)(?=\d{3}(?!\d))")
_DROPPED = re.compile(r"\\(?:left|right|,|;|!|quad|displaystyle)|\^\{?\\circ\}?|°|\\(?=[$%])")
_NUMBER = re.compile(r"([-+]?)\s*(?:(\d+)\s+)?(\d*\.?\d+)(?:\s*/\s*(\d*\.?\d+))?")


def normal(text: str) -> str:
    """The form by which answers are compared: ``1/2``, ``0.5``, ``\\frac{1}{2}`` and ``50\\%`` of it are one.

    Of an equation ``x = 3`` the right side counts. Units that are words are kept: they are part of the answer.
    """
    text = _DROPPED.sub("", text.strip().strip("$").strip())
    text = re.sub(r"\\(?:text|mathrm|mbox|textbf)\s*\{([^{}]*)\}", r"\1", text)
    text = _FRACTION.sub(lambda m: f"({m[1] or m[2]})/({m[3] or m[4]})", text)
    text = _THOUSANDS.sub("", text)
    text = re.sub(r"^[A-Za-z]\w*\s*=\s*", "", text).strip().rstrip(".").strip()
    if (number := _value(text)) is not None:
        return str(number)
    return re.sub(r"\s+", "", text).lower()


def _value(text: str) -> Fraction | None:
    percent = text.endswith("%")
    text = re.sub(r"\((-?\d*\.?\d+)\)", r"\1", text.rstrip("%").lstrip("$").strip()).replace("−", "-")
    match = _NUMBER.fullmatch(text)
    if match is None or len(text) > 100:
        return None
    sign, whole, number, below = match.groups()
    if whole is not None and (below is None or "." in number):
        return None  # "3 4" is no number, "3 1/2" is
    if below is not None and Fraction(below) == 0:
        return None
    value = Fraction(number) / (Fraction(below) if below else 1) + int(whole or 0)
    return (-value if sign == "-" else value) / (100 if percent else 1)


def groups(answers: Sequence[str]) -> list[str]:
    """For each answer the first one that equals it."""
    first: dict[str, str] = {}
    return [first.setdefault(normal(answer), answer) for answer in answers]
