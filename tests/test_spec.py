"""Requests in every form that callers write, and their way to another process."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_steer import SteerError, spec
from llm_steer.spec import Request, Steer
from support import odd_plugin
from support.odd_plugin import ONE_OF, RC, Odd, OddParams, default, steer


@pytest.fixture(autouse=True)
def _two_plugins(monkeypatch):
    odd_plugin.install(monkeypatch)


# -- the forms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "fields", "expected"),
    [
        (RC, {}, (steer(),)),
        (RC, {"amplitude": 7}, (steer(amplitude=7),)),
        ({"name": RC}, {}, (steer(),)),
        ({"name": RC, "amplitude": 7, "words": ["Hmm"]}, {}, (steer(amplitude=7, words=["Hmm"]),)),
        ([RC], {"amplitude": 7}, (steer(amplitude=7),)),
        ([{"name": RC, "amplitude": 7}], {}, (steer(amplitude=7),)),
        ((RC, "odd"), {}, (steer(), Steer(Odd, OddParams()))),
        (["odd", {"name": RC, "period": 9}], {}, (Steer(Odd, OddParams()), steer(period=9))),
        ('{"name": "reflection_cycle", "window": [[0, 5]]}', {}, (steer(window=[[0, 5]]),)),
        (' \n["odd", {"name": "reflection_cycle"}]', {}, (Steer(Odd, OddParams()), steer())),
        ("off", {}, ()),
        (None, {}, ()),
        (False, {}, ()),
        (0, {}, ()),
    ],
)
def test_every_form(value, fields, expected):
    assert spec.parse(value, fields) == expected
    if expected == ():
        assert spec.parse(value, fields, default(amplitude=3)) == ()


@pytest.mark.parametrize("value", [True, 1, RC, {}, "{}", [RC], [{}], {"name": RC}])
def test_the_default_and_what_is_merged_over_it(value):
    defaults = default(amplitude=3, words=["Hmm"])
    assert spec.parse(value, {}, defaults) == defaults
    if not (isinstance(value, dict) and value):
        assert spec.parse(value, {"period": 9}, defaults) == default(amplitude=3, words=["Hmm"], period=9)


def test_a_mapping_without_a_name_means_the_default():
    assert spec.parse({"period": 9}, {}, default(amplitude=3)) == default(amplitude=3, period=9)
    assert spec.parse('{"period": 9}', {}, default(amplitude=3)) == default(amplitude=3, period=9)


def test_another_plugin_leaves_the_default_out():
    assert spec.parse("odd", {}, default(amplitude=3)) == (Steer(Odd, OddParams()),)
    assert spec.parse(["odd", RC], {}, default(amplitude=3)) == (Steer(Odd, OddParams()), steer(amplitude=3))


def test_several_defaults():
    defaults = (*default(amplitude=3), Steer(Odd, OddParams(size=2)))
    assert spec.parse(True, {}, defaults) == defaults
    assert spec.parse("odd", {"needed": 1}, defaults) == (Steer(Odd, OddParams(size=2, needed=1)),)


# -- steer* keys ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, Request(())),
        ({"other": 1, 3: 4, "Steven": 2}, Request(())),
        ({"steer": RC}, Request((steer(),))),
        ({"steer": RC, "steer_amplitude": 7, "steer_words": ["Hmm"]}, Request((steer(amplitude=7, words=["Hmm"]),))),
        ({"steer": RC, "steer_window": [0, 5, 8, 9]}, Request((steer(window=[[0, 5], [8, 9]]),))),
        ({"steer": RC, "steer_leading_space": 1}, Request((steer(leading_space=True),))),
        ({"steer": '["odd", "reflection_cycle"]'}, Request((Steer(Odd, OddParams()), steer()))),
        ({"steer": {"name": RC, "period": 9.5}}, Request((steer(period=9.5),))),
        ({"steer": "off"}, Request(())),
        ({"steer": 0}, Request(())),
        ({"steer": None, "steer_trace": True}, Request((), trace=True)),
        ({"steer": RC, "steer_trace": 1}, Request((steer(),), trace=True)),
        ({"steer": RC, "steer_trace": 0}, Request((steer(),))),
    ],
)
def test_flat_keys(arguments, expected):
    assert spec.parse_flat(arguments) == expected


def test_flat_keys_over_a_default():
    defaults = default(amplitude=3)
    assert spec.parse_flat({}, defaults) == Request(defaults)
    assert spec.parse_flat({"steer_trace": 1}, defaults) == Request(defaults, trace=True)
    assert spec.parse_flat({"steer_period": 9}, defaults) == Request(default(amplitude=3, period=9))
    assert spec.parse_flat({"steer": 1, "steer_period": 9}, defaults) == Request(default(amplitude=3, period=9))
    assert spec.parse_flat({"steer": "off"}, defaults) == Request(())


# -- the command line ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (RC, steer()),
        (f"{RC}:", steer()),
        (f"{RC}:amplitude=5,period=1200", steer(amplitude=5, period=1200)),
        (f"{RC}: amplitude = -2.5 , schedule=constant", steer(amplitude=-2.5, schedule="constant")),
        (f"{RC}:period=1e3,phase=.5,", steer(period=1000.0, phase=0.5)),
        (f"{RC}:preset=reference,leading_space=true", steer(preset="reference", leading_space=True)),
        (f"{RC}:words=null", steer(words=None)),
        (RC + ':{"words": ["Hmm", "no"], "window": [[0, 9]]}', steer(words=["Hmm", "no"], window=[[0, 9]])),
    ],
)
def test_options(text, expected):
    assert spec.parse_option(text) == expected


def test_an_option_from_a_file(tmp_path):
    path = tmp_path / "wave.yaml"
    path.write_text("amplitude: 2\nperiod: 1e3\nwords: [Hmm, no, off]\n", encoding="utf-8")
    assert spec.parse_option(f"{RC}:@{path}") == steer(amplitude=2, period=1000.0, words=["Hmm", "no", "off"])


# -- between processes ---------------------------------------------------------------------------------------------------


class Words:
    """A vocabulary of ten words, without a tokenizer."""

    has_think_markers = True

    def __init__(self, refuse: tuple[str, ...] = ()) -> None:
        self.refuse = refuse

    def check_ids(self, ids, field):
        for i in ids:
            if i >= 1000:
                raise SteerError(field, i, "below 1000")

    def words(self, words, **kwargs):
        from llm_steer.tokens import WordMatch

        return WordMatch([900 + len(word) for word in dict.fromkeys(words) if word not in self.refuse])


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (lambda: spec.parse(RC, {"token_ids": [1, 1000]}), "token_ids"),
        (lambda: spec.parse(RC, {"token_ids": [1, 1000]}, prefix="steer_"), "steer_token_ids"),
        (lambda: spec.parse(["odd", {"name": RC, "token_ids": [1000]}]), "steer[1].token_ids"),
        (lambda: spec.parse({"name": RC, "words": ["no"]}), "steer.words"),
        (lambda: spec.parse_flat({"steer_words": ["no"]}, default(amplitude=3)).spec, "steer_words"),
        (lambda: (spec.parse_option(f"{RC}:" + '{"words": ["no"]}'),), f"{RC}:words"),
        (lambda: spec.from_wire([[RC, {"token_ids": [1000]}]]), "steer[0].token_ids"),
    ],
)
def test_what_a_tokenizer_refuses_is_named_as_it_was_written(request_, field):
    with pytest.raises(SteerError) as caught:
        spec.resolve(request_(), Words(refuse=("no",)))
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: got ")


@st.composite
def parameters(draw: st.DrawFn) -> dict[str, Any]:
    schedule = draw(st.sampled_from(["triangular", "constant", "cosine", "piecewise"]))
    wave = {"schedule": st.just(schedule)}
    if schedule == "piecewise":
        points = st.lists(
            st.tuples(st.integers(0, 10**6), st.floats(-100, 100)), min_size=1, max_size=5, unique_by=lambda p: p[0]
        )
        wave["points"] = points.map(sorted)
    else:
        wave["amplitude"] = st.floats(-100, 100)
    if schedule in ("triangular", "cosine"):
        wave |= {"period": st.floats(0.01, 1e9), "phase": st.floats(-1, 1)}
    optional = {
        "words": st.lists(st.text("abcé Ġ", min_size=1, max_size=9).filter(str.strip), min_size=1, max_size=4),
        "token_ids": st.lists(st.integers(0, 999), min_size=1, max_size=9),
        "window": st.lists(st.tuples(st.integers(0, 99), st.integers(100, 2**31 - 1)), min_size=1, max_size=4),
        "origin": st.sampled_from(["auto", "think", "output"]),
        "after_end": st.sampled_from(["off", "restart", "continue"]),
        "start_position": st.integers(0, 2**31 - 1),
        "leading_space": st.booleans(),
        "preset": st.sampled_from(["reference", None]),
        "multi_piece": st.sampled_from(["skip", "first"]),
    }
    required = {name: wave.pop(name) for name in ("schedule", "points") if name in wave}
    return draw(st.fixed_dictionaries(required, optional={**wave, **optional}))


@given(fields=parameters(), resolve=st.booleans())
@settings(max_examples=150, deadline=None)
def test_there_and_back_in_json(fields, resolve):
    there: spec.Spec = (steer(**fields), Steer(Odd, OddParams(size="x", table={"a": 1.5})))
    if resolve:
        there = spec.resolve(there, Words())
        assert spec.resolve(there, Words()) == there
        assert spec.resolve(there, None) == there
    wire = json.loads(json.dumps(spec.to_wire(there)))
    back = spec.from_wire(wire)
    assert back == there
    assert [s.params.model_fields_set for s in back] == [s.params.model_fields_set for s in there]
    assert spec.to_wire(back) == spec.to_wire(there)


@pytest.mark.parametrize(
    ("wire", "field", "valid"),
    [
        ("x", "steer", "a list"),
        (None, "steer", "a list"),
        ({"a": 1}, "steer", "a list"),
        (["x"], "steer[0]", "a pair of a plugin's name and its parameters"),
        ([["odd"]], "steer[0]", "a pair of a plugin's name and its parameters"),
        ([["odd", {}], [["odd"], {}]], "steer[1]", "a pair of a plugin's name and its parameters"),
        ([["cycle", {}]], "steer[0]", ONE_OF),
        ([["odd", []]], "steer[0]", "a mapping"),
        ([["odd", {"size": 1.5}]], "steer[0].size", "a valid integer or a valid string"),
    ],
)
def test_a_malformed_message_from_another_process(wire, field, valid):
    with pytest.raises(SteerError) as caught:
        spec.from_wire(wire)
    assert (caught.value.field, caught.value.valid) == (field, valid)
