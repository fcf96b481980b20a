"""From votes to one answer."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Rule = Literal["majority", "weighted", "verified"]
Ties = Literal["priority", "random", "logprob", "alphabetical"]


@dataclass(frozen=True)
class Vote:
    """A vote for one answer. Who abstains has none."""

    answer: str
    weight: float = 1.0
    """With the rule ``weighted``."""
    verified: bool = False
    rank: int = 0
    """Place of its request: the lower, the more trusted."""
    logprob: float | None = None
    """Mean of the tokens, nats."""


@dataclass(frozen=True)
class Pending:
    """A vote that has not come, and what it can at most be."""

    weight: float = 1.0
    verifiable: bool = False


def scores(votes: Sequence[Vote], rule: Rule) -> dict[str, float]:
    """What each answer has; by the rule ``verified``, only verified votes count if there are any."""
    if rule == "verified" and any(vote.verified for vote in votes):
        votes = [vote for vote in votes if vote.verified]
    found: dict[str, list[float]] = {}
    for vote in votes:
        found.setdefault(vote.answer, []).append(vote.weight if rule == "weighted" else 1.0)
    return {answer: math.fsum(weights) for answer, weights in found.items()}  # the same in every order


def winner(votes: Sequence[Vote], rule: Rule, ties: Ties, seed: str = "") -> str | None:
    """The answer; None if nobody voted.

    Args:
        seed: decides random ties.
    """
    counted = scores(votes, rule)
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
            return _ahead(checked, float(risk), "majority")
        return not risk and _ahead(votes, float(len(pending)), "majority")
    coming = math.fsum(vote.weight for vote in pending) if rule == "weighted" else float(len(pending))
    return _ahead(votes, coming, rule)


def _ahead(votes: Sequence[Vote], coming: float, rule: Rule) -> bool:
    counted = sorted(scores(votes, rule).values(), reverse=True)
    if not counted:
        return False
    rival = counted[1] if len(counted) > 1 else 0.0
    # A margin for weights that are no sums of powers of two.
    return counted[0] > (rival + coming) * (1 + 1e-12)
