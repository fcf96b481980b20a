"""Propositional entailment, in three modalities: words, Python code, and a truth table.

A level is the number of atoms. Level 6 is asked in words alone and is not trained on: it shows how far they reach. The
other modalities would need hundreds of tokens more.

The system message says which modality to use. The modalities fail in different ways:
*words* goes through the premises twice and never argues by cases, so it calls some entailed goals uncertain; *code*
translates every premise and lets the program decide, so it fails where a translation is wrong; *table* goes through the
assignments that agree with the facts, and has as many chances to slip.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from llm_steer.eval.testbed.grading import VERDICTS, executed
from llm_steer.eval.testbed.logic_words import ATOMS
from llm_steer.eval.testbed.problem import MIN_DISTINCT, Problem
from llm_steer.eval.testbed.propositions import Assignment, Literal, Premise, assignments, atoms_of, decide
from llm_steer.eval.testbed.traces import Step, Walk, closing

MODALITIES = ("words", "code", "table")
FACTS = {3: 1, 4: 2, 5: 2, 6: 2}
RULES = {3: 3, 4: 4, 5: 5, 6: 6}
"""Premises of a level besides its facts: implications, and one in three a disjunction."""

_CODE_OPEN, _CODE_CLOSE = (
    "```python\nrows = [",
    ')]\nanswer = "True" if all(rows) else "Uncertain" if any(rows) else "False"\n```',
)
NOTHING = "nothing"
"""What a premise gives, in words, where nothing follows from it."""
HOLDS, FAILS = "holds", "fails"
"""What a premise does in a row of the table."""
CODE_PIECES = (_CODE_OPEN, _CODE_CLOSE, " in (0, 1)", " and (", ") and (", " if (")
"""Parts of a program that are one token each."""


class Entailment:
    """The task, in one modality."""

    def __init__(self, modality: str) -> None:
        if modality not in MODALITIES:
            raise ValueError(f"{modality!r} is not one of {', '.join(MODALITIES)}")
        self.modality = modality
        self.name = f"entailment-{modality}"
        self.levels = (3, 4, 5, 6) if modality == "words" else (3, 4, 5)

    def sample(self, rng: random.Random, level: int) -> Problem:
        wanted = rng.choice(VERDICTS)
        while True:
            atoms = rng.sample(ATOMS, level)
            premises = _draw_premises(rng, atoms, FACTS[level], RULES[level])
            known = {p.literals[0].atom for p in premises if p.form == "fact"}
            goal = rng.choice([atom for atom in atoms if atom not in known])
            if len(atoms_of(premises, goal)) == level and decide(premises, goal) == wanted:
                return make_problem(premises, goal, level, self.modality)

    def walk(self, problem: Problem) -> Walk:
        premises, goal = parse_prompt(problem.prompt)
        solver: Walk = _WALKS[self.modality](premises, goal)
        return solver

    def distinct(self, level: int) -> int:
        return MIN_DISTINCT  # a test draws so many different ones


def make_problem(premises: Sequence[Premise], goal: str, level: int, modality: str) -> Problem:
    """The problem with its right answer. Every modality of a problem has the same canonical text."""
    prompt = ". ".join([*map(str, premises), f"Is it {goal}?"])
    names = {atom: f"p{index}" for index, atom in enumerate(atoms_of(premises, goal))}
    canonical = " ".join(names.get(word, word) for word in re.findall(r"\w+", prompt))
    return Problem(f"entailment-{modality}", level, prompt, str(decide(premises, goal)), canonical, modality)


def parse_prompt(prompt: str) -> tuple[list[Premise], str]:
    """Premises and goal."""
    *premises, question = prompt.split(". ")
    return [Premise.parse(text) for text in premises], question.removeprefix("Is it ").removesuffix("?")


def _draw_premises(rng: random.Random, atoms: Sequence[str], facts: int, rules: int) -> list[Premise]:
    def literal(atom: str) -> Literal:
        return Literal(atom, rng.random() < 0.6)

    drawn = [Premise("fact", (literal(atom),)) for atom in rng.sample(atoms, facts)]
    for _ in range(rules):
        first, second = rng.sample(atoms, 2)
        drawn.append(Premise("if" if rng.random() < 2 / 3 else "either", (literal(first), literal(second))))
    rng.shuffle(drawn)
    return drawn


# -- how each modality solves a problem --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Solver:
    premises: Sequence[Premise]
    goal: str

    def work(self, state: Any) -> str:
        return ""

    @cached_property
    def facts(self) -> dict[str, bool]:
        return {p.literals[0].atom: p.literals[0].positive for p in self.premises if p.form == "fact"}

    @cached_property
    def rules(self) -> list[Premise]:
        return [p for p in self.premises if p.form != "fact"]


class InWords(_Solver):
    """One premise a step, in order, and again from the first: what follows from it and from what is known, or ``nothing``.

    State: what is known, how many premises were gone through, and whether it is over.
    """

    ROUNDS: ClassVar[int] = 2
    """Premises are gone through so often; conclusions that need another round are missed."""

    def begin(self) -> tuple[dict[str, bool], int, bool]:
        return dict(self.facts), 0, False

    def step(self, state: tuple[dict[str, bool], int, bool]) -> Step | None:
        known, done, over = state
        if over:
            return None
        if self.goal in known or done == self.ROUNDS * len(self.rules):
            return Step("so ", self.answer(state), ())
        premise = self.rules[done % len(self.rules)]
        head = f"{done // len(self.rules) + 1}. {premise} so "
        for given, concluded in (premise.clause, premise.clause[::-1]):
            if known.get(given.atom) == (not given.positive):
                backward = premise.form == "if" and given is premise.clause[1]
                wrong = ((NOTHING, 1.0), (str(~concluded), 1.0))
                return Step(head, str(concluded), wrong, 2 if backward else 1)
        return Step(head, NOTHING, tuple((str(literal), 1.0) for literal in premise.literals), 0)

    def advance(self, state: tuple[dict[str, bool], int, bool], written: str) -> tuple[dict[str, bool], int, bool]:
        known, done, _ = state
        if written in VERDICTS:
            return known, done, True
        if written == NOTHING:
            return known, done + 1, False
        literal = Literal.parse(written)
        return {**known, literal.atom: literal.positive}, done + 1, False

    def answer(self, state: tuple[dict[str, bool], int, bool]) -> str:
        return str(state[0].get(self.goal, "Uncertain"))


class InTable(_Solver):
    """One premise of one row a step, until one fails; ``so`` and the goal's value behind a row that holds.

    State: the verdicts on the rows so far, and how many premises were held against the next one.
    """

    @cached_property
    def rows(self) -> list[Assignment]:
        atoms = atoms_of(self.premises, self.goal)
        return [row for row in assignments(atoms) if all(row[atom] == value for atom, value in self.facts.items())]

    def begin(self) -> tuple[tuple[bool, ...], int]:
        return (), 0

    def step(self, state: tuple[tuple[bool, ...], int]) -> Step | None:
        verdicts, done = state
        if len(verdicts) == len(self.rows) or len(self._seen(verdicts)) == 2:
            return None
        row = self.rows[len(verdicts)]
        if done == len(self.rules):
            return Step("so ", str(Literal(self.goal, row[self.goal])), ())
        premise = self.rules[done]
        head = "" if done else f"It is {' and '.join(str(Literal(atom, value)) for atom, value in row.items())}. "
        right, wrong = (HOLDS, FAILS) if premise.holds(row) else (FAILS, HOLDS)
        # An implication whose condition is false holds: that is what people get wrong.
        vacuous = premise.form == "if" and not premise.literals[0].holds(row)
        return Step(f"{head}{premise} ", right, ((wrong, 1.0),), int(vacuous))

    def advance(self, state: tuple[tuple[bool, ...], int], written: str) -> tuple[tuple[bool, ...], int]:
        verdicts, done = state
        if written == HOLDS:
            return verdicts, done + 1
        return (*verdicts, written != FAILS), 0

    def answer(self, state: tuple[tuple[bool, ...], int]) -> str:
        seen = self._seen(state[0])
        return str(next(iter(seen))) if len(seen) == 1 else "Uncertain"

    def _seen(self, verdicts: tuple[bool, ...]) -> set[bool]:
        """Values of the goal in the rows that hold."""
        return {row[self.goal] for row, holds in zip(self.rows, verdicts, strict=False) if holds}


class InCode(_Solver):
    """One premise a step, translated; the program stands behind the thinking. State: the translations so far."""

    def begin(self) -> tuple[str, ...]:
        return ()

    def step(self, state: tuple[str, ...]) -> Step | None:
        if len(state) == len(self.premises):
            return None
        premise = self.premises[len(state)]
        right = " or ".join(map(str, premise.clause))
        return Step(f"{premise} so ", right, _mistranslations(premise, right), _difficulty(premise))

    def advance(self, state: tuple[str, ...], written: str) -> tuple[str, ...]:
        return (*state, written)

    def answer(self, state: tuple[str, ...]) -> str:
        """The model's own guess of what the program says, for those who read the box and don't run the code."""
        return executed(closing(self.work(state), "")) or "Uncertain"

    def work(self, state: tuple[str, ...]) -> str:
        atoms = atoms_of(self.premises, self.goal)
        loops = "".join(f" for {atom} in (0, 1)" for atom in atoms)
        return f"{_CODE_OPEN}{self.goal}{loops} if ({') and ('.join(state) or 'True'}{_CODE_CLOSE}"


def _difficulty(premise: Premise) -> int:
    """0: copied as it stands; 1: an implication; 2: one whose condition is a negation already."""
    return 0 if premise.form != "if" else 1 if premise.literals[0].positive else 2


def _mistranslations(premise: Premise, right: str) -> tuple[tuple[str, float], ...]:
    """The first literal not negated, and the converse."""
    if premise.form != "if":
        return ()
    first, second = premise.literals
    wrong = {f"{first} or {second}": 2.0, f"{~second} or {first}": 1.0}
    return tuple((text, weight) for text, weight in wrong.items() if text != right)


_WALKS: dict[str, Callable[[Sequence[Premise], str], Any]] = {"words": InWords, "code": InCode, "table": InTable}
