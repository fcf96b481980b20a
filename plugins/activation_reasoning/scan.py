"""Running totals over the flat tokens of many requests: each token sees its own request's tokens up to itself.

All requests' tokens lie on one axis. What a request had before comes in as a carry, so a sequence gives the same values in
one portion as in many: sums are of integers, and maxima of numbers in an order that integers share.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SPAN = 2**33
"""More than any value that is scanned for its maximum."""
UNIT = 2**-16
"""Scores are summed in multiples of this."""
NONE = -1
"""Below every value that is scanned for its maximum."""


def ordered(x: torch.Tensor) -> torch.Tensor:
    """float32 as int64 in [0, 2^32) of the same order; NaN is -1, below all."""
    bits = x.float().contiguous().view(torch.int32).to(torch.int64)
    key = torch.where(bits >= 0, bits + 2**31, -bits - 1)
    return torch.where(torch.isnan(x), NONE, key)


def unordered(key: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`ordered`; -inf for -1."""
    bits = torch.where(key >= 2**31, key - 2**31, -key - 1).to(torch.int32)
    return torch.where(key < 0, float("-inf"), bits.view(torch.float32))


def fixed(x: torch.Tensor) -> torch.Tensor:
    """Scores as whole multiples of ``UNIT``: int64."""
    return (torch.nan_to_num(x, 0.0, 1e9, -1e9).clamp(-1e9, 1e9).double() / UNIT).round().to(torch.int64)


@dataclass(frozen=True)
class Runs:
    """Stretches of tokens that belong together."""

    first: torch.Tensor
    """bool ``[tokens]``: a stretch begins."""
    carries: torch.Tensor
    """bool ``[tokens]``: it begins, and goes on from what the slot had before."""
    number: torch.Tensor
    """int64 ``[tokens]``, growing."""
    start: torch.Tensor
    """int64 ``[tokens]``, index of the token with which the stretch began."""

    @classmethod
    def of(cls, first: torch.Tensor, carries: torch.Tensor) -> Runs:
        index = torch.arange(len(first), device=first.device)
        start = torch.where(first, index, 0).cummax(0).values
        return cls(first, carries & first, first.cumsum(0), start)

    def largest(self, x: torch.Tensor, carry: torch.Tensor) -> torch.Tensor:
        """Largest value so far.

        Args:
            x: int64 ``[tokens, n]`` in [-1, 2^32].
            carry: the same, each token's slot's value before; read where a stretch goes on.
        """
        x = torch.where(self.carries[:, None], torch.maximum(x, carry), x)
        base = self.number[:, None] * SPAN
        return (base + x + 1).cummax(0).values - base - 1

    def total(self, x: torch.Tensor, carry: torch.Tensor) -> torch.Tensor:
        """Sum so far: as :meth:`largest`."""
        x = torch.where(self.carries[:, None], x + carry, x)
        sums = x.cumsum(0)
        return sums - (sums - x)[self.start]

    def latest(self, x: torch.Tensor, marked: torch.Tensor, carry: torch.Tensor) -> torch.Tensor:
        """Each column's value at the last marked token so far: as :meth:`largest`, of any type; 0 where none is marked."""
        index = torch.arange(len(x), device=x.device)[:, None]
        at = self.largest(torch.where(marked, index, NONE), torch.full_like(marked, NONE, dtype=torch.int64))
        return torch.where(at >= 0, x.gather(0, at.clamp(min=0)), torch.where(self.carries[self.start][:, None], carry, 0.0))

    def before(self, x: torch.Tensor, carry: torch.Tensor, default: int = NONE) -> torch.Tensor:
        """Each token's predecessor's value."""
        shifted = torch.cat([x[:1], x[:-1]])
        default_ = torch.full_like(x, default)
        return torch.where(self.first[:, None], torch.where(self.carries[:, None], carry, default_), shifted)
