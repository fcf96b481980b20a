"""Chains of arithmetic: ``a = 12; b = a + 7; c = b * 2; c = ?``.

A level is the number of operations. Operands are small and, on the right path, results stay within 1 to 99, so that a
small network can learn the sums and errors come from slips. A carry or a borrow is what makes a step hard.
"""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Literal

from llm_steer.eval.testbed.problem import Problem
from llm_steer.eval.testbed.traces import Step

Operator = Literal["+", "-", "*"]
Operation = tuple[Operator, int]

LARGEST = 99
"""Largest result on the right path; the smallest is 1."""
OPERANDS = range(2, 50)
DOUBLING = 0.1
"""Share of doublings among operations."""


def apply(value: int, operation: Operation) -> int:
    operator, operand = operation
    return value + operand if operator == "+" else value - operand if operator == "-" else value * operand


def difficulty(value: int, operation: Operation) -> int:
    """0: no carry and no borrow; 1: one with an operand below 10 or in a doubling; 2: one with a longer operand."""
    operator, operand = operation
    unit = abs(value) % 10
    if operator == "*":
        return int(unit * operand >= 10)
    carries = unit + operand % 10 >= 10 if (operator == "+") == (value >= 0) else unit < operand % 10
    return 0 if not carries else 1 if operand < 10 else 2


def slips(value: int, operation: Operation) -> tuple[tuple[int, float], ...]:
    """Wrong results of an operation with weights: the forgotten carry or borrow first, then neighbours."""
    right = apply(value, operation)
    forgotten = right + (10 if operation[0] == "-" else -10)
    wrong = [(forgotten, 5.0), *((right + offset, 1.0) for offset in (-2, -1, 1, 2)), (2 * right - forgotten, 1.0)]
    return tuple((w, weight) for w, weight in wrong if w >= 0) or ((right + 1, 1.0),)


def draw_operations(rng: random.Random, count: int) -> tuple[int, list[Operation]]:
    """A start value and ``count`` operations whose right results stay within 1 to ``LARGEST``."""
    start = value = rng.randint(2, LARGEST)
    operations: list[Operation] = []
    for _ in range(count):
        options = [k for k in _options(value) if k[0] == "*"] if rng.random() < DOUBLING else []
        if not options:
            operator = rng.choice("+-")
            options = [k for k in _options(value) if k[0] == operator] or [k for k in _options(value) if k[0] != "*"]
        operations.append(rng.choice(options))
        value = apply(value, operations[-1])
    return start, operations


@cache
def _options(value: int) -> tuple[Operation, ...]:
    """Every operation that may follow a right result."""
    sums: list[Operation] = [("+", x) for x in OPERANDS] + [("-", x) for x in OPERANDS] + [("*", 2)]
    return tuple(k for k in sums if 1 <= apply(value, k) <= LARGEST)


@cache
def count_chains(count: int) -> int:
    """Number of different chains with ``count`` operations: start values times the paths from each."""
    paths = dict.fromkeys(range(1, LARGEST + 1), 1)
    for _ in range(count):
        paths = {value: sum(paths[apply(value, k)] for k in _options(value)) for value in paths}
    return sum(paths[start] for start in range(2, LARGEST + 1))


def canonical(start: int, operations: list[Operation]) -> str:
    return f"{start}" + "".join(f" {operator} {operand}" for operator, operand in operations)


@dataclass(frozen=True)
class Chain:
    """A solution: one labelled sum a step, each from the result before it."""

    start: int
    operations: tuple[Operation, ...]
    labels: tuple[str, ...]

    def begin(self) -> tuple[int, int]:
        return 0, self.start

    def step(self, state: tuple[int, int]) -> Step | None:
        index, value = state
        if index == len(self.operations):
            return None
        operator, operand = operation = self.operations[index]
        return Step(
            f"{self.labels[index]}: {value} {operator} {operand} = ",
            str(apply(value, operation)),
            tuple((str(w), weight) for w, weight in slips(value, operation)),
            difficulty(value, operation),
        )

    def advance(self, state: tuple[int, int], written: str) -> tuple[int, int]:
        return state[0] + 1, int(written)

    def answer(self, state: tuple[int, int]) -> str:
        return str(state[1])

    def work(self, state: tuple[int, int]) -> str:
        return ""


class Arithmetic:
    """The task."""

    name: ClassVar[str] = "arithmetic"
    levels: ClassVar[tuple[int, ...]] = (2, 4, 6, 8, 12)

    def sample(self, rng: random.Random, level: int) -> Problem:
        start, operations = draw_operations(rng, level)
        first = rng.randrange(len(string.ascii_lowercase) - level)
        names = string.ascii_lowercase[first : first + level + 1]
        lines = [f"{names[0]} = {start}"]
        value = start
        for index, (operator, operand) in enumerate(operations):
            lines.append(f"{names[index + 1]} = {names[index]} {operator} {operand}")
            value = apply(value, (operator, operand))
        prompt = "; ".join([*lines, f"{names[-1]} = ?"])
        return Problem(self.name, level, prompt, str(value), canonical(start, operations))

    def walk(self, problem: Problem) -> Chain:
        lines = [line.split(" = ") for line in problem.prompt.split("; ")]
        operations: list[Operation] = []
        for _, right in lines[1:-1]:
            _, operator, operand = right.split()
            operations.append((_operator(operator), int(operand)))
        return Chain(int(lines[0][1]), tuple(operations), tuple(name for name, _ in lines[1:-1]))

    def distinct(self, level: int) -> int:
        return count_chains(level)


def _operator(text: str) -> Operator:
    if text == "+":
        return "+"
    if text == "-":
        return "-"
    if text == "*":
        return "*"
    raise ValueError(f"{text!r} is not one of + - *")
