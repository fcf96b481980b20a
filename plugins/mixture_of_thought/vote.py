"""From votes to one answer."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

Rule = Literal["majority", "weighted", "verified"]
Ties = Literal["priority", "random", "logprob", "alphabetical"]


@dataclass(frozen=True)
class Vote:
    """A vote for one answer. Who abstains has none."""

    answer: str
    weight: float | Fraction = 1.0
    """With the rule ``weighted``."""
    verified: bool = False
    rank: int = 0
    """Place of its request: the lower, the more trusted."""
    logprob: float | None = None
    """Mean of the tokens, nats."""


@dataclass(frozen=True)
class Pending:
    """A vote that has not come, and what it can at most be."""

    weight: float | Fraction = 1.0
    verifiable: bool = False


def scores(votes: Sequence[Vote], rule: Rule) -> dict[str, float]:
    """What each answer has; by the rule ``verified``, only verified votes count if there are any."""
    return {answer: float(score) for answer, score in _scores(votes, rule).items()}


def _scores(votes: Sequence[Vote], rule: Rule) -> dict[str, Fraction]:
    """Exactly: three times 0.1 is 0.3."""
    if rule == "verified" and any(vote.verified for vote in votes):
        votes = [vote for vote in votes if vote.verified]
    found: dict[str, Fraction] = {}
    for vote in votes:
        found[vote.answer] = found.get(vote.answer, Fraction(0)) + (exact(vote.weight) if rule == "weighted" else 1)
    return found


def winner(votes: Sequence[Vote], rule: Rule, ties: Ties, seed: str = "") -> str | None:
    """The answer; None if nobody voted.

    Args:
        seed: decides random ties.
    """
    counted = _scores(votes, rule)
    if not counted:
        return None
    most = max(counted.values())
    tied = sorted(answer for answer, score in counted.items() if score == most)
    if len(tied) == 1 or ties == "alphabetical":
        return tied[0]
    if ties == "random":
        return random.Random(seed).choice(tied)
    # A tie is between what was counted.
    verified_only = rule == "verified" and any(vote.verified for vote in votes)
    mine = [vote for vote in votes if vote.answer in tied and (vote.verified or not verified_only)]
    if ties == "logprob" and any(vote.logprob is not None for vote in mine):
        best = max(mine, key=lambda vote: (-math.inf if vote.logprob is None else vote.logprob, -vote.rank))
        return best.answer
    return min(mine, key=lambda vote: vote.rank).answer


def decided(votes: Sequence[Vote], pending: Sequence[Pending], rule: Rule) -> bool:
    """The winner is the same whatever the pending votes are, abstentions included."""
    if not pending:
        return True
    if rule == "verified":
        checked = [vote for vote in votes if vote.verified]
        risk = sum(vote.verifiable for vote in pending)
        if checked:
            return _ahead(checked, risk, "majority")
        return not risk and _ahead(votes, len(pending), "majority")
    coming = sum((exact(vote.weight) for vote in pending), Fraction(0)) if rule == "weighted" else len(pending)
    return _ahead(votes, coming, rule)


def exact(weight: float | Fraction) -> Fraction:
    """The decimal number that was written, not the binary one next to it."""
    return weight if isinstance(weight, Fraction) else Fraction(repr(weight))


def _ahead(votes: Sequence[Vote], coming: Fraction | int, rule: Rule) -> bool:
    counted = sorted(_scores(votes, rule).values(), reverse=True)
    return bool(counted) and counted[0] > (counted[1] if len(counted) > 1 else 0) + coming
