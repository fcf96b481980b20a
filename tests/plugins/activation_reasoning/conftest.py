"""A tiny model with a concept. The modules beside the tests can be imported by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from llm_steer.plugins.activation_reasoning.concepts import LEVELS, Dictionary, direction_concept

from llm_steer.artifact import ModelIdentity

sys.path.insert(0, str(Path(__file__).parent))

from ar_model import PROMPT, states


@pytest.fixture
def model(tiny_model):
    return tiny_model()


@pytest.fixture
def direction(model):
    """Of what token 33 looks like, next to all others of the prompt."""
    h = states(model, PROMPT)
    return torch.nn.functional.normalize(h[4] - h[[1, 2, 3, 5]].mean(0), dim=0)


@pytest.fixture
def folder(model, direction, tiny_tokenizer, tmp_path):
    """A dictionary of one concept, c33, whose threshold token 33 passes."""
    scores = states(model, PROMPT)[1:] @ direction
    top, next_ = scores.topk(2).values.tolist()
    thresholds = dict.fromkeys(LEVELS, (top + next_) / 2)
    dictionary = Dictionary((direction_concept("c33", direction, 0.0, thresholds),), 0)
    identity = ModelIdentity.of(model.config, architecture=type(model).__name__, tokenizer=tiny_tokenizer)
    dictionary.to_artifact(identity, {}).save(tmp_path / "dictionary")
    return tmp_path


@pytest.fixture
def write(folder):
    def make(text: str, name: str = "rules.yaml") -> str:
        path = folder / name
        path.write_text(f"dictionary: {folder}/dictionary\n{text}")
        return str(path)

    return make
