"""What errors say, whatever the value."""

from __future__ import annotations

import json

import pytest

from llm_steer import MissingDependencyError, SteerError
from llm_steer.errors import did_you_mean, shorten


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_a_steer_error_names_field_value_and_what_is_valid():
    error = SteerError("steer_amplitude", "abc", "a valid number")
    assert str(error) == "steer_amplitude: got 'abc'; must be a valid number"
    assert (error.field, error.value, error.valid) == ("steer_amplitude", "abc", "a valid number")
    assert isinstance(error, ValueError)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("abc", "'abc'"),
        (None, "None"),
        ("x" * 1001, "a str of 1001 characters"),
        (b"x" * 1001, "a bytes of 1001 bytes"),
        (list(range(5000)), "a list of 5000 items"),
        (dict.fromkeys(range(1001)), "a dict of 1001 items"),
        (Broken(), "<Broken instance at 0x"),
        (json.loads("[" * 900 + "]" * 900), "[[[[[[...]]]]]]"),
    ],
)
def test_values_are_shown_as_far_as_they_can_be(value, shown):
    assert shorten(value).startswith(shown)
    assert len(shorten(value)) <= 80


def test_an_integer_too_long_to_print():
    assert shorten(10**5000) == "a value of type int that cannot be shown"


def test_a_long_value_is_cut():
    text = shorten(list(range(999)))
    assert text.startswith("[0, 1, 2, ")
    assert text.endswith("…")
    assert len(text) == 80


def test_a_message_can_always_be_sent():
    error = SteerError("steer_\ud800" + "x" * 5000, "\ud800", "anything")
    assert len(str(error).encode()) < 400
    assert error.field.startswith("steer_\ud800")


def test_a_suggestion_is_made_only_if_something_is_close():
    assert did_you_mean("Amplitude", ["period", "amplitude"]) == " (did you mean 'amplitude'?)"
    assert did_you_mean("x", ["period", "amplitude"]) == ""
    assert did_you_mean("a" * 10**6, ["amplitude"]) == ""


def test_a_missing_dependency_says_how_to_install_it():
    error = MissingDependencyError("matplotlib", "plot", "drawing")
    assert str(error) == (
        "drawing needs matplotlib, which is not installed. Install it with: pip install 'llm-steer-plugin[plot]'"
    )
    assert error.name == "matplotlib"
