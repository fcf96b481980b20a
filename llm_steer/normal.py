"""Answers in a normal form, so that most are compared without a computer algebra system."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_SPACING = re.compile(
    r"(?<!\\)\\[!,;:> ]|\\q?quad(?![a-zA-Z])|\\displaystyle|\\left(?![a-zA-Z])|\\right(?![a-zA-Z])|[$~]|\s+"
)
_TEXT = re.compile(r"\\(?:text|mbox|textbf|textit|textrm|mathrm|mathbf|operatorname|bf|rm)\s*\{([^{}]*)\}")
_DEGREE = re.compile(r"\^\{?\\circ\}?|\\degree|°|\\textdegree")
_PERCENT = re.compile(r"\\?%|\\?\bpercent\b")
_SHORT_FRACTION = re.compile(r"\\frac(?:(\d)|\{(\d+)\})(?:(\d)|\{(\d+)\})")
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:(?:,|\{,\})\d{3})+(?!\d)")
_UNITS = {
    unit: name
    for name, units in {
        "mm": "mm millimeter millimeters",
        "cm": "cm centimeter centimeters",
        "m": "m meter meters metre metres",
        "km": "km kilometer kilometers",
        "in": "in inch inches",
        "ft": "ft foot feet",
        "yd": "yd yard yards",
        "mi": "mi mile miles",
        "g": "g gram grams",
        "kg": "kg kilogram kilograms",
        "s": "s sec second seconds",
        "min": "min minute minutes",
        "h": "h hr hour hours",
        "day": "day days",
        "dollar": "dollar dollars",
        "cent": "cent cents",
        "degree": "degree degrees",
        "radian": "radian radians",
    }.items()
    for unit in units.split()
}
_SHORT_WORDS = {"yes", "no", "odd", "one", "two", "six", "ten", "all", "any"}
_POWER = {"squared": "2", "square": "2", "sq": "2", "cubed": "3", "cubic": "3", "cu": "3"}


@dataclass(frozen=True)
class Form:
    """An answer in the forms in which it is compared."""

    word: str | None
    unit: str | None
    text: str

    @classmethod
    def of(cls, answer: str) -> Form:
        quantity, unit = split_unit(answer)
        return cls(word(answer), unit, as_interval(compact(quantity)))

    @property
    def value(self) -> str:
        """The same for all spellings: two answers with one value are one vote."""
        if self.word is not None:
            return self.word
        bare = without_name(self.text)
        number = rational(bare)
        return bare if number is None else str(number)


def plain_text(answer: str) -> str:
    r"""Without ``\text{}``, ``$`` and surplus space: what a reader sees."""
    previous = None
    while previous != answer:
        previous, answer = answer, _TEXT.sub(r"\1", answer)
    return re.sub(r"\s+", " ", answer.replace("$", "").replace("\\ ", " ")).strip().rstrip(".").strip()


def word(answer: str) -> str | None:
    r"""The answer in small letters if it is text (``\text{Evelyn}``, ``east``, ``no solution``), not mathematics."""
    marked = _TEXT.search(answer) is not None
    shown = plain_text(answer).casefold()
    if not re.fullmatch(r"[^\W\d_]+(?:[ '-][^\W\d_]+)*", shown):
        return None
    # Up to three letters in a row are rather a product of variables.
    return shown if marked or shown in _SHORT_WORDS or any(len(part) > 3 for part in re.split("[ '-]", shown)) else None


def compact(answer: str) -> str:
    r"""Mathematics without what only looks: spaces, ``\left``, ``$``, degrees, percent and currency signs, thousands
    separators, a final full stop."""
    answer = answer.replace("\\$", "").replace("\\%", "%").replace("−", "-").replace("\\dfrac", "\\frac")
    answer = (
        answer.replace("\\tfrac", "\\frac")
        .replace("\\cfrac", "\\frac")
        .replace("\\lbrace", "\\{")
        .replace("\\rbrace", "\\}")
    )
    answer = _PERCENT.sub("", _DEGREE.sub("", answer))
    answer = _mixed(_SPACING.sub(" ", answer))
    answer = re.sub(r"(?<=[a-zA-Z]) (?=[a-zA-Z])", "\0", answer).replace(" ", "").replace("\0", " ")
    answer = _SHORT_FRACTION.sub(lambda m: f"\\frac{{{m[1] or m[2]}}}{{{m[3] or m[4]}}}", answer.rstrip("."))
    if not answer.startswith(("(", "[", "\\{")):  # in brackets, a comma separates
        answer = _THOUSANDS.sub(lambda m: re.sub(r"\D", "", m[0]), answer)
    return answer


def split_unit(answer: str) -> tuple[str, str | None]:
    r"""A quantity and its unit (``15\mbox{ cm}^2`` -> ``15``, ``cm2``); None where no text follows it."""
    found = re.fullmatch(
        r"(.*?[\d}\])])\s*(?:\\[ ,;!])*\s*(\\(?:text|mbox|mathrm|textrm)\s*\{.*|[a-zA-Z][a-zA-Z .^{}\d]*)", answer.strip()
    )
    if not found:
        return answer, None
    shown = plain_text(found[2])
    words = re.findall(r"[a-zA-Z]+|\d+", shown)
    if not words or not (found[2].startswith("\\") or words[0].lower() in _UNITS or words[0].lower() in _POWER):
        return answer, None
    power = next((_POWER[w.lower()] for w in words if w.lower() in _POWER), next((w for w in words if w.isdigit()), ""))
    named = [_UNITS[w.lower()] for w in words if w.lower() in _UNITS]
    return found[1], "".join(named[:1]) + (power if named else "")


def rational(answer: str) -> Fraction | None:
    r"""The value of a number in :func:`compact` form: ``070``, ``-3.50``, ``2/4``, ``\frac{2}{4}``, ``1\frac{1}{2}``."""
    number = r"(\d+\.?\d*|\.\d+)"
    try:
        if found := re.fullmatch(rf"([-+]?){number}(?:/{number})?", answer):
            value = Fraction(found[2]) / Fraction(found[3] or 1)
        elif found := re.fullmatch(rf"([-+]?)(\d*)\\frac\{{([-+]?){number}\}}\{{{number}\}}", answer):
            if found[2] and found[3]:
                return None
            value = int(found[2] or 0) + Fraction(found[4]) / Fraction(found[5]) * (-1 if found[3] == "-" else 1)
        else:
            return None
    except ZeroDivisionError:
        return None
    return -value if found[1] == "-" else value


def based(answer: str) -> tuple[str, str] | None:
    """Digits and base of a number like ``4343_6``, in :func:`compact` form."""
    found = re.fullmatch(r"([0-9A-F]+)_\{?(?:\\text\{)?(\d+|[a-z]+)\}*", answer)
    return (found[1], found[2]) if found else None


def brackets(answer: str) -> str:
    r"""What encloses a whole list: ``()``, ``[]``, ``[)``, ``(]``, ``{}``, or nothing. In :func:`compact` form."""
    for opening in ("\\{", "(", "["):
        if answer.startswith(opening):
            end = _partner(answer, len(opening))
            if end == len(answer) and "," in answer:
                return opening[-1] + answer[-1]
    return ""


def as_interval(answer: str) -> str:
    r"""``-2\le x<7`` as ``[-2,7)``, ``x\ge 3`` as ``[3,\infty)``; anything else as it is. In :func:`compact` form."""
    less, more = r"(<|\\leq?(?:slant)?(?![a-z])|≤) ?", r"(>|\\geq?(?:slant)?(?![a-z])|≥) ?"
    if found := re.fullmatch(rf"([^<>]+?){less}[a-zA-Z]{less}([^<>]+)", answer):
        low, first, second, high = found.groups()
        return f"{'(' if first == '<' else '['}{low},{high}{')' if second == '<' else ']'}"
    if found := re.fullmatch(rf"[a-zA-Z]{less}([^<>]+)", answer):
        return f"(-\\infty,{found[2]}{')' if found[1] == '<' else ']'}"
    if found := re.fullmatch(rf"[a-zA-Z]{more}([^<>]+)", answer):
        return f"{'(' if found[1] == '>' else '['}{found[2]},\\infty)"
    return re.sub(r"^[a-zA-Z]\\in ?(?=[\[(\\])", "", answer)


def without_name(answer: str) -> str:
    """``x=5`` as ``5``, ``f(x)=2x`` as ``2x``: an equation whose left side is one name."""
    return re.sub(r"^[a-zA-Z](?:\([a-z]\))?=(?=[^=]+$)", "", answer)


def _mixed(answer: str) -> str:
    r"""``1 1/2`` as ``1\frac{1}{2}``: the space is all that tells it from 11/2."""
    return re.sub(r"^\s*(-?\d+) (\d+) ?/ ?(\d+)\s*$", r"\1\\frac{\2}{\3}", answer)


def _partner(answer: str, start: int) -> int:
    """End of the bracket that opened before ``start``; -1 if it is not closed."""
    depth, i = 1, start
    while i < len(answer):
        if answer[i] == "\\":
            i += 1  # \{ and \} count as the braces that they show
            if answer[i : i + 1] not in ("{", "}"):
                continue
        if answer[i : i + 1] in ("(", "[", "{"):
            depth += 1
        elif answer[i : i + 1] in (")", "]", "}"):
            depth -= 1
        i += 1
        if depth == 0:
            return i
    return -1
