"""The waves: logit offset as a function of the token index ``t``, in float64, for all rows at once.

Every schedule takes ``t`` and the rows' ``amplitude``, ``period`` and ``phase``, all float64 ``[rows]``, and returns the
offset ``[rows]``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch

SILVER_PERIOD = 64
"""Steps after which the silver stepsize sequence of the reference starts again."""


def triangular(t: torch.Tensor, amplitude: torch.Tensor, period: torch.Tensor, phase: torch.Tensor) -> torch.Tensor:
    """CyclicReflex's wave: 0, up to +A at a quarter of the period, down to -A at three quarters, back to 0.

    ``d(t) = A |2 - 4 u'| - A`` with ``u' = ((t + sC - C/4) mod C) / C``: the paper's form.
    """
    shifted = torch.remainder(t + (phase - 0.25) * period, period) / period
    return amplitude * (4.0 * shifted - 2.0).abs() - amplitude


def constant(t: torch.Tensor, amplitude: torch.Tensor, period: torch.Tensor, phase: torch.Tensor) -> torch.Tensor:
    """The amplitude at every token; negative, it is TIP's thought-switch penalty as CyclicReflex's code runs it."""
    return amplitude.expand_as(t)


def linear_decay(t: torch.Tensor, amplitude: torch.Tensor, period: torch.Tensor, phase: torch.Tensor) -> torch.Tensor:
    """From +A down to -A over one period, then -A: the ablation without a cycle."""
    progress = (t / period + phase).clamp(0.0, 1.0)
    return amplitude * (1.0 - 2.0 * progress)


def cosine(t: torch.Tensor, amplitude: torch.Tensor, period: torch.Tensor, phase: torch.Tensor) -> torch.Tensor:
    """``A cos(2 pi (t/C + s))``; with phase -0.25 it starts at 0 and rises, as the triangular wave does."""
    return amplitude * torch.cos(2.0 * math.pi * torch.remainder(t / period + phase, 1.0))


def silver(t: torch.Tensor, amplitude: torch.Tensor, period: torch.Tensor, phase: torch.Tensor) -> torch.Tensor:
    """The silver stepsize sequence as the reference once had it: ``A 2^(v - 2)`` with v the trailing zeros of k + 1,
    ``k = t mod 64``: .25 .5 .25 1 .25 .5 .25 2 ... for A = 1; never negative."""
    k = torch.remainder(t, SILVER_PERIOD).to(torch.int64) + 1
    return amplitude * (k & -k).to(torch.float64) * 0.25


def piecewise(t: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Linear interpolation between points, the outer points' values beyond them.

    Args:
        t: ``[rows]``.
        x, y: ``[rows, points]``, x strictly increasing, padded by repeating the last point.
    """
    right = torch.searchsorted(x, t[:, None].contiguous(), right=True).clamp(1, x.shape[1] - 1)
    left = right - 1
    x0, x1, y0, y1 = (a.gather(1, i)[:, 0] for a, i in ((x, left), (x, right), (y, left), (y, right)))
    share = ((t - x0) / (x1 - x0).clamp(min=1e-12)).clamp(0.0, 1.0)
    return y0 + (y1 - y0) * share


def place(t: torch.Tensor, period: torch.Tensor) -> torch.Tensor:
    """Index of a token in its period (a whole number): int64 ``[rows]``."""
    return torch.remainder(t, period.clamp(min=1)).to(torch.int64)  # nobody has period 0


def shuffled_order(period: int, seed: int) -> list[int]:
    """For each token of a period the one whose offset it gets: the triangular wave in another order, which shows what a wave
    is worth for coming in this one."""
    return random.Random(seed).sample(range(period), period)


WAVES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "triangular": triangular,
    "constant": constant,
    "linear_decay": linear_decay,
    "cosine": cosine,
    "silver": silver,
}
"""The schedules that amplitude, period and phase describe; ``piecewise`` takes points, ``shuffled`` an order."""
