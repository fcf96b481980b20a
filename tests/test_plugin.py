"""The contract's own small parts."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from pydantic import ValidationError

import llm_steer
from core_oracles import CPU, long
from llm_steer import Context, Flag, Params, Plugin, SteerError, Tokens, spec


class Settings(Params):
    strength: float = 1.0
    """How strong."""
    layers: list[int] = [1]  # noqa: RUF012
    pairs: list[list[float]] | None = None
    on: Flag = True


class Quiet(Plugin[Settings]):
    name = "quiet"
    Params = Settings


@pytest.mark.parametrize(
    "fields",
    [
        {"strength": "5"},
        {"strength": True},
        {"strength": float("nan")},
        {"strength": float("inf")},
        {"layers": ["1"]},
        {"layers": [1.0]},
        {"layers": {1, 2}},
        {"layers": "12"},
        {"pairs": [[1.0, float("nan")]]},
        {"on": 2},
        {"on": "true"},
        {"on": 1.0},
        {"unknown": 1},
    ],
)
def test_parameters_are_strict(fields):
    with pytest.raises(ValidationError):
        Settings(**fields)
    with pytest.raises(SteerError):
        spec.build(Quiet, fields)


def test_parameters_take_what_json_and_python_write():
    assert Settings(strength=5).strength == 5.0
    assert Settings(layers=(1, 2), pairs=((1, 2), (3, 4))) == Settings(layers=[1, 2], pairs=[[1, 2], [3, 4]])
    assert Settings(on=0).on is False
    assert Settings(on=1).on is True
    assert Settings.model_validate_json('{"strength": 2, "on": 1, "layers": [3]}') == Settings(strength=2, layers=[3])


def test_parameters_are_frozen_and_described():
    settings = Settings()
    with pytest.raises(ValidationError):
        settings.strength = 3.0  # type: ignore[misc]
    assert Settings.model_json_schema()["properties"]["strength"]["description"] == "How strong."


def test_a_request_s_fields_go_over_the_defaults():
    assert Settings.inherit({"strength": 2.0, "layers": [3]}, {"strength": 4.0}) == {"strength": 4.0, "layers": [3]}
    assert Settings(strength=2.0).resolve(None) == Settings(strength=2.0)


def test_a_plugin_that_overrides_nothing_does_nothing():
    plugin = Quiet(Context(num_slots=3, device=CPU, vocab_size=5))
    logits, hidden = torch.randn(2, 5), torch.randn(2, 4)
    before = logits.clone(), hidden.clone()
    plugin.admit(0, Settings(), long(1))
    plugin.admit(0, None, long())
    plugin.step(None)  # type: ignore[arg-type]
    plugin.logits(logits, None)  # type: ignore[arg-type]
    assert torch.equal(logits, before[0])
    assert torch.equal(hidden, before[1])
    assert plugin.layers() == ()
    with pytest.raises(NotImplementedError, match="quiet asked for layers"):
        plugin.residual(0, hidden, None)  # type: ignore[arg-type]
    assert plugin.finish(0, None, None) == {}  # type: ignore[arg-type]
    assert Quiet.expand({"model": "m"}, Settings()) == [{"model": "m"}]
    assert not Quiet.votes
    assert not Quiet.decided({}, [None], Settings())
    with pytest.raises(NotImplementedError, match="quiet does not vote"):
        Quiet.combine({}, [], [], Settings())
    assert not Quiet.feedback
    assert not Quiet.needs_boundaries


def test_the_last_slot_is_nobody_s():
    assert Context(num_slots=9, device=CPU, vocab_size=5).nobody == 8


def test_tokens_move_whole():
    values = {field.name: long(-1, 0, 1) for field in dataclasses.fields(Tokens)}
    tokens = Tokens(**values)
    assert tokens.is_prompt.tolist() == [True, False, False]
    moved = tokens.to(torch.device("meta"))
    assert all(getattr(moved, name).device.type == "meta" for name in values)
    assert moved.is_prompt.device.type == "meta"


def test_public_names():
    for name in llm_steer.__all__:
        assert getattr(llm_steer, name) is not None
    assert set(llm_steer.__all__) <= set(dir(llm_steer))
    with pytest.raises(AttributeError, match="module 'llm_steer' has no attribute 'nothing'"):
        _ = llm_steer.nothing
