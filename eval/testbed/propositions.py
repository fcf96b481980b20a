"""Propositional logic on literals: facts, implications and disjunctions, decided by going through all assignments."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal as OneOf

Verdict = OneOf["True", "False", "Uncertain"]
Assignment = dict[str, bool]


@dataclass(frozen=True)
class Literal:
    """An atom or its negation."""

    atom: str
    positive: bool = True

    def __str__(self) -> str:
        return self.atom if self.positive else f"not {self.atom}"

    def __invert__(self) -> Literal:
        return Literal(self.atom, not self.positive)

    def holds(self, assignment: Assignment) -> bool:
        return assignment[self.atom] == self.positive

    @staticmethod
    def parse(text: str) -> Literal:
        return Literal(text.removeprefix("not "), not text.startswith("not "))


@dataclass(frozen=True)
class Premise:
    """A fact (one literal), an implication or a disjunction (two)."""

    form: OneOf["fact", "if", "either"]
    literals: tuple[Literal, ...]

    def __str__(self) -> str:
        if self.form == "fact":
            return f"It is {self.literals[0]}"
        first, second = self.literals
        return f"If {first} then {second}" if self.form == "if" else f"Either {first} or {second}"

    @property
    def clause(self) -> tuple[Literal, ...]:
        """The literals of which one must hold."""
        return (~self.literals[0], self.literals[1]) if self.form == "if" else self.literals

    def holds(self, assignment: Assignment) -> bool:
        return any(literal.holds(assignment) for literal in self.clause)

    @staticmethod
    def parse(text: str) -> Premise:
        """Inverse of ``str``."""
        word = r"((?:not )?\w+)"
        if match := re.fullmatch(rf"If {word} then {word}", text):
            return Premise("if", (Literal.parse(match[1]), Literal.parse(match[2])))
        if match := re.fullmatch(rf"Either {word} or {word}", text):
            return Premise("either", (Literal.parse(match[1]), Literal.parse(match[2])))
        if match := re.fullmatch(rf"It is {word}", text):
            return Premise("fact", (Literal.parse(match[1]),))
        raise ValueError(f"{text!r} is no premise")


def atoms_of(premises: Sequence[Premise], goal: str) -> list[str]:
    """All atoms in the order in which they are mentioned."""
    return list(dict.fromkeys([*(literal.atom for p in premises for literal in p.literals), goal]))


def assignments(atoms: Sequence[str]) -> Iterator[Assignment]:
    """All assignments, all-true first, the last atom changing fastest."""
    for values in itertools.product((True, False), repeat=len(atoms)):
        yield dict(zip(atoms, values, strict=True))


def decide(premises: Sequence[Premise], goal: str) -> Verdict | None:
    """Whether the premises entail the goal, its negation, or neither; None when they contradict each other."""
    atoms = atoms_of(premises, goal)
    everywhere = (1 << (1 << len(atoms))) - 1
    where = {atom: _column(index, len(atoms)) for index, atom in enumerate(atoms)}
    models = everywhere
    for premise in premises:
        holds = 0
        for literal in premise.clause:
            holds |= where[literal.atom] if literal.positive else everywhere ^ where[literal.atom]
        models &= holds
    yes, no = models & where[goal], models & ~where[goal]
    return None if not models else "Uncertain" if yes and no else "True" if yes else "False"


@cache
def _column(index: int, atoms: int) -> int:
    """The assignments, a bit for each, in which an atom is true."""
    return sum(1 << row for row in range(1 << atoms) if row >> index & 1)
