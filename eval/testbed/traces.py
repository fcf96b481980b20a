"""Traces to learn from: right steps, slips that are noticed or not, needless re-checks, and stopping too early.

A task gives a :class:`Walk`: the steps of a solution. This module writes a walk down as a fallible reasoner would. The
proportions are the :class:`Mix`; they make reflection helpful in small doses and harmful in large ones:

* a slip that nobody notices spoils the answer: *banning* reflection hurts (underthinking);
* a re-check of a step that was right costs tokens and now and then talks the reasoner out of it: *forcing* reflection
  hurts (overthinking).
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

REFLECTIONS = ("Wait", "But", "Hmm", "Alternatively")
"""Words that open a re-check, at the start of a step or, behind a space, at the end of the step that they doubt."""
STEP_END = "\n\n"


@dataclass(frozen=True)
class Mix:
    """Proportions of what goes wrong. All are probabilities in [0, 1]."""

    slip: tuple[float, ...] = (0.02, 0.35, 0.55)
    """That a first attempt is wrong, by the step's visible difficulty. It must grow with difficulty: slips at a constant
    rate leave the confidence of a step uninformative."""
    fix: float = 0.88
    """That a slip is noticed: a reflection word, the same step again, right."""
    recheck: float = 0.06
    """That a right step is checked again for no reason."""
    recheck_again: float = 0.2
    """That one needless re-check is followed by another, up to ``max_rechecks``: two or more are overthinking."""
    max_rechecks: int = 3
    spoil: float = 0.15
    """That a needless re-check comes to a wrong result, which is believed."""
    stop_early: float = 0.04
    """That a trace of three or more steps ends in its second half without finishing."""
    inline: float = 0.3
    """That a reflection follows on the same line instead of opening a step."""

    def at(self, progress: float) -> Mix:
        """The mix of a curriculum: ``progress`` 0 has no slips (arithmetic is learnt first), 1 has all of them."""
        scale = min(max(progress, 0.0), 1.0)
        return Mix(
            tuple(rate * scale for rate in self.slip),
            self.fix,
            self.recheck * (0.25 + 0.75 * scale),
            self.recheck_again,
            self.max_rechecks,
            self.spoil * scale,
            self.stop_early * scale,
            self.inline,
        )


@dataclass(frozen=True)
class Step:
    """One step of a solution: ``head + right`` written down."""

    head: str
    """What the step says before its result. A function of the problem and of the results so far."""
    right: str
    wrong: tuple[tuple[str, float], ...]
    """Wrong results with weights; empty where a slip makes no sense."""
    difficulty: int = 0
    """Index into ``Mix.slip``."""


class Walk(Protocol):
    """A solution as steps that follow from what was written, right or wrong."""

    def begin(self) -> Any: ...

    def step(self, state: Any) -> Step | None:
        """The next step; None when the solution is complete."""
        ...

    def advance(self, state: Any, written: str) -> Any:
        """The state after a step whose result was written as ``written``."""
        ...

    def answer(self, state: Any) -> str:
        """What goes into the box, from whatever state the trace stopped in."""
        ...

    def work(self, state: Any) -> str:
        """What stands between the end of thinking and the box: a program, or nothing."""
        ...


@dataclass
class Trace:
    """A written trace and what is in it."""

    text: str
    """Everything after ``<think>``: thinking, its end, the box."""
    answer: str
    counts: Counter[str] = field(default_factory=Counter)
    """``steps``, ``slips``, ``fixes``, ``rechecks`` (needless), ``spoiled``, ``early`` (0 or 1), ``overthinking``
    (steps with two or more needless re-checks)."""


def write(walk: Walk, rng: random.Random, mix: Mix) -> Trace:
    """Write a walk down with the flaws of ``mix``."""
    trace = Trace("", "")
    parts: list[str] = []
    state = walk.begin()
    stop_at = _early_stop(walk, rng, mix)
    while (step := walk.step(state)) is not None and trace.counts["steps"] != stop_at:
        trace.counts["steps"] += 1
        written = _attempts(step, rng, mix, parts, trace.counts)
        state = walk.advance(state, written)
    trace.counts["early"] = int(step is not None)
    trace.answer = walk.answer(state)
    trace.text = "".join(parts) + closing(walk.work(state), trace.answer)
    return trace


def closing(work: str, answer: str) -> str:
    """The end of every trace: no more thinking, the work if there is any, the box."""
    return f"</think>{STEP_END}{work}{STEP_END if work else ''}\\boxed{{{answer}}}"


def _early_stop(walk: Walk, rng: random.Random, mix: Mix) -> int:
    """Number of steps after which the trace gives up; -1 for never."""
    if rng.random() >= mix.stop_early:
        return -1
    state, length = walk.begin(), 0
    while (step := walk.step(state)) is not None:
        state, length = walk.advance(state, step.right), length + 1
    return rng.randint((length + 1) // 2, length - 1) if length >= 3 else -1


def _attempts(step: Step, rng: random.Random, mix: Mix, parts: list[str], counts: Counter[str]) -> str:
    """Write the first attempt at a step and everything that doubts it. Returns the result that is believed."""
    result = step.right
    if step.wrong and rng.random() < mix.slip[step.difficulty]:
        counts["slips"] += 1
        result = pick_wrong(step, rng)
    parts.append(step.head + result)
    if result != step.right:
        if rng.random() >= mix.fix:
            parts.append(STEP_END)
            return result
        counts["fixes"] += 1
        result = step.right
        parts.append(_reflection(rng, mix) + step.head + result)
    rechecks, chance = 0, mix.recheck
    while rechecks < mix.max_rechecks and rng.random() < chance:
        rechecks, chance = rechecks + 1, mix.recheck_again
        spoiled = bool(step.wrong) and rng.random() < mix.spoil
        result = pick_wrong(step, rng) if spoiled else step.right
        parts.append(_reflection(rng, mix) + step.head + result)
        if spoiled:
            counts["spoiled"] += 1
            break
    counts["rechecks"] += rechecks
    counts["overthinking"] += rechecks >= 2
    parts.append(STEP_END)
    return result


def pick_wrong(step: Step, rng: random.Random) -> str:
    """Draw one of a step's wrong results."""
    return rng.choices([w for w, _ in step.wrong], [weight for _, weight in step.wrong])[0]


def _reflection(rng: random.Random, mix: Mix) -> str:
    """What stands between an attempt and the next one."""
    word = rng.choices(REFLECTIONS, (5, 2, 2, 1))[0]
    return f"{' ' if rng.random() < mix.inline else STEP_END}{word}, "
