"""Ontologies in the manner of PrOntoQA: made-up classes, one above the other, with properties.

A level is the number of hops from the individual's class to the property that is asked for: 1, 3 or 5. Other classes and
properties stand in between to be ignored.
"""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import dataclass
from typing import ClassVar

from llm_steer.eval.testbed.logic_words import ATOMS, KINDS
from llm_steer.eval.testbed.problem import MIN_DISTINCT, Problem
from llm_steer.eval.testbed.traces import Step
from llm_steer.eval.testbed.words import PEOPLE

DISTRACTORS = 3
"""Classes beside the path."""

_RULE = re.compile(r"Every (\w+) is (a \w+|not \w+|\w+)")


class Ontology:
    """The task."""

    name: ClassVar[str] = "ontology"
    levels: ClassVar[tuple[int, ...]] = (1, 3, 5)

    def sample(self, rng: random.Random, level: int) -> Problem:
        kinds = rng.sample(KINDS, level + DISTRACTORS)
        path, beside = kinds[:level], kinds[level:]
        goal, *others = rng.sample(ATOMS, 1 + level + DISTRACTORS)
        positive = rng.random() < 0.5
        rules = [(kind, f"a {above}") for kind, above in itertools.pairwise(path)]
        rules.append((path[-1], goal if positive else f"not {goal}"))
        for index, kind in enumerate(beside):  # up to the path or to a later class, never around; some lead nowhere
            if rng.random() < 0.8:
                rules.append((kind, f"a {rng.choice([*path, *beside[index + 1 :]])}"))
        for kind, other in zip(kinds, others, strict=True):
            if rng.random() < 0.4:  # a property that nobody asks for
                rules.append((kind, other if rng.random() < 0.5 else f"not {other}"))
        rng.shuffle(rules)
        person = rng.choice(list(PEOPLE))
        lines = [*(f"Every {kind} is {what}" for kind, what in rules), f"{person} is a {path[0]}", f"Is {person} {goal}?"]
        prompt = ". ".join(lines)
        return Problem(self.name, level, prompt, str(positive), _canonical(prompt, person))

    def walk(self, problem: Problem) -> Climb:
        *rules, individual, question = problem.prompt.split(". ")
        person, _, _, kind = individual.split()
        return Climb(
            tuple((m[1], m[2]) for m in map(_RULE.fullmatch, rules) if m), person, kind, question.split()[-1].rstrip("?")
        )

    def distinct(self, level: int) -> int:
        return MIN_DISTINCT  # a test draws so many different ones


def _canonical(prompt: str, person: str) -> str:
    """The prompt with classes, properties and the individual renamed in order of appearance."""
    names: dict[str, str] = {person: "x"}
    for word in re.findall(r"\w+", prompt):
        if word in KINDS or word in ATOMS:
            names.setdefault(word, f"{'k' if word in KINDS else 'p'}{len(names)}")
    return " ".join(names.get(word, word) for word in re.findall(r"\w+", prompt))


@dataclass(frozen=True)
class Climb:
    """From class to class up to the property. State: the class or the property reached."""

    rules: tuple[tuple[str, str], ...]
    person: str
    kind: str
    goal: str

    def begin(self) -> str:
        return f"a {self.kind}"

    def step(self, state: str) -> Step | None:
        if not state.startswith("a "):
            return None
        kind = state.removeprefix("a ")
        above = [what for below, what in self.rules if below == kind]
        asked = [what for what in above if what.removeprefix("not ") == self.goal]
        classes = [what for what in above if what.startswith("a ")]
        if not (asked or classes):
            return None
        right = (asked or classes)[0]
        if asked:
            wrong = [self.goal if right.startswith("not ") else f"not {self.goal}"]
        else:
            wrong = [f"a {other}" for other in {k for k, _ in self.rules} - {kind, right.removeprefix("a ")}]
        return Step(
            f"{self.person} is {state}. Every {kind} is ",
            right,
            tuple((text, 1.0) for text in sorted(wrong)),
            int(len(above) > 1),
        )

    def advance(self, state: str, written: str) -> str:
        return written

    def answer(self, state: str) -> str:
        return {self.goal: "True", f"not {self.goal}": "False"}.get(state, "Uncertain")

    def work(self, state: str) -> str:
        return ""
