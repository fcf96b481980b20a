"""Traces to learn from: right steps, slips that are noticed or not, needless re-checks, and stopping too early.

A task gives a :class:`Walk`: the steps of a solution. This module writes a walk down as a fallible reasoner would. The
proportions are the :class:`Mix`; they make reflection helpful in small doses and harmful in large ones:

* a slip that nobody notices spoils the answer: *banning* reflection hurts (underthinking);
* a re-check of a step that was right costs tokens and now and then talks the reasoner out of it: *forcing* reflection
  hurts (overthinking).
"""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

REFLECTIONS = ("Wait", "But", "Hmm", "Alternatively")
"""Words that open a re-check, at the start of a step or, behind a space, at the end of the step that they doubt."""
COUNTS = ("", " again", " finally")
"""What follows the first, the second and the third reflection on a step."""
STEP_END = "\n\n"
LAST_END = "." + STEP_END
"""What ends a step behind the last of them, one token: no further reflection follows. A network this small can't count
without a doubt, nor does it soon learn to look for the count; what follows one token it learns at once."""

_TOKEN = re.compile(r"\d| ?[A-Za-z]+|[^\dA-Za-z]+")


@dataclass(frozen=True)
class Mix:
    """Proportions of what goes wrong. All are probabilities in [0, 1]."""

    slip: tuple[float, ...] = (0.02, 0.35, 0.55)
    """That a first attempt is wrong, by the step's visible difficulty. It must grow with difficulty: slips at a constant
    rate leave the confidence of a step uninformative."""
    fix: float = 0.9
    """That a slip is noticed: a reflection word, and the same step again."""
    recheck: float = 0.06
    """That a right step is checked again for no reason."""
    recheck_again: float = 0.2
    """That a re-check is followed by another, up to ``len(COUNTS)``: two or more needless ones are overthinking."""
    spoil: float = 0.07
    """That a re-check comes to a wrong result. What a re-check says is believed: the next one agrees with it."""
    stop_early: float = 0.04
    """That a trace of three or more steps ends in its second half without finishing."""
    inline: float = 0.3
    """That a reflection follows on the same line instead of opening a step."""
    storm: float = 0.12
    """Share of traces into which reflection words are *forced*, between attempts and in the middle of them. They aren't
    learnt, only what follows them is: so a bias on these words doesn't make the network lose its place, and the words
    don't become likely where they don't belong."""
    gust: float = 0.5
    """Largest chance in a storm that a word is forced where a reflection may stand; each trace draws its own."""
    stray: float = 0.1
    """The same for the places inside of an attempt, as a share of that chance."""

    def at(self, progress: float) -> Mix:
        """The mix of a curriculum: ``progress`` 0 has no slips (arithmetic is learnt first), 1 has all of them."""
        scale = min(max(progress, 0.0), 1.0)
        return replace(
            self,
            slip=tuple(rate * scale for rate in self.slip),
            recheck=self.recheck * (0.25 + 0.75 * scale),
            spoil=self.spoil * scale,
            stop_early=self.stop_early * scale,
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

    text: str = ""
    """Everything after ``<think>``: thinking, its end, the box."""
    answer: str = ""
    forced: list[int] = field(default_factory=list)
    """Where in ``text`` a forced reflection word starts, the space before it included."""
    counts: Counter[str] = field(default_factory=Counter)
    """``steps``, ``slips``, ``fixes``, ``rechecks`` (needless), ``spoiled``, ``early`` (0 or 1), ``overthinking``
    (steps with two or more needless re-checks); what is forced isn't counted as a fix or a re-check."""


def write(walk: Walk, rng: random.Random, mix: Mix) -> Trace:
    """Write a walk down with the flaws of ``mix``."""
    trace = Trace()
    gust = mix.gust * rng.random() if rng.random() < mix.storm else 0.0
    state = walk.begin()
    stop_at = _early_stop(walk, rng, mix)
    while (step := walk.step(state)) is not None and trace.counts["steps"] != stop_at:
        trace.counts["steps"] += 1
        state = walk.advance(state, _attempts(step, rng, mix, gust, trace))
    trace.counts["early"] = int(step is not None)
    trace.answer = walk.answer(state)
    trace.text += closing(walk.work(state), trace.answer)
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


def _attempts(step: Step, rng: random.Random, mix: Mix, gust: float, trace: Trace) -> str:
    """Write the first attempt at a step and everything that doubts it. Returns the result that is believed.

    Args:
        gust: chance that a reflection is forced where one may stand.
    """
    counts = trace.counts
    checked = ""  # what the last re-check came to
    reflections = needless = 0
    while True:
        first = reflections == 0
        chance = mix.slip[step.difficulty] if first else mix.spoil
        wrong = bool(step.wrong) and rng.random() < chance
        result = pick_wrong(step, rng) if wrong else checked or step.right
        attempt = step.head + result
        cut = _stray(attempt, rng, gust * mix.stray)
        trace.text += attempt[:cut]
        if cut is not None:
            _reflect(rng.choice((" ", "")), reflections, rng, trace, forced=True)
            reflections += 1
            continue
        counts["slips" if first else "spoiled"] += wrong
        checked = "" if first else result
        # A reflection is wanted or not; where it stands is drawn independently of that, and so is whether one is forced.
        doubt = mix.recheck_again if not first else mix.fix if wrong else mix.recheck
        doubt = doubt if reflections < len(COUNTS) else 0.0
        inline = doubt * mix.inline
        if forced := rng.random() < gust * mix.inline:
            _reflect(" ", reflections, rng, trace, forced=True)
        elif rng.random() < inline:
            _reflect(" ", reflections, rng, trace)
        else:
            trace.text += STEP_END if reflections < len(COUNTS) else LAST_END
            if forced := rng.random() < gust:
                _reflect("", reflections, rng, trace, forced=True)
            elif rng.random() < (doubt - inline) / (1 - inline):
                _reflect("", reflections, rng, trace)
            else:
                break
        if not forced:
            noticed = first and wrong
            counts["fixes"] += noticed
            needless += not noticed
        reflections += 1
    counts["rechecks"] += needless
    counts["overthinking"] += needless >= 2
    return result


def pick_wrong(step: Step, rng: random.Random) -> str:
    """Draw one of a step's wrong results."""
    return rng.choices([w for w, _ in step.wrong], [weight for _, weight in step.wrong])[0]


def _stray(attempt: str, rng: random.Random, chance: float) -> int | None:
    """Where a word is forced into an attempt, a place before one of its tokens; None for nowhere."""
    if not chance:
        return None
    return next((m.start() for m in _TOKEN.finditer(attempt) if rng.random() < chance), None)


def _reflect(space: str, earlier: int, rng: random.Random, trace: Trace, *, forced: bool = False) -> None:
    """Write what stands between an attempt and the next one, after so many earlier ones on the same step."""
    if forced:
        trace.forced.append(len(trace.text))
    word = rng.choices(REFLECTIONS, (5, 2, 2, 1))[0]
    trace.text += f"{space}{word}{COUNTS[min(earlier, len(COUNTS) - 1)]}, "
