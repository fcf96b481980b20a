"""Confidence in parts is that of all rows at once."""

from __future__ import annotations

import pytest
import torch
from llm_steer.plugins.rebalance.confidence import Confidence


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 17])
def test_is_the_largest_probability(rows: int) -> None:
    logits = torch.randn(rows, 50, generator=torch.Generator().manual_seed(rows)) * 4
    logits[:1, 3:] = -torch.inf
    before = logits.clone()
    assert torch.equal(Confidence().of(logits), torch.softmax(before, 1).amax(1))
    assert torch.equal(logits, before)


def test_serves_any_call() -> None:
    """Of another width or type, within inference mode and out of it, of a model that is trained; NaN stays NaN."""
    confidence = Confidence()
    for width, dtype in ((5, torch.float32), (9, torch.float32), (9, torch.float64), (5, torch.bfloat16)):
        logits = torch.randn(12, width, dtype=dtype, requires_grad=True)
        for inference in (True, False, True):
            with torch.inference_mode(inference):
                assert torch.equal(confidence.of(logits), torch.softmax(logits.detach(), 1).amax(1))
    bad = torch.full((2, 5), torch.nan)
    bad[1] = -torch.inf
    assert confidence.of(bad).isnan().all()
