"""Word problems from templates: somebody owns things, and every month something happens to them.

A level is the number of events. The months give each event a name of its own, so a step can say which event it is about.
"""

from __future__ import annotations

import random
import re
from typing import ClassVar

from llm_steer.eval.testbed.arithmetic import Chain, Operation, apply, canonical, count_chains, draw_operations
from llm_steer.eval.testbed.problem import Problem

MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
PEOPLE = {"Tom": "he", "Ann": "she", "Ben": "he", "Mia": "she", "Sam": "he", "Eva": "she", "Max": "he", "Lea": "she"}
THINGS = ("apples", "coins", "books", "stamps", "cards", "shells", "pens", "eggs")
GAINS = ("buys", "finds", "wins", "gets")
LOSSES = ("sells", "loses", "gives away", "breaks")
DOUBLES = "doubles the number"

_EVENT = re.compile(rf"In (\w+) \w+ (?:({'|'.join(GAINS)})|({'|'.join(LOSSES)})|{DOUBLES})(?: (\d+))?\.")


class Words:
    """The task."""

    name: ClassVar[str] = "words"
    levels: ClassVar[tuple[int, ...]] = (2, 4, 6, 8, 12)

    def sample(self, rng: random.Random, level: int) -> Problem:
        start, operations = draw_operations(rng, level)
        person, thing, first = rng.choice(list(PEOPLE)), rng.choice(THINGS), rng.randrange(len(MONTHS))
        sentences = [f"{person} has {start} {thing}."]
        value = start
        for index, (operator, operand) in enumerate(operations):
            deed = f"{rng.choice(GAINS if operator == '+' else LOSSES)} {operand}" if operator != "*" else DOUBLES
            sentences.append(f"In {MONTHS[(first + index) % len(MONTHS)]} {PEOPLE[person]} {deed}.")
            value = apply(value, (operator, operand))
        sentences.append(f"How many {thing} does {person} have?")
        # The same canonical text as a chain's: whoever learnt a chain has seen the problem.
        return Problem(self.name, level, " ".join(sentences), str(value), canonical(start, operations))

    def walk(self, problem: Problem) -> Chain:
        operations: list[Operation] = []
        months: list[str] = []
        for month, gain, loss, number in _EVENT.findall(problem.prompt):
            months.append(month)
            operations.append(("+", int(number)) if gain else ("-", int(number)) if loss else ("*", 2))
        return Chain(int(problem.prompt.split()[2]), tuple(operations), tuple(months))

    def distinct(self, level: int) -> int:
        return count_chains(level)
