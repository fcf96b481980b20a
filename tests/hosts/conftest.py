from __future__ import annotations

import pytest

from llm_steer import steer
from support.hf_rows import WAVE


@pytest.fixture
def model(tiny_model, tiny_tokenizer):
    return steer(tiny_model(), "reflection_cycle", tokenizer=tiny_tokenizer, **WAVE)
