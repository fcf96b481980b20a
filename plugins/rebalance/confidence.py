"""A token's confidence: the largest probability in the distribution that it was drawn from."""

from __future__ import annotations

import torch

ROWS = 8
"""On a CPU, so many rows at a time: their probabilities stay in its cache."""


class Confidence:
    """Computes it for rows of logits, in memory of its own.

    On a CPU fresh memory for all probabilities at once (13 MB for 64 rows of SmolLM2) takes longer than the probabilities
    do: its pages come from the system, cleared, each time. On a GPU the allocator keeps them, and one kernel for all rows is
    best.
    """

    def __init__(self) -> None:
        self._scratch = torch.empty(0, 0)

    def of(self, logits: torch.Tensor) -> torch.Tensor:
        """Largest probabilities, ``[num_rows]``, of logits ``[num_rows, vocab_size]``; NaN where a row has none."""
        if logits.device.type != "cpu":
            return logits.softmax(1).amax(1)
        shape = (ROWS, logits.shape[1])
        if self._scratch.shape != shape or self._scratch.dtype != logits.dtype:
            with torch.inference_mode(False):  # it may be written in and out of it
                self._scratch = torch.empty(shape, dtype=logits.dtype)
        parts = logits.detach().split(ROWS)  # type: ignore[no-untyped-call,unused-ignore]
        return torch.cat([torch.softmax(part, 1, out=self._scratch[: len(part)]).amax(1) for part in parts])
