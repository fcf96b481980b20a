"""Propositional formulas: read from text, and evaluated on all assignments at once.

A formula's value on all ``2^n`` assignments is one Python integer, one bit an assignment, so a connective is one machine
loop over ``2^n / 64`` words. Assignments are counted as truth tables are written: the first variable changes slowest, and
bit ``r`` belongs to row ``r`` counted from the row in which everything is false.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import and_, or_, xor

LONGEST = 10_000
DEEPEST = 50

# Loosest first; implication groups to the right, the others to the left.
_LEVELS: tuple[tuple[str, frozenset[str]], ...] = (
    ("iff", frozenset({"↔", "<->", "<=>", "⇔", "≡", "iff"})),
    ("implies", frozenset({"→", "->", "=>", "⇒", "⊃", "implies"})),
    ("xor", frozenset({"⊕", "⊻", "xor"})),
    ("or", frozenset({"∨", "|", "||", "or", "\\/"})),
    ("and", frozenset({"∧", "&", "&&", "and", "/\\"})),
)
_NOT = frozenset({"¬", "~", "!", "not", "-", "−"})
_TRUE, _FALSE = frozenset({"⊤"}), frozenset({"⊥"})
_TOKEN = re.compile(
    r"\s*(<->|<=>|->|=>|\|\||&&|\\/|/\\|[↔⇔≡→⇒⊃⊕⊻∨|∧&¬~!−⊤⊥()\[\]-]|(?:not|and|or|xor|iff|implies)\b"
    r"|[^\W\d]\w*'*(?:\([\w\s,'-]*\))?)",
    re.IGNORECASE,
)


class FormulaError(ValueError):
    """A text that is no propositional formula."""


@dataclass(frozen=True)
class Formula:
    """A variable (``op`` is ``var``), a constant (``true``, ``false``), or a connective with its parts: one of *not*, two of
    *implies*, two or more of the others, so that a formula is never deeper than it was written."""

    op: str
    parts: tuple[Formula, ...] = ()
    name: str = ""

    @cached_property
    def variables(self) -> list[str]:
        """In order of appearance."""
        return list(dict.fromkeys(self._names()))

    def _names(self) -> Iterator[str]:
        if self.op == "var":
            yield self.name
        for part in self.parts:
            yield from part._names()

    def value(self, assignment: Mapping[str, bool]) -> bool:
        """On one assignment."""
        return bool(self.bits(assignment, 1))

    def bits(self, columns: Mapping[str, int], ones: int) -> int:
        """On many assignments at once.

        Args:
            columns: of each variable, its value in each row, one bit a row.
            ones: every row's bit.
        """
        if self.op == "var":
            return int(columns[self.name])
        if self.op in ("true", "false"):
            return ones if self.op == "true" else 0
        values = (part.bits(columns, ones) for part in self.parts)
        match self.op:
            case "not":
                return next(values) ^ ones
            case "implies":
                return (next(values) ^ ones) | next(values)
            case "and":
                return reduce(and_, values)
            case "or":
                return reduce(or_, values)
            case "xor":
                return reduce(xor, values)
        return reduce(lambda left, right: left ^ right ^ ones, values)  # iff

    @cached_property
    def size(self) -> int:
        """Variables, constants and connectives."""
        return 1 + sum(part.size for part in self.parts)


def columns(variables: Sequence[str]) -> tuple[dict[str, int], int]:
    """Each variable's column of the full table, and all ones: the arguments of :meth:`Formula.bits`."""
    rows = 1 << len(variables)
    found = {}
    for index, name in enumerate(variables):
        run = rows >> (index + 1)
        column, width = ((1 << run) - 1) << run, 2 * run
        while width < rows:
            column |= column << width
            width *= 2
        found[name] = column
    return found, (1 << rows) - 1


def parse(text: str) -> Formula:
    """Read ``(P → Q) ∧ ¬R`` and its ASCII and verbal spellings; ``Rainy(today)`` is a variable too.

    Raises:
        FormulaError: with what is wrong and where.
    """
    if len(text) > LONGEST:
        raise FormulaError(f"{len(text)} characters, more than {LONGEST}")
    tokens: list[str] = []
    at, text = 0, text.rstrip()
    while at < len(text):
        if (match := _TOKEN.match(text, at)) is None:
            raise FormulaError(f"{text[at : at + 20].strip()!r} is not part of a formula")
        tokens.append(match[1])
        at = match.end()
    reader = _Reader(tokens)
    formula = reader.level(0, 0)
    if reader.at < len(tokens):
        raise FormulaError(f"{reader.peek!r} follows a complete formula")
    return formula


class _Reader:
    def __init__(self, tokens: Sequence[str]) -> None:
        self.tokens, self.at = tokens, 0

    @property
    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1]

    def level(self, index: int, depth: int) -> Formula:
        if depth > DEEPEST:
            raise FormulaError(f"nested more than {DEEPEST} deep")
        if index == len(_LEVELS):
            return self.atom(depth)
        op, spellings = _LEVELS[index]
        left = self.level(index + 1, depth)
        if op == "implies":
            if _word(self.peek) in spellings:
                self.take()
                return Formula(op, (left, self.level(index, depth + 1)))
            return left
        parts = [left]
        while _word(self.peek) in spellings:
            self.take()
            parts.append(self.level(index + 1, depth))
        return Formula(op, tuple(parts)) if len(parts) > 1 else left

    def atom(self, depth: int) -> Formula:
        token = self.peek
        if not token:
            raise FormulaError("it ends too early")
        self.take()
        if _word(token) in _NOT:
            if depth > DEEPEST:
                raise FormulaError(f"nested more than {DEEPEST} deep")
            return Formula("not", (self.atom(depth + 1),))
        if token in ("(", "["):
            inside = self.level(0, depth + 1)
            if self.peek != {"(": ")", "[": "]"}[token]:
                raise FormulaError("a parenthesis is not closed")
            self.take()
            return inside
        if token in _TRUE or token in _FALSE:
            return Formula("true" if token in _TRUE else "false")
        if not (token[0].isalpha() or token[0] == "_") or any(_word(token) in spellings for _, spellings in _LEVELS):
            raise FormulaError(f"{token!r} stands where a variable should")
        if token[0] in "∀∃":
            raise FormulaError("quantifiers are not propositional")
        return Formula("var", name=re.sub(r"\s+", "", token))


def _word(token: str) -> str:
    return token.lower() if token.isalpha() else token


def conjunction(formulas: Sequence[Formula]) -> Formula:
    """One formula that says what all of them say."""
    return Formula("and", tuple(formulas)) if len(formulas) > 1 else formulas[0] if formulas else Formula("true")


def clauses(formula: Formula, numbers: dict[str, int], fresh: list[int]) -> tuple[int, list[list[int]]]:
    """Tseitin's translation: a literal that is equivalent to the formula, and the clauses that make it so.

    Args:
        numbers: SAT variable of each propositional one.
        fresh: ``[last number in use]``; counted up.
    """
    made: list[list[int]] = []

    def new() -> int:
        fresh[0] += 1
        return fresh[0]

    def visit(node: Formula) -> int:
        if node.op == "var":
            return numbers[node.name]
        if node.op in ("true", "false"):
            literal = new()
            made.append([literal if node.op == "true" else -literal])
            return literal
        if node.op == "not":
            return -visit(node.parts[0])
        parts = [visit(part) for part in node.parts]
        if node.op in ("xor", "iff"):
            return reduce(lambda a, b: equivalent(a, -b if node.op == "iff" else b), parts)
        # The others are disjunctions, of negated parts or negated themselves.
        if node.op == "implies":
            parts[0] = -parts[0]
        sign = -1 if node.op == "and" else 1
        literal = new()
        made.append([-literal, *(sign * part for part in parts)])
        made.extend([literal, -sign * part] for part in parts)
        return sign * literal

    def equivalent(a: int, b: int) -> int:
        literal = new()
        made.extend([[-literal, a, b], [-literal, -a, -b], [literal, -a, b], [literal, a, -b]])
        return literal

    return visit(formula), made
