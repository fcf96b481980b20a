"""Proofs: the rules and facts that a conclusion was drawn from, in an order in which each step rests on earlier ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any as Anything

from .closed import BOTTOM, HELPER, Clause, ClosedProgram, derive
from .formula import Literal
from .open import Implicate, OpenProgram, clash, entails
from .soft import Weighed


@dataclass(frozen=True)
class Step:
    """One line of a proof."""

    conclusion: str
    because: tuple[str, ...]
    """What it rests on: conclusions of earlier steps, facts, and ``not x`` for what is absent or denied."""
    rules: tuple[str, ...]
    """Texts of the rules that it uses; none for a fact."""

    def to_json(self) -> dict[str, Anything]:
        return {"conclusion": self.conclusion, "because": list(self.because), "rules": list(self.rules)}


Proof = tuple[Step, ...]


def prove_closed(program: ClosedProgram, facts: Collection[str], goal: str) -> Proof | None:
    """Why an atom holds; None if it does not."""
    return prove_all_closed(program, facts, (goal,)).get(goal)


def prove_all_closed(program: ClosedProgram, facts: Collection[str], goals: Collection[str]) -> dict[str, Proof]:
    """A proof of each goal that holds."""
    true = derive(program, set(facts))
    return {goal: _trace(program, true, goal) for goal in goals if goal in true}


def prove_weighed(program: ClosedProgram, weighed: Weighed, goals: Collection[str]) -> dict[str, Proof]:
    """What gives each goal its degree, for those that have one."""
    return {goal: _trace(program, weighed.clauses, goal) for goal in goals if goal in weighed.clauses}


def _trace(program: ClosedProgram, true: Mapping[str, Clause | None], goal: str) -> Proof:
    steps: dict[str, Step] = {}
    waiting = [(goal, False)]
    while waiting:
        atom, ready = waiting.pop()
        if atom in steps:
            continue
        clause = true[atom]
        if clause is None:
            steps[atom] = Step(atom, (), ())
            continue
        leaves = _leaves(clause, true)
        if not ready:
            waiting.append((atom, True))
            waiting.extend((literal.atom, False) for literal in leaves if literal.positive)
        else:
            steps[atom] = Step(_shown(atom), tuple(str(literal) for literal in leaves), (str(program.rules[clause.rule]),))
    return tuple(steps.values())


def _leaves(clause: Clause, true: Mapping[str, Clause | None]) -> list[Literal]:
    """The literals of a body, helper atoms opened."""
    found: dict[Literal, None] = {}
    waiting = list(reversed(clause.body))
    while waiting:
        literal = waiting.pop()
        inner = true.get(literal.atom) if literal.atom[0] == HELPER else None
        if inner is None:
            found[literal] = None
        else:
            waiting.extend(reversed(inner.body))
    return list(found)


def _shown(atom: str) -> str:
    return "contradiction" if atom == BOTTOM else atom


def prove_open(program: OpenProgram, facts: Collection[Literal], goal: Literal) -> Proof | None:
    """Why a literal follows; None if it does not."""
    return _by(program, entails(program, facts, goal), str(goal), goal)


def prove_clash(program: OpenProgram, facts: Collection[Literal]) -> Proof | None:
    """Why facts and rules exclude each other; None if they do not."""
    return _by(program, clash(program, facts), "contradiction", None)


def _by(program: OpenProgram, implicate: Implicate | None, conclusion: str, goal: Literal | None) -> Proof | None:
    if implicate is None:
        return None
    because = [str(~literal) for literal in implicate.literals if literal != goal]
    facts = [Step(text, (), ()) for text in because]
    rules = tuple(str(program.rules[index]) for index in implicate.rules)
    return (*facts, Step(conclusion, tuple(because), rules))
