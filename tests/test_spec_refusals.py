"""Requests that :mod:`llm_steer.spec` refuses, and what it says of them."""

from __future__ import annotations

import pytest

from llm_steer import Params, Plugin, SteerError, spec


@pytest.mark.parametrize("value", [[], (), "[]"])
def test_an_empty_list_is_not_off(value):
    """It would switch a server's default off without saying so."""
    with pytest.raises(SteerError, match="a list of at least one plugin, or off"):
        spec.parse(value, defaults=spec.parse("reflection_cycle"))


def test_what_is_missing_has_no_value_and_a_misspelt_field_comes_first(register):
    class NeedyParams(Params):
        artifact: str

    class Needy(Plugin[NeedyParams]):
        name, Params = "needy", NeedyParams

    register(Needy)
    with pytest.raises(SteerError, match=r"^artifact: got None; must be given$"):
        spec.parse("needy")
    with pytest.raises(SteerError, match=r"^artifac: got 'x'; must be a parameter of needy: artifact \(did you mean"):
        spec.parse("needy", {"artifac": "x"})


def test_a_plugin_that_cannot_be_asked_for_here_is_named_as_it_was_asked_for(register):
    class HereParams(Params):
        def resolve(self, vocabulary, shelf=None):
            raise SteerError("steer", "nowhere", "asked elsewhere")

    class Nowhere(Plugin[HereParams]):
        name, Params = "nowhere", HereParams

    register(Nowhere)
    for asked, field in (
        (spec.parse_flat({"steer": "nowhere"}).spec, "steer"),
        (spec.parse([{"name": "nowhere"}]), "steer[0]"),
        (spec.parse("nowhere"), "steer"),
    ):
        with pytest.raises(SteerError) as error:
            spec.resolve(asked, None)
        assert error.value.field == field
