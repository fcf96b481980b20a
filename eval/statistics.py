"""Accuracy over problems and samples, and what may be said about a difference.

A table of results is a float matrix ``[problems, samples]``: 1 right, 0 wrong, NaN where an answer is missing. Two sources
of error are kept apart: that other problems might have been asked (problem error), and that other answers might have been
drawn (sampling error). Methods are compared problem by problem, so what a problem's difficulty does to both is gone.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]

LEVEL = 0.95
ROUNDS = 10_000
"""Bootstrap resamples."""
POWER = 0.8

_NORMAL = NormalDist()
_BLOCK = 2**22
"""Resampled values in memory at a time."""


@dataclass(frozen=True)
class Estimate:
    """A mean with its interval, both on the scale of the values."""

    value: float
    low: float
    high: float
    error: float
    """Standard error."""


@dataclass(frozen=True)
class Errors:
    """Standard errors of a mean over problems."""

    problems: float
    """What the choice of problems contributes."""
    sampling: float
    """What the draw of answers contributes; NaN with one sample, where the two cannot be told apart."""
    total: float


@dataclass(frozen=True)
class Comparison:
    """One method against another on the problems that both answered."""

    problems: int
    difference: Estimate
    better: int
    """Problems on which the first has the higher mean."""
    worse: int
    p: float
    """Exact sign test over these."""
    detectable: float
    """The smallest true difference that such a comparison shows (5 %, two-sided) four times out of five; NaN where no
    problem differed, so that nothing is known of how much they do."""


def per_problem(matrix: Matrix) -> Matrix:
    """Each problem's mean over its samples, those without any left out."""
    answered = ~np.isnan(matrix)
    kept = answered.any(1)
    return np.asarray(np.nansum(matrix[kept], 1) / answered[kept].sum(1), dtype=np.float64)


def avg_at_k(matrix: Matrix) -> Estimate:
    """Mean accuracy: the expected accuracy of one answer."""
    return mean(per_problem(matrix))


def pass_at_k(matrix: Matrix, k: int) -> float:
    """Probability that at least one of ``k`` answers is right, without bias (Chen et al. 2021, "Evaluating Large Language
    Models Trained on Code", eq. 1): ``1 - C(n - c, k) / C(n, k)``, averaged over problems with at least k answers; NaN if
    there is none."""
    n = (~np.isnan(matrix)).sum(1)
    c = np.nansum(matrix, 1)
    enough = n >= k
    if not enough.any():
        return math.nan
    n, c = n[enough], c[enough]
    # The product of (n - c - i) / (n - i): the chance that k draws without replacement are all wrong.
    wrong = np.ones(len(n))
    for i in range(k):
        wrong *= np.clip(n - c - i, 0, None) / (n - i)
    return float((1 - wrong).mean())


def maj_at_k(votes: Sequence[Sequence[tuple[Hashable | None, bool]]]) -> float:
    """Accuracy of the most frequent answer; a tie counts as the share of the tied answers that is right.

    Args:
        votes: for each problem, each sample's answer in a normal form (None: no answer, no vote) and whether it is right.
    """
    scores = []
    for problem in votes:
        counts: dict[Hashable, list[bool]] = {}
        for answer, correct in problem:
            if answer is not None:
                counts.setdefault(answer, []).append(correct)
        most = max(map(len, counts.values()), default=0)
        tied = [any(correct) for correct in counts.values() if len(correct) == most]
        scores.append(sum(tied) / len(tied) if tied else 0.0)
    return sum(scores) / len(scores) if scores else math.nan


def mean(values: Matrix, *, rounds: int = ROUNDS, seed: int = 0) -> Estimate:
    """Mean of independent values with a bootstrap interval of 95 %.

    Quantiles of resampled means, taken further out than 2.5 % by as much as Student's t exceeds the normal distribution
    (Hesterberg 2015, "What Teachers Should Know About the Bootstrap", section 3.2): plain ones are too narrow for few
    values.
    """
    n = len(values)
    if n == 0:
        return Estimate(math.nan, math.nan, math.nan, math.nan)
    value = float(values.mean())
    if n == 1:
        return Estimate(value, math.nan, math.nan, math.nan)
    means = resampled_means(values, rounds, seed)
    tail = _NORMAL.cdf(-math.sqrt(n / (n - 1)) * student_quantile(1 - (1 - LEVEL) / 2, n - 1))
    low, high = np.quantile(means, (tail, 1 - tail))
    return Estimate(value, float(low), float(high), float(values.std(ddof=1) / math.sqrt(n)))


def resampled_means(values: Matrix, rounds: int, seed: int) -> Matrix:
    """Means of ``rounds`` resamples of the values, with replacement: float64 ``[rounds]``."""
    n, rng = len(values), np.random.default_rng(seed)
    distinct, counts = np.unique(values, return_counts=True)
    if len(distinct) < n / 2:  # how often each value is drawn is multinomial
        drawn = rng.multinomial(n, counts / n, size=rounds)
        return np.asarray(drawn @ distinct / n, dtype=np.float64)
    step = max(_BLOCK // n, 1)
    parts = [values[rng.integers(n, size=(min(step, rounds - i), n))].mean(1) for i in range(0, rounds, step)]
    return np.concatenate(parts)


def student_quantile(p: float, df: int) -> float:
    """Quantile of Student's t, by the expansion of Abramowitz and Stegun, 26.7.5; exact for 1 and 2 degrees of freedom."""
    if df == 1:
        return math.tan(math.pi * (p - 0.5))
    if df == 2:
        return (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
    x = _NORMAL.inv_cdf(p)
    terms = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return x + math.fsum(term / df**power for power, term in enumerate(terms, 1))


def errors(matrix: Matrix) -> Errors:
    """Where the standard error of the mean accuracy comes from.

    With ``m`` problems and ``k`` samples each, the variance of the mean is ``var(p) / m + mean(p (1 - p)) / (m k)``; the
    second part is estimated without bias as the mean of ``s² / k``.
    """
    answered = ~np.isnan(matrix)
    k = answered.sum(1)
    values = per_problem(matrix)
    m = len(values)
    if m < 2:
        return Errors(math.nan, math.nan, math.nan)
    total = values.var(ddof=1) / m
    several = k >= 2
    if not several.any():
        return Errors(math.nan, math.nan, math.sqrt(total))
    p = np.nansum(matrix[several], 1) / k[several]
    drawn = float((p * (1 - p) / (k[several] - 1)).mean() / m)
    return Errors(math.sqrt(max(total - drawn, 0.0)), math.sqrt(drawn), math.sqrt(total))


def compare(matrix: Matrix, base: Matrix, *, seed: int = 0, rounds: int = ROUNDS) -> Comparison:
    """One method against another.

    Args:
        matrix, base: rows are the same problems, in the same order.
    """
    both = (~np.isnan(matrix)).any(1) & (~np.isnan(base)).any(1)
    differences = per_problem(matrix[both]) - per_problem(base[both])
    estimate = mean(differences, rounds=rounds, seed=seed)
    better, worse = int((differences > 1e-12).sum()), int((differences < -1e-12).sum())
    return Comparison(len(differences), estimate, better, worse, sign_test(better, worse), detectable(estimate.error))


def sign_test(better: int, worse: int) -> float:
    """Two-sided p-value of so uneven a split, if either way were equally likely; ties are left out."""
    n, k = better + worse, min(better, worse)
    if n == 0:
        return 1.0
    # In logarithms: binomial coefficients of thousands do not fit into a float.
    log_choose = [math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) - n * math.log(2) for i in range(k + 1)]
    return min(1.0, 2 * math.fsum(map(math.exp, log_choose)))


def detectable(error: float) -> float:
    """The smallest true difference that is found significant at 5 % with a probability of 80 %, for a standard error."""
    if error == 0:
        return math.nan
    return (_NORMAL.inv_cdf((1 + LEVEL) / 2) + _NORMAL.inv_cdf(POWER)) * error


def holm(ps: Sequence[float]) -> list[float]:
    """P-values adjusted for their number (Holm 1979): any below 5 % has at most that chance of a single false alarm."""
    adjusted = [0.0] * len(ps)
    highest = 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = highest
    return adjusted
