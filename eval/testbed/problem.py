"""What a task is: problems by seed, and a hash that keeps training and test apart."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from llm_steer.eval.testbed.traces import Walk

Split = Literal["train", "test"]

TEST_SHARE = 26 / 256
"""Share of all problems that training never sees."""
MIN_DISTINCT = 20_000
"""A level with fewer distinct problems is not scored: a sample of 2,000 would repeat itself."""


@dataclass(frozen=True)
class Problem:
    """One problem. Two problems that ask for the same computation have the same ``canonical`` text."""

    task: str
    level: int
    prompt: str
    """What the user says."""
    answer: str
    """What stands in the box of a right response."""
    canonical: str
    """The problem without names and wording: what the split hashes."""
    system: str = ""
    """System message; names the modality where a task has several."""

    @property
    def split(self) -> Split:
        return "test" if hashlib.sha256(self.canonical.encode()).digest()[0] / 256 < TEST_SHARE else "train"

    @property
    def messages(self) -> list[dict[str, str]]:
        """Chat messages for ``apply_chat_template``."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt}]


class Task(Protocol):
    """A family of problems with difficulty levels."""

    @property
    def name(self) -> str: ...

    @property
    def levels(self) -> tuple[int, ...]:
        """Level numbers, easiest first; a level's number is its count of steps, atoms or hops."""
        ...

    def sample(self, rng: random.Random, level: int) -> Problem:
        """Draw a problem of either split."""
        ...

    def walk(self, problem: Problem) -> Walk:
        """How the problem is solved step by step; what traces are written from."""
        ...

    def distinct(self, level: int) -> int:
        """Number of distinct canonical problems, or a lower bound of it."""
        ...


def draw(task: Task, rng: random.Random, level: int, split: Split) -> Problem:
    """Draw a problem of one split."""
    while (problem := task.sample(rng, level)).split != split:
        pass
    return problem


def held_out(task: Task, level: int, count: int, seed: int = 0) -> list[Problem]:
    """``count`` different held-out problems.

    Raises:
        ValueError: the level has too few distinct problems to be scored.
    """
    if task.distinct(level) < MIN_DISTINCT:
        raise ValueError(f"level {level} of {task.name} has fewer than {MIN_DISTINCT} distinct problems: it isn't scored")
    rng = random.Random(f"test/{task.name}/{level}/{seed}")
    problems: dict[str, Problem] = {}
    while len(problems) < count:
        problem = draw(task, rng, level, "test")
        problems.setdefault(problem.canonical, problem)
    return list(problems.values())
