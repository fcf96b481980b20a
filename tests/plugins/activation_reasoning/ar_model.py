"""A tiny model with a concept: what tests of the whole plugin run on."""

from __future__ import annotations

import torch

GREEDY = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
PROMPT = [1, 30, 31, 32, 33, 34]
OTHER = [1, 60, 61, 62]


CHAIN = """
concepts: {late: {words: [w400]}}
rules: [c33 -> a, a -> b, b and not late -> c]
actions: [{when: c, steer: {concept: c33, strength: -0.8, decay: 0.75}, duration: 4}]
"""


def states(model, ids: list[int], layer: int = 0) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids]), output_hidden_states=True).hidden_states[layer + 1][0]
