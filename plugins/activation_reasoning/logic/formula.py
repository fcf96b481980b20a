"""Formulas: what the parser makes, and the normal forms that both semantics start from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import comb

from llm_steer.errors import SteerError

MAX_COMBINATIONS = 1_000
"""Most conjunctions that ``at least k of`` is written out as."""


@dataclass(frozen=True)
class Atom:
    """A proposition: a name, and for ``wumpus(max)`` its arguments; an argument that starts with ``?`` is a variable."""

    name: str
    args: tuple[str, ...] = ()

    def __str__(self) -> str:
        return quoted(self.name) + (f"({', '.join(map(quoted, self.args))})" if self.args else "")


@dataclass(frozen=True)
class Constant:
    value: bool

    def __str__(self) -> str:
        return "true" if self.value else "false"


@dataclass(frozen=True)
class Not:
    of: Formula

    def __str__(self) -> str:
        return f"not {_inside(self.of)}"


@dataclass(frozen=True)
class And:
    of: tuple[Formula, ...]

    def __str__(self) -> str:
        return " and ".join(map(_inside, self.of))


@dataclass(frozen=True)
class Or:
    of: tuple[Formula, ...]

    def __str__(self) -> str:
        return " or ".join(map(_inside, self.of))


@dataclass(frozen=True)
class Xor:
    """Exactly one of the two."""

    left: Formula
    right: Formula

    def __str__(self) -> str:
        return f"{_inside(self.left)} xor {_inside(self.right)}"


@dataclass(frozen=True)
class Implies:
    left: Formula
    right: Formula

    def __str__(self) -> str:
        return f"{_inside(self.left)} -> {_inside(self.right)}"


@dataclass(frozen=True)
class Iff:
    left: Formula
    right: Formula

    def __str__(self) -> str:
        return f"{_inside(self.left)} <-> {_inside(self.right)}"


@dataclass(frozen=True)
class AtLeast:
    """At least ``count`` of the formulas hold."""

    count: int
    of: tuple[Formula, ...]

    def __str__(self) -> str:
        return f"at least {self.count} of ({', '.join(map(str, self.of))})"


@dataclass(frozen=True)
class Then:
    """The atoms were detected in this order. To the logic it is one atom, which detection decides."""

    of: tuple[Atom, ...]

    def __str__(self) -> str:
        return " then ".join(map(str, self.of))


Formula = Atom | Constant | Not | And | Or | Xor | Implies | Iff | AtLeast | Then

RESERVED = frozenset(("and", "or", "not", "xor", "then", "true", "false", "at", "least", "of"))


def quoted(name: str) -> str:
    """A name as it is written in a formula."""
    plain = name.removeprefix("?").replace("_", "a").replace("-", "a")
    return name if plain.isalnum() and not name.startswith("-") and name not in RESERVED else f'"{name}"'


def _inside(formula: Formula) -> str:
    return str(formula) if isinstance(formula, Atom | Constant | AtLeast | Not) else f"({formula})"


def parts(formula: Formula) -> tuple[Formula, ...]:
    """The formulas directly inside."""
    match formula:
        case Not(of):
            return (of,)
        case And(items) | Or(items) | AtLeast(_, items) | Then(items):
            return items
        case Xor(left, right) | Implies(left, right) | Iff(left, right):
            return (left, right)
    return ()


def atoms_of(formula: Formula) -> Iterator[Atom]:
    """Every atom, those of ordered sequences included, as often as it is there."""
    if isinstance(formula, Atom):
        yield formula
    for part in parts(formula):
        yield from atoms_of(part)


def inputs_of(formula: Formula) -> Iterator[str]:
    """The logic's atoms as text: an ordered sequence is one."""
    if isinstance(formula, Atom | Then):
        yield str(formula)
    else:
        for part in parts(formula):
            yield from inputs_of(part)


def sequences_of(formula: Formula) -> Iterator[Then]:
    if isinstance(formula, Then):
        yield formula
    else:
        for part in parts(formula):
            yield from sequences_of(part)


def substitute(formula: Formula, binding: Mapping[str, str]) -> Formula:
    """Variables replaced by subjects."""
    match formula:
        case Atom(name, args):
            return Atom(name, tuple(binding.get(arg, arg) for arg in args))
        case Constant():
            return formula
        case Not(of):
            return Not(substitute(of, binding))
        case And(items):
            return And(tuple(substitute(item, binding) for item in items))
        case Or(items):
            return Or(tuple(substitute(item, binding) for item in items))
        case Xor(left, right):
            return Xor(substitute(left, binding), substitute(right, binding))
        case Implies(left, right):
            return Implies(substitute(left, binding), substitute(right, binding))
        case Iff(left, right):
            return Iff(substitute(left, binding), substitute(right, binding))
        case AtLeast(count, items):
            return AtLeast(count, tuple(substitute(item, binding) for item in items))
        case Then(items):
            return Then(tuple(Atom(a.name, tuple(binding.get(arg, arg) for arg in a.args)) for a in items))


def holds(formula: Formula, true: Mapping[str, bool]) -> bool:
    """Truth of a formula, given that of its atoms by their text."""
    match formula:
        case Atom() | Then():
            return true[str(formula)]
        case Constant(value):
            return value
        case Not(of):
            return not holds(of, true)
        case And(items):
            return all(holds(item, true) for item in items)
        case Or(items):
            return any(holds(item, true) for item in items)
        case Xor(left, right):
            return holds(left, true) != holds(right, true)
        case Implies(left, right):
            return not holds(left, true) or holds(right, true)
        case Iff(left, right):
            return holds(left, true) == holds(right, true)
        case AtLeast(count, items):
            return sum(holds(item, true) for item in items) >= count


@dataclass(frozen=True, order=True)
class Literal:
    """An atom, by its text, or its negation."""

    atom: str
    positive: bool = True

    def __str__(self) -> str:
        return self.atom if self.positive else f"not {self.atom}"

    def __invert__(self) -> Literal:
        return Literal(self.atom, not self.positive)


@dataclass(frozen=True)
class All:
    """Negation normal form: every one of ``of``; true if there is none."""

    of: tuple[Normal, ...]


@dataclass(frozen=True)
class Any:
    """Negation normal form: one of ``of``; false if there is none."""

    of: tuple[Normal, ...]


Normal = Literal | All | Any


def normal(formula: Formula, positive: bool = True) -> Normal:
    """Negation normal form: and, or, and literals.

    ``xor`` needs its operands in both polarities: each is made once and shared, so the result is a graph of the formula's
    size, and whoever walks it keeps what it found by ``id``.

    Raises:
        SteerError: ``at least k of`` is too large to be written out.
    """
    return _normal(formula, positive, {})


def _normal(formula: Formula, positive: bool, known: dict[tuple[int, bool], Normal]) -> Normal:
    key = (id(formula), positive)
    if key not in known:
        known[key] = _made(formula, positive, known)
    return known[key]


def _made(formula: Formula, positive: bool, known: dict[tuple[int, bool], Normal]) -> Normal:
    def inner(part: Formula, same: bool = True) -> Normal:
        return _normal(part, positive == same, known)

    match formula:
        case Atom() | Then():
            return Literal(str(formula), positive)
        case Constant(value):
            return All(()) if value == positive else Any(())
        case Not(of):
            return inner(of, False)
        case And(items) | Or(items):
            found = tuple(inner(item) for item in items)
            return All(found) if isinstance(formula, And) == positive else Any(found)
        case Implies(left, right):
            either = (inner(left, False), inner(right))
            return Any(either) if positive else All(either)
        case Iff(left, right) | Xor(left, right):
            differ = isinstance(formula, Xor) == positive
            yes, no = (_normal(left, True, known), _normal(left, False, known))
            same, other = (_normal(right, True, known), _normal(right, False, known))
            return Any((All((yes, other if differ else same)), All((no, same if differ else other))))
        case AtLeast(count, items):
            # "not at least k of n" is "at least n - k + 1 of the n negations".
            needed = count if positive else len(items) - count + 1
            if comb(len(items), needed) > MAX_COMBINATIONS:
                valid = f"a count with at most {MAX_COMBINATIONS} combinations"
                raise SteerError("rules", f"at least {count} of {len(items)}", valid)
            found = tuple(inner(item) for item in items)
            return Any(tuple(All(chosen) for chosen in combinations(found, needed)))
