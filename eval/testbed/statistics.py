"""Standard errors, paired differences, areas under curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = Sequence[float] | Sequence[bool] | NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A number and its standard error."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.error:.3f}"

    @property
    def z(self) -> float:
        """Distance from zero in standard errors."""
        return self.value / self.error if self.error else float("inf") * np.sign(self.value) if self.value else 0.0


def mean(values: Values) -> Estimate:
    """The mean of independent values; nan without any."""
    array = np.asarray(values, dtype=np.float64)
    if not len(array):
        return Estimate(float("nan"), float("nan"))
    error = array.std(ddof=1) / np.sqrt(len(array)) if len(array) > 1 else float("nan")
    return Estimate(float(array.mean()), float(error))


def difference(values: Values, base: Values) -> Estimate:
    """The mean difference of paired values."""
    return mean(np.asarray(values, dtype=np.float64) - np.asarray(base, dtype=np.float64))


def auc(high: Values, low: Values) -> Estimate:
    """How often a value of ``high`` exceeds one of ``low`` (ties count half), with Hanley and McNeil's standard error."""
    a, b = np.asarray(high, dtype=np.float64), np.asarray(low, dtype=np.float64)
    if not len(a) or not len(b):
        return Estimate(float("nan"), float("nan"))
    ordered = np.sort(b)
    below, upto = np.searchsorted(ordered, a, "left"), np.searchsorted(ordered, a, "right")
    area = float((below + upto).mean() / 2 / len(b))
    q1, q2 = area / (2 - area), 2 * area**2 / (1 + area)
    variance = area * (1 - area) + (len(a) - 1) * (q1 - area**2) + (len(b) - 1) * (q2 - area**2)
    return Estimate(area, float(np.sqrt(max(variance, 0.0) / (len(a) * len(b)))))


def matched_difference(
    treated: Sequence[tuple[int, float]], control: Sequence[tuple[int, float]], width: int, seed: int = 0, rounds: int = 1000
) -> tuple[Estimate, tuple[float, float], int]:
    """Mean difference at matched length.

    Args:
        treated, control: pairs of a length and a value.
        width: lengths in one bin of this width count as equal.

    Returns:
        The difference, averaged over bins with the weights of ``treated``; its bootstrap interval of 95 %; and the number
        of treated pairs that found a control.
    """
    rng = np.random.default_rng(seed)
    a, b = _binned(treated, width), _binned(control, width)
    shared = sorted(k for k in a if len(a[k]) and len(b.get(k, ())) >= 2)
    if not shared:
        return Estimate(float("nan"), float("nan")), (float("nan"), float("nan")), 0
    weights = np.array([len(a[k]) for k in shared], dtype=np.float64)
    weights /= weights.sum()
    point = float(sum(w * (a[k].mean() - b[k].mean()) for w, k in zip(weights, shared, strict=True)))
    draws = np.zeros(rounds)
    for w, k in zip(weights, shared, strict=True):
        for group, sign in ((a[k], 1.0), (b[k], -1.0)):
            draws += sign * w * group[rng.integers(len(group), size=(rounds, len(group)))].mean(1)
    low, high = np.quantile(draws, (0.025, 0.975))
    return Estimate(point, float(draws.std())), (float(low), float(high)), int(sum(len(a[k]) for k in shared))


def _binned(pairs: Sequence[tuple[int, float]], width: int) -> dict[int, NDArray[np.float64]]:
    bins: dict[int, list[float]] = {}
    for length, value in pairs:
        bins.setdefault(length // width, []).append(value)
    return {k: np.asarray(values) for k, values in bins.items()}
