"""Batches for ``generate``, and the check of every row against the oracle."""

from __future__ import annotations

import pytest
import torch

from support.oracle import delta
from support.vocabulary import END_THINK, EOS, PAD, REFLECTION, THINK

WAVE = {"amplitude": 9.0, "period": 7.0}
THINKING = [1, 30, 40, THINK, 50]
DONE = [1, 30, THINK, 44, END_THINK, 61, 62]
NEVER = [1, 70, 71, 72]
GREEDY = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
GREEDY |= {"output_logits": True}


def batch(*prompts: list[int]) -> dict[str, torch.Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(p)) + p for p in prompts])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def check_rows(result, prompts, params) -> None:
    """Every row's scores are the raw logits plus the oracle's delta, on the reflection tokens and nowhere else."""
    width = result.sequences.shape[1] - len(result.scores)
    others = [i for i in range(result.scores[0].shape[1]) if i not in REFLECTION]
    for row, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        output = result.sequences[row, width:].tolist()
        end = output.index(EOS) + 1 if EOS in output else len(output)
        for t in range(end):
            added = (result.scores[t] - result.logits[t])[row]
            expected = delta(prompt, output[:t], own)
            assert added[REFLECTION].tolist() == pytest.approx([expected] * 5, abs=1e-5), (row, t)
            assert torch.equal(result.scores[t][row, others], result.logits[t][row, others]), (row, t)
