"""What was true, when: a short list of changes for each slot, from which the trace is made afterwards."""

from __future__ import annotations

import torch

from .scan import NONE, Runs

ENTRIES = 256
"""Changes that are kept for each slot; later ones are only counted."""
BITS = 62


class History:
    """Positions at which the set of what is true changed, and the set from there on.

    Args:
        columns: of what can be true.
        num_slots: the last one is nobody's.
        device: where it lies.
        degrees: of the columns, the first ones, of which is kept how true they are; 0: nothing is.
    """

    def __init__(self, columns: int, num_slots: int, device: torch.device, degrees: int = 0) -> None:
        self._columns = columns
        self._words = max(-(-columns // BITS), 1)
        self._shift = torch.arange(BITS, device=device)
        self._now = torch.zeros(num_slots, self._words, dtype=torch.int64, device=device)
        self._count = torch.zeros(num_slots, 1, dtype=torch.int64, device=device)
        self._log = torch.full((num_slots, ENTRIES, 1 + self._words), NONE, dtype=torch.int64, device=device)
        self._degrees = torch.zeros(num_slots, ENTRIES, degrees, device=device) if degrees else None

    def reset(self, slot: int) -> None:
        self._now[slot] = 0
        self._count[slot] = 0
        self._log[slot] = NONE

    def note(
        self, true: torch.Tensor, position: torch.Tensor, slot: torch.Tensor, runs: Runs, owner: torch.Tensor,
        degrees: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Take note of what is true, ``[tokens, columns]``, in a forward pass; and how much, ``[tokens, degrees]``."""
        padded = torch.nn.functional.pad(true, (0, self._words * BITS - self._columns))
        bits = (padded.view(len(true), self._words, BITS).to(torch.int64) << self._shift).sum(2)
        changed = (bits != runs.before(bits, self._now[slot], 0)).any(1)
        count = runs.total(changed.to(torch.int64)[:, None], self._count[slot])
        entry = (count[:, 0] - 1).clamp(min=0)
        nobody = len(self._log) - 1
        target = torch.where(changed & (count[:, 0] <= ENTRIES) & (slot != nobody), slot, nobody)
        place = (target, entry.clamp(max=ENTRIES - 1))
        self._log[place] = torch.cat([position[:, None], bits], 1)
        if self._degrees is not None and degrees is not None:
            self._degrees[place] = degrees
        for state, update in ((self._now, bits), (self._count, count)):
            kept = state[nobody].clone()
            state[owner] = update
            state[nobody] = kept
        self._log[nobody] = NONE

    def entries(self, slot: int) -> tuple[list[tuple[int, list[int]]], int]:
        """Positions and the columns that are true from there on, and how many changes there were."""
        count = int(self._count[slot, 0])
        found = []
        for position, *words in self._log[slot, : min(count, ENTRIES)].tolist():
            true = [w * BITS + bit for w, word in enumerate(words) for bit in range(BITS) if word >> bit & 1]
            found.append((position, true))
        return found, count

    def degrees(self, slot: int) -> list[list[float]]:
        """How true the first columns are from each position of :meth:`entries` on; empty where it was not kept."""
        return [] if self._degrees is None else self._degrees[slot, : min(int(self._count[slot, 0]), ENTRIES)].tolist()
