"""A set of tokens for each slot, and what is done to logits."""

from __future__ import annotations

import torch

from llm_steer.plugin import Context
from llm_steer.slots import RaggedTable

FORCE = 1e4
"""Added to a logit, it leaves no other token a chance; a token that is masked stays so."""


class TokenSets:
    """Ids of each slot's tokens, ``[num_slots, width]``."""

    def __init__(self, context: Context) -> None:
        self._table = RaggedTable(context.num_slots, 1, context.device, torch.int64)

    def write(self, slot: int, ids: list[int] | None) -> None:
        self._table.write(slot, ids or [0])

    def rows(self, slot: torch.Tensor) -> torch.Tensor:
        """The ids of some slots, ``[n, width]``; a short set repeats its last one."""
        return self._table.rows(slot)

    def contains(self, slot: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Whether each id is in its slot's set: bool ``[n]``."""
        return (self._table.rows(slot) == ids[:, None]).any(1)

    def add(self, logits: torch.Tensor, slot: torch.Tensor, delta: torch.Tensor, acts: torch.Tensor) -> None:
        """Add ``delta`` (``[rows]``) to each row's tokens where ``acts``; other rows keep every bit."""
        ids = self._table.rows(slot)
        before = logits.gather(1, ids)
        # A short set repeats an id: it gets the same value twice.
        logits.scatter_(1, ids, torch.where(acts[:, None], before + delta[:, None].to(logits.dtype), before))


def force(logits: torch.Tensor, ids: torch.Tensor, where: torch.Tensor) -> None:
    """Leave one token of some rows, and no other.

    Args:
        ids: int64 ``[rows]``.
        where: bool ``[rows]``; other rows keep every bit.
    """
    before = logits.gather(1, ids[:, None])
    logits.scatter_(1, ids[:, None], torch.where(where[:, None], before + FORCE, before))
