"""What a slot's recent tokens amount to, kept by position, so that tokens may come again or be taken back."""

from __future__ import annotations

import torch

from llm_steer.plugin import Context, Tokens
from llm_steer.tracking import RING, latest


class History:
    """A number, at least 0, for each of a slot's last ``RING`` output positions."""

    def __init__(self, context: Context) -> None:
        self._nobody = context.nobody
        # (position, number) at [slot, position % RING].
        self._ring = torch.full((context.num_slots, RING, 2), -1, dtype=torch.int64, device=context.device)

    def clear(self, slot: int) -> None:
        self._ring[slot] = -1

    def at(self, slot: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """The numbers of some positions, int64 ``[n]``; -1 where there is none."""
        kept, number = self._ring[slot, position % RING].unbind(1)
        return torch.where((kept == position) & (position >= 0), number, -1)

    def store(self, tokens: Tokens, number: torch.Tensor, run_end: torch.Tensor) -> None:
        """Keep the numbers of the output tokens of one pass.

        Args:
            number: int64 ``[num_tokens]``; -1 is none.
            run_end: from :func:`runs`.
        """
        position = tokens.output_position
        # Of a long run fed at once (after a preemption) only the end fits.
        kept = (position >= 0) & (torch.arange(len(position), device=position.device) > run_end - RING)
        owner = torch.where(kept, tokens.slot, self._nobody)
        self._ring[owner, position % RING] = torch.stack([position, number], dim=1)


def runs(tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """For each token the indices of the first and of the last token of its run: tokens of one request, in order. The first
    output token begins a run."""
    slot, position = tokens.slot, tokens.output_position
    first = torch.ones_like(tokens.thinking)
    first[1:] = (slot[1:] != slot[:-1]) | (position[1:] != position[:-1] + 1) | (position[1:] == 0)
    ends = torch.ones_like(first)
    ends[:-1] = first[1:]
    index = torch.arange(len(slot), device=slot.device)
    return latest(first, index), len(slot) - 1 - latest(ends.flip(0), index).flip(0)
