"""Answers in a normal form, so that most are compared without a computer algebra system."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from llm_steer import units

_SPACING = re.compile(
    r"(?<!\\)\\[!,;:> ]|\\q?quad(?![a-zA-Z])|\\displaystyle|\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])|[$~]|\s+"
)
_TEXT = re.compile(r"\\(?:text|mbox|textbf|textit|textrm|mathrm|mathbf|operatorname|bf|rm)\s*\{([^{}]*)\}")
_DEGREE = re.compile(r"\^\{?\\circ\}?|\\degree|°|\\textdegree")
_PERCENT = re.compile(r"(?<=[\d}\])\s])(?:\\?%|\\?\bpercent\b)(?!\s*[\da-zA-Z({]|\.\d)")
_SIGN_BEFORE = re.compile(r"\s*[-+]?\s*(\\\$|€|£)")
"""A bare ``$`` only delimits mathematics."""
_SIGNS = {"\\$": "dollar", "€": "euro", "£": "lb"}  # both are written "pounds"
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_IN_DEGREES = re.compile(rf"(\d+(?:\.\d+)?)\s*(?:{_DEGREE.pattern})")
_SHORT_FRACTION = re.compile(r"\\frac(?:(\d)|\{(\d+)\})(?:(\d)|\{(\d+)\})")
_THOUSANDS = re.compile(r"(?<![\d.(\[])\d{1,3}(?:(?:,|\{,\})\d{3})+(?!\d)")
_LIST_BY_SPACES = re.compile(r"\d+(?: \d+)+")
_GROUPS_BY_SPACES = re.compile(r"\d{1,3}(?: \d{3})+")
_GAP = r"(?:\s|\\[ ,;!]|~|\\quad)*"
_BEFORE_WORDS = re.compile(
    rf"(?:(?P<quantity>.*?(?:[\d}}\])]|\\pi(?![a-zA-Z])))(?P<gap>{_GAP})(?P<words>[a-zA-Z][a-zA-Z .^{{}}\d/²³]*)"
    r"|(?P<any>.+?)(?P<marked>\\(?:text|mbox|mathrm|textrm)\s*\{.*))",
    re.DOTALL,
)
_CONNECTOR = re.compile(
    r"(?:\s|\\[ ,;!]|~|\\quad|,)*"
    r"(?:\\(?:text|mbox|mathrm|textrm)\s*\{\s*(or|and)\s*\}|(?<![a-zA-Z\\])(or|and)(?![a-zA-Z]))"
    rf"{_GAP}"
)
_PROSE = re.compile(r"\\(?:text|mbox|textbf|textit|textrm|mathrm|mathbf)\s*\{[^{}]*[^\W\d_]{2}")
_RELATION = re.compile(r"(<|>|≤|≥|\\[lg](?:eq?|t)(?:slant)?(?![a-zA-Z])) ?")
_SPELLINGS = {
    "\\$": "",
    "€": "",
    "£": "",
    "\\%": "%",
    "−": "-",
    "\\dfrac": "\\frac",
    "\\tfrac": "\\frac",
    "\\cfrac": "\\frac",
    "\\lbrace": "\\{",
    "\\rbrace": "\\}",
    "\\varnothing": "\\emptyset",
    "**": "^",
    "∞": "\\infty",
    "½": "\\frac{1}{2}",
    "¼": "\\frac{1}{4}",
    "¾": "\\frac{3}{4}",
}
_ROOT = re.compile(r"√\s*(?:\{([^{}]*)\}|\(([^()]*)\)|(\d+|[a-zA-Z]))")
_UNSEEN = re.compile("[\u200b-\u200d\u2060\ufeff]")
_CLOCK = re.compile(r"(\d{1,2}:\d\d)\s*(?:\\text\s*\{)?\s*([ap])\.?\s*m\b\.?\s*\}?", re.IGNORECASE)
_UPRIGHT = re.compile(r"\\(?:text|mbox|textrm|mathrm|mathbf|textbf)\s*\{\s*([a-zA-Z]|[^a-zA-Z{}]*)\s*\}")
"""A letter or a sign that is set upright means what it means otherwise: ``2\\mathrm{i}``, ``7\\text{:}30``."""
_REALS = re.compile(r"(?:[a-zA-Z]\\in ?)?(?:\\mathbb\{?R\}?|\\R(?:eals)?|ℝ)")
_SET_BUILDER = re.compile(r"\\\{[a-zA-Z](?:\\in ?\\mathbb\{?R\}?)?(?:\\mid ?|:|\|)(.+)\\\}")
_REAL_LINE = "(-\\infty,\\infty)"
_UP_TO_TWENTY = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
_WORDED = {
    "infinity": "\\infty",
    "+infinity": "\\infty",
    "positive infinity": "\\infty",
    "-infinity": "-\\infty",
    "negative infinity": "-\\infty",
    "all real numbers": _REAL_LINE,
    "all reals": _REAL_LINE,
    "real numbers": _REAL_LINE,
    "the real numbers": _REAL_LINE,
    "empty set": "\\emptyset",
    "the empty set": "\\emptyset",
    **{word: str(number) for number, word in enumerate(_UP_TO_TWENTY.split())},
}
_LETTER = r"(?:[a-zA-Z]|\\(?:alpha|beta|gamma|delta|epsilon|theta|phi|varphi|rho|lambda|mu|omega|sigma|tau)(?![a-zA-Z]))"
_NAME = (
    rf"{_LETTER}(?:_\{{?\w+\}}?)?(?:\([^()=,]*\))?|[A-Z]{{2,3}}|\({_LETTER}(?:,{_LETTER})+\)|\\text\{{[^{{}}]*\}}"
    r"|\\(?:vec|overrightarrow|overline|angle) ?\{?[a-zA-Z]+\}?"
)
_SHORT_WORDS = {"yes", "no", "odd", "one", "two", "six", "ten", "all", "any"}


@dataclass(frozen=True)
class Form:
    """An answer in the forms in which it is compared."""

    word: str | None
    unit: str | None
    text: str
    variable: str | None = None
    """Of an inequality that :func:`as_interval` turns into an interval."""

    @classmethod
    def of(cls, answer: str) -> Form:
        answer = _CLOCK.sub(lambda m: f"{m[1]}\\text{{{m[2].upper()}M}}", _UNSEEN.sub("", answer))
        shown = plain_text(answer)
        # Not only words, as in \text{12 ways}
        answer = shown if re.fullmatch(r"\\text\s*\{\s*-?\d[^{}]*\}", answer.strip()) else answer
        answer = _WORDED.get(shown.casefold(), answer)
        text, unit = _alternatives(answer)
        return cls(word(answer), unit, text, _variable(compact(answer)))

    @property
    def prose(self) -> bool:
        """Whether words are left that no rule here understands: such an answer is compared as it stands."""
        return _PROSE.search(self.text) is not None

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
    previous, answer = None, re.sub(r"\\(?:display|text)style(?![a-zA-Z])", "", _UNSEEN.sub("", answer))
    while previous != answer:
        previous, answer = answer, _TEXT.sub(r"\1", answer)
    return re.sub(r"\s+", " ", answer.replace("$", "").replace("\\ ", " ")).rstrip("\\ \n").strip().rstrip(".").strip()


def spelling(answer: str) -> str:
    """An answer without the spaces that say nothing; those between digits do."""
    return re.sub(r"(?<!\d) | (?!\d)", "", plain_text(answer))


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
    answer = re.sub(r"^[\s$]*(?:\\approx|≈)", "", answer.rstrip("\\ \n"))
    answer = re.sub(r"^\*\*(.*)\*\*$", r"\1", answer.strip())  # bold in Markdown
    for old, new in _SPELLINGS.items():
        answer = answer.replace(old, new)
    answer = _ROOT.sub(lambda m: f"\\sqrt{{{m[1] or m[2] or m[3]}}}", answer)
    answer = _braced(re.sub(r"\\mathbb\s*([A-Z])", r"\\mathbb{\1}", answer))
    if _TRIGONOMETRY.search(answer):
        answer = _IN_DEGREES.sub(r"(\\frac{\1\\pi}{180})", answer)
    answer = _UPRIGHT.sub(r"\1", answer)
    answer = _grouped(_PERCENT.sub("", _DEGREE.sub("", re.sub(r"^\s*–", "-", answer))))
    answer = _listed(_mixed(_SPACING.sub(" ", answer)))
    answer = re.sub(r"\\log_(\d) ?(?=\d)", r"\\log_{\1}", answer)
    answer = re.sub(r"([_^][a-zA-Z\d]) (?=\d)", r"\1\\cdot", answer)  # x_1 2 is not x_12
    answer = re.sub(r"(?<=[a-zA-Z]) (?=[a-zA-Z])", "\0", answer).replace(" ", "").replace("\0", " ")
    answer = _SHORT_FRACTION.sub(lambda m: f"\\frac{{{m[1] or m[2]}}}{{{m[3] or m[4]}}}", answer.rstrip("."))
    return "\\emptyset" if answer == "\\{\\}" else answer


def _braced(answer: str) -> str:
    r"""Braces around arguments of ``\frac`` and ``\sqrt`` that are commands: ``\frac\pi4`` as ``\frac{\pi}{4}``."""
    symbol = r"\\(?!frac|sqrt|text|left|d?frac|math)[a-zA-Z]+"
    answer = re.sub(rf"\\(frac|sqrt)\s*({symbol})(?:\s+(?=\w))?", r"\\\1{\2}", answer)
    return re.sub(rf"(\\frac\s*(?:\{{[^{{}}]*\}}|\w))\s*({symbol}|\w)", r"\1{\2}", answer)


def _grouped(answer: str) -> str:
    """Without the commas between thousands. In brackets a comma separates, and so does one with a space behind it."""
    answer = re.sub(r",\s*\\!\s*", "{,}", answer)
    if _SPACING.sub("", answer).startswith(("(", "[", "\\{")):
        return answer
    return _THOUSANDS.sub(lambda m: re.sub(r"\D", "", m[0]), answer)


def _listed(answer: str) -> str:
    """Whole numbers with spaces between them as a list, unless they are groups of thousands."""
    bare = answer.strip()
    if _LIST_BY_SPACES.fullmatch(bare) and not _GROUPS_BY_SPACES.fullmatch(bare):
        return re.sub(" +", ",", bare)
    return answer


def split_unit(answer: str) -> tuple[str, str | None]:
    r"""A quantity and its unit (``15\mbox{ cm}^2`` -> ``15``, ``cm2``); None where something else, or nothing, follows it.

    What multiplies is part of the quantity: ``3 \text{ million dollars}`` -> ``3000000``, ``dollar``. Signs are units, too,
    and stay where they are: ``\$5`` has ``dollar``, ``5^\circ`` ``degree``.
    """
    quantity, unit = _split_words(answer)
    return quantity, unit or _sign(answer) or unit


def _sign(quantity: str) -> str | None:
    if found := _SIGN_BEFORE.match(quantity):
        return _SIGNS[found[1]]
    bare = quantity.rstrip(" $.\\")
    for pattern, name in ((_DEGREE, "degree"), (_PERCENT, "percent")):
        if any(found.end() == len(bare) for found in pattern.finditer(bare)):
            return None if _TRIGONOMETRY.search(bare) else name
    return None


def _split_words(answer: str) -> tuple[str, str | None]:
    found = _BEFORE_WORDS.fullmatch(answer.strip())
    if not found or (found["words"] and not _may_be_words(found["quantity"], found["gap"], found["words"])):
        return answer, None
    factor, words = units.factor(plain_text(found["words"] or found["marked"]))
    unit = units.unit(words) if words else None
    if words and unit is None:
        return answer, None
    return _times(found["quantity"] or re.sub(rf"{_GAP}$", "", found["any"]), factor), unit


def _may_be_words(quantity: str, gap: str, words: str) -> bool:
    """Whether letters without ``\\text{}`` may be words: behind other letters they are variables, as in ``2x^2 g``, and a
    single one is, unless it stands apart from a plain number."""
    if re.search(r"(?<![a-zA-Z\\])[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "\\\\", quantity)):
        return False
    alone = re.match(r"[a-zA-Z](?![a-zA-Z])", words) is not None
    return not alone or (gap != "" and re.fullmatch(r"\\?\$?-?[\d.,]+", quantity) is not None)


def _times(quantity: str, factor: int) -> str:
    if factor == 1:
        return quantity
    number = rational(compact(quantity))
    return f"{quantity}\\cdot{factor}" if number is None else str(number * factor)


def _alternatives(answer: str) -> tuple[str, str | None]:
    r"""An answer in compact form, and its unit. ``x=1 \text{ or } x=2`` is a list, ``x<1 \text{ or } x>3`` a union."""
    pieces = _CONNECTOR.split(answer.strip())
    parts = [split_unit(piece) for piece in pieces[::3]]
    named = {unit for _, unit in parts if unit}
    if len(named) > 1 or not all(quantity for quantity, _ in parts):
        return as_interval(compact(answer)), None
    texts = [compact(quantity) for quantity, _ in parts]
    unit = named.pop() if named else parts[-1][1]
    if len(texts) == 1:
        return as_interval(texts[0]), unit
    if not any(map(_RELATION.search, texts)):
        return ",".join(texts), unit
    unions = {*pieces[1::3], *pieces[2::3]} <= {"or", None}
    intervals = [as_interval(text) for text in texts]
    if unions and all(old != new for old, new in zip(texts, intervals, strict=True)):
        return "\\cup".join(intervals), unit
    return compact(answer), None


def rational(answer: str) -> Fraction | None:
    r"""The value of a number in :func:`compact` form: ``070``, ``-3.50``, ``2/4``, ``\frac{2}{4}``, ``1\frac{1}{2}``,
    ``1e3``, ``0.1\overline{6}``."""
    number = r"(\d+\.?\d*|\.\d+)"
    try:
        if found := re.fullmatch(r"([-+]?)(\d*)\.(\d*)\\(?:overline|bar)\{?(\d+)\}?", answer):
            value = _recurring(found[2], found[3], found[4])
        elif found := re.fullmatch(rf"([-+]?)({number}[eE][-+]?\d{{1,3}})", answer):
            value = Fraction(found[2])
        elif found := re.fullmatch(rf"([-+]?){number}(?:/{number})?", answer):
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


def _recurring(whole: str, fixed: str, period: str) -> Fraction:
    """``0.1666...`` from ``0``, ``1`` and ``6``: 16 less 1, over 90."""
    return Fraction(int(whole + fixed + period) - int("0" + whole + fixed), (10 ** len(period) - 1) * 10 ** len(fixed))


def based(answer: str) -> tuple[str, str] | None:
    """Digits and base of a number like ``4343_6``, in :func:`compact` form."""
    found = re.fullmatch(r"([0-9A-F]+)_\{?(?:\\text\{)?(\d+|[a-z]+)\}*", answer)
    return (found[1], found[2]) if found else None


def written_in(digits: str, base: str) -> bool:
    """Whether a base has these digits."""
    return not base.isdigit() or max(int(digit, 16) for digit in digits) < int(base[:3])


def residue(answer: str) -> tuple[int, int] | None:
    r"""Number and modulus of ``4 \pmod 3`` or ``x \equiv 4 \pmod{3}``, in :func:`compact` form."""
    found = re.fullmatch(r"(?:[a-zA-Z]\\equiv ?)?(-?\d{1,30})\(?\\?[pb]?mod ?\{?(\d{1,30})\}?\)?", answer)
    return (int(found[1]), int(found[2])) if found and int(found[2]) else None


def ellipses(answer: str) -> int:
    """How often it says "and so on"."""
    return len(re.findall(r"\\[lc]?dots[bcimo]?(?![a-zA-Z])|\.\.\.|…", answer))


def listed(answer: str) -> int | None:
    r"""Number of items of a list with or without braces; None for anything else. In :func:`compact` form."""
    if brackets(answer) == "{}":
        answer = answer[2:-2]
    if answer.startswith(("(", "[")) or "," not in answer or re.search(r"\\[mp][mp](?![a-zA-Z])", answer):
        return None
    depth, items = 0, 1
    for sign in answer:
        depth += (sign in "([{") - (sign in ")]}")
        items += sign == "," and depth == 0
    return items


def takes_several(answer: str) -> bool:
    r"""Whether its commas are between the arguments of a function, as in ``\max(1,2)``."""
    return "," not in re.sub(r"\\(?:operatorname\{)?(?:gcd|lcm|max|min)\}?\([^()]*\)", "", answer)


def brackets(answer: str) -> str:
    r"""What encloses a whole list: ``()``, ``[]``, ``[)``, ``(]``, ``{}``, or nothing. In :func:`compact` form."""
    for opening in ("\\{", "(", "["):
        if answer.startswith(opening):
            end = _partner(answer, len(opening))
            if end == len(answer) and ("," in answer or opening == "["):
                return opening[-1] + answer[-1]
    return ""


def as_interval(answer: str) -> str:
    r"""``-2\le x<7`` as ``[-2,7)``, ``x\ge 3`` as ``[3,\infty)``; anything else as it is. In :func:`compact` form."""
    if _REALS.fullmatch(answer):
        return _REAL_LINE
    if built := _SET_BUILDER.fullmatch(answer):
        inner = as_interval(built[1])
        return answer if inner == built[1] else inner
    if other := re.fullmatch(r"[a-zA-Z](?:\\neq?(?![a-zA-Z]) ?|≠)([^,=<>]+)", answer):
        return f"(-\\infty,{other[1]})\\cup({other[1]},\\infty)"
    sides = _RELATION.split(answer)
    if len(sides) not in (3, 5) or len({_falls(relation) for relation in sides[1::2]}) != 1:
        return re.sub(r"^[a-zA-Z]\\in ?(?=[\[(\\])", "", answer)
    if _falls(sides[1]):
        sides = sides[::-1]
    if len(sides) == 3:
        sides = ["-\\infty", "<", *sides] if _is_name(sides[0]) else [*sides, "<", "\\infty"]
    low, first, name, second, high = (side.strip() for side in sides)
    if not _is_name(name) or not low or not high or "," in low + high or "=" in low + high:
        return answer
    return f"{'(' if _strict(first) else '['}{low},{high}{')' if _strict(second) else ']'}"


def _variable(answer: str) -> str | None:
    r"""``x`` of ``-2\le x<7`` and of ``x<1\text{or}x>3``, in :func:`compact` form; None where there is no one name."""
    names = {side.strip() for side in _RELATION.split(answer) if _is_name(side)} if _RELATION.search(answer) else set()
    return names.pop() if len(names) == 1 else None


def _is_name(text: str) -> bool:
    return re.fullmatch(r"\s*[a-zA-Z]\s*", text) is not None


def _falls(relation: str) -> bool:
    return relation in (">", "≥") or relation.startswith("\\g")


def _strict(relation: str) -> bool:
    return relation in ("<", ">", "\\lt", "\\gt")


def without_name(answer: str) -> str:
    """``x=5`` as ``5``, ``f(x)=2x`` as ``2x``, ``x=1,x=2`` as ``1,2``, ``(x,y)=(1,2)`` as ``(1,2)``: equations whose left
    side is one name, or names in brackets."""
    found = [re.fullmatch(rf"({_NAME})=([^=]+)", part) for part in re.split(r",(?=[a-zA-Z]=)", answer)]
    if None in found or len({part[1] for part in found if part}) != 1:
        return answer
    return ",".join(part[2] for part in found if part)


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
