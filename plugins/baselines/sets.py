"""A set of tokens for each slot, and adding to their logits."""

from __future__ import annotations

import torch

from llm_steer.plugin import Context
from llm_steer.slots import RaggedTable


class TokenSets:
    """Ids of each slot's tokens, ``[num_slots, width]``."""

    def __init__(self, context: Context) -> None:
        self._table = RaggedTable(context.num_slots, 1, context.device, torch.int64)

    def write(self, slot: int, ids: list[int] | None) -> None:
        self._table.write(slot, ids or [0])

    def contains(self, slot: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Whether each id is in its slot's set: bool ``[n]``."""
        return (self._table.rows(slot) == ids[:, None]).any(1)

    def add(self, logits: torch.Tensor, slot: torch.Tensor, delta: torch.Tensor, acts: torch.Tensor) -> None:
        """Add ``delta`` (``[rows]``) to each row's tokens where ``acts``; other rows keep every bit."""
        ids = self._table.rows(slot)
        before = logits.gather(1, ids)
        # A short set repeats an id: it gets the same value twice.
        logits.scatter_(1, ids, torch.where(acts[:, None], before + delta[:, None].to(logits.dtype), before))
