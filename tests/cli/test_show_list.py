"""``show`` and ``list``."""

from __future__ import annotations

from types import SimpleNamespace

import jsonschema
import pytest
from llm_steer.plugins.reflection_cycle import ReflectionCycleParams

from llm_steer import Params, Plugin, registry
from llm_steer.cli.show import type_text


def test_show_json_describes_every_parameter(cli):
    document = cli("show", "reflection_cycle", "--json").document
    assert document["name"] == "reflection_cycle"
    assert [row["name"] for row in document["parameters"]] == list(ReflectionCycleParams.model_fields)
    assert all(row["description"] and row["type"] for row in document["parameters"])
    amplitude = document["parameters"][0]
    assert amplitude["type"] == "number -100 to 100"
    assert amplitude["default"] == 5.0
    assert not amplitude["required"]


def test_show_json_schema_is_a_schema(cli):
    schema = cli("show", "reflection_cycle", "--json").document["schema"]
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate({"amplitude": 3, "schedule": "cosine"}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"amplitude": 300}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"amplitud": 3}, schema)


def test_show_prints_a_table(cli):
    result = cli("show", "reflection_cycle")
    assert result.code == 0
    for name in ReflectionCycleParams.model_fields:
        assert name in result.out
    assert "--steer reflection_cycle:amplitude=5,period=1200" in result.out


def test_show_tells_of_required_parameters_and_feedback(cli, register):
    class StrictParams(Params):
        layer: int
        """Where it acts."""

    class Strict(Plugin[StrictParams]):
        """Does nothing."""

        name = "strict"
        Params = StrictParams
        feedback = True

    register(Strict)
    document = cli("show", "strict", "--json").document
    assert document["feedback"] is True
    assert document["parameters"] == [
        {"name": "layer", "type": "whole number", "default": None, "required": True, "description": "Where it acts."}
    ]
    text = cli("show", "strict").out
    assert "required" in text
    assert "beam search" in text


def test_unknown_plugin(cli):
    result = cli("show", "reflection_cicle")
    assert (result.code, result.out) == (2, "")
    assert result.err.count("\n") == 1
    assert "did you mean 'reflection_cycle'" in result.err
    error = cli("show", "reflection_cicle", "--json").error
    assert error["value"] == "reflection_cicle"
    assert "reflection_cycle" in error["valid"]


def test_list(cli):
    rows = {row["name"]: row for row in cli("list", "--json").document}
    row = rows["reflection_cycle"]
    assert row["package"] == "llm-steer-plugin"
    assert row["class"] == "llm_steer.plugins.reflection_cycle:ReflectionCycle"
    assert row["summary"].startswith("CyclicReflex")
    assert row["error"] is None
    text = cli("list").out
    assert "reflection_cycle" in text
    assert "llm-steer-plugin" in text


def test_list_shows_a_broken_plugin_instead_of_failing(cli, monkeypatch):
    broken = SimpleNamespace(name="broken", value="nowhere:Broken", dist=None)
    points = registry._entry_points()
    monkeypatch.setitem(points, "broken", SimpleNamespace(value="nowhere:Broken", load=lambda: 1 / 0))
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [broken])
    registry.get.cache_clear()
    (row,) = cli("list", "--json").document
    assert "cannot be imported" in row["error"]
    result = cli("show", "broken")
    assert result.code == 2
    assert "cannot be imported" in result.err


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer", "minimum": 0, "exclusiveMaximum": 2**31}, "whole number at least 0 and below 2^31"),
        ({"type": "number", "exclusiveMinimum": 0}, "number above 0"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "text"),
        ({"enum": ["a", "b"]}, "a | b"),
        ({"const": "reference"}, "reference"),
        ({"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}, "list of 2 × number"),
        ({"type": "array", "items": {"$ref": "#/$defs/X"}}, "list of mapping"),
        ({}, "any"),
    ],
)
def test_types_in_words(schema, text):
    assert type_text(schema, {"X": {"type": "object"}}) == text
