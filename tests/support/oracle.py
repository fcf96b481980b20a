"""What reflection_cycle should do, in plain Python: one row at a time, from its token ids, in closed form."""

from __future__ import annotations

import torch
from transformers import LogitsProcessor

from support.vocabulary import END_THINK, PAD, REFLECTION, THINK


def wave(t: int, amplitude: float, period: float) -> float:
    u = ((t - period / 4) % period) / period
    return amplitude * abs(2 - 4 * u) - amplitude


def think_position(prompt: list[int], output: list[int]) -> int | None:
    """Tokens generated in the think span so far; None outside of one, and for good once one has ended in the output."""
    start: int | None = None
    inside = False
    for i, token in enumerate(prompt + output):
        if token == THINK and not inside:
            inside, start = True, max(i + 1, len(prompt))
        elif token == END_THINK:
            if i >= len(prompt):
                return None
            inside = False
    return len(prompt) + len(output) - start if inside and start is not None else None


def delta(prompt: list[int], output: list[int], params: dict | None) -> float:
    """What is added to each reflection token for the token that follows ``prompt + output``."""
    if params is None:
        return 0.0
    if params.get("origin") == "output":
        t = None if END_THINK in output else len(output)
    else:
        t = think_position(prompt, output)
    return 0.0 if t is None else wave(t, params["amplitude"], params["period"])


class Oracle(LogitsProcessor):
    """Steers an unsteered model, slowly.

    Args:
        width: columns of the prompts, pads included.
        params: of each row, None for one that is not steered.
    """

    def __init__(self, width: int, params: list[dict | None]) -> None:
        self.width, self.params = width, params

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        scores = scores.clone()
        for row, ids in enumerate(input_ids.tolist()):
            prompt = [t for t in ids[: self.width] if t != PAD]
            scores[row, REFLECTION] += delta(prompt, ids[self.width :], self.params[row])
        return scores
