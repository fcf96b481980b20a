"""Reasoning steps of a finished output, as the plugin sees them while it runs, and their labels."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Mode = Literal["reference", "paper"]

LEXICON = (
    *("alternatively", "alternative", "alternatives", "another", "perhaps", "maybe", "wait", "but", "think again"),
    *("make sure", "just to ensure", "there any other", "some other", "should consider", "about whether", "if they have"),
    *("i was", "any errors", "or something", "let me check", "hold on", "double check", "however"),
    *("confus", "confuse", "confuses", "confused", "confusing", "different", "differently", "careful", "carefully"),
    *("sometime", "sometimes", "alternat", "alternate", "alternates", "alternated", "alternating"),
)
"""Words by which the released code labels a step as over-thinking, whatever its confidence."""
HESITATES = re.compile(rf"\b(?:{'|'.join(word.replace(' ', '[ -]') for word in LEXICON)})\b", re.IGNORECASE)


@dataclass(frozen=True)
class Step:
    """One step: output tokens ``[start, stop)``, its delimiter included."""

    start: int
    stop: int
    confidence: float
    follows_delimiter: bool
    """The token before it is a delimiter: where steering would have acted on it."""


def split(confidences: Sequence[float], boundary: Sequence[bool], inside: Sequence[bool], mode: Mode) -> list[Step]:
    """The steps of one output.

    Args:
        confidences: largest probability of the distribution that each output token was drawn from.
        boundary: the token ends a step; its own confidence does not count.
        inside: the token is where steps are steered (inside a think span).

    Returns:
        Steps that ended, by a delimiter or with the span. Delimiters that follow each other end nothing.
    """
    steps: list[Step] = []
    values: list[float] = []
    start, behind = 0, False
    for index, confidence in enumerate(confidences):
        if not inside[index]:
            if values:
                steps.append(Step(start, index, _mean(values, mode), behind))
            start, behind, values = index + 1, False, []
        elif boundary[index]:
            if values:
                steps.append(Step(start, index + 1, _mean(values, mode), behind))
            start, behind, values = index + 1, True, []
        else:
            values.append(confidence)
    return steps


def _mean(values: Sequence[float], mode: Mode) -> float:
    if mode == "reference":
        return sum(values) / len(values)
    return math.exp(sum(math.log(value) for value in values) / len(values))


def variances(confidences: Sequence[float], window: int = 2) -> list[float]:
    """Population variance over the last ``window`` steps; 0 for the first step, of fewer while there are fewer."""
    return [float(np.var(confidences[max(i + 1 - window, 0) : i + 1])) for i in range(len(confidences))]


@dataclass(frozen=True)
class Thresholds:
    """Quartiles of step confidence and of its variance."""

    q25c: float
    q75c: float
    q25v: float
    q75v: float

    @classmethod
    def of(cls, outputs: Sequence[Sequence[Step]], window: int = 2) -> Thresholds:
        """From all steps; variances from each step but an output's first."""
        confidences = [step.confidence for steps in outputs for step in steps]
        spread = [v for steps in outputs for v in variances([step.confidence for step in steps], window)[1:]]
        return cls(*np.quantile(confidences, (0.25, 0.75)).tolist(), *np.quantile(spread, (0.25, 0.75)).tolist())

    def label(self, confidence: float, variance: float, text: str, mode: Mode) -> bool | None:
        """True for over-thinking, False for under-thinking, None for neither.

        ``reference``: a word of the lexicon or low confidence, against no such word and high confidence. ``paper``: low
        confidence and high variance, against high confidence and low variance.
        """
        if mode == "paper":
            over = confidence <= self.q25c and variance >= self.q75v
            under = confidence >= self.q75c and variance <= self.q25v
        else:
            hesitates = HESITATES.search(text.translate(_PLAIN)) is not None
            over = hesitates or confidence < self.q25c
            under = not hesitates and confidence > self.q75c
        return True if over else False if under else None


_PLAIN = {ord("’"): "'", ord("‘"): "'", ord("“"): '"', ord("”"): '"', ord("–"): "-", ord("—"): "-", ord("‑"): "-"}
