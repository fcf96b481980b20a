"""What callers are told when they write something else than a request."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from llm_steer.plugins.reflection_cycle import ReflectionCycleParams

from llm_steer import SteerError, registry, spec
from llm_steer.spec import Steer
from support import odd_plugin
from support.odd_plugin import ONE_OF, RC, Odd, OddParams, default


@pytest.fixture(autouse=True)
def _two_plugins(monkeypatch):
    odd_plugin.install(monkeypatch)


FIELDS = ", ".join(ReflectionCycleParams.model_fields)
AMPLITUDE = "at least -100 and at most 100"
DEEP = "[" * 900 + "]" * 900


def _numbered(cases: list[tuple[Any, ...]]) -> list[str]:
    """Names for cases whose values cannot be part of one."""
    return [f"{n}" for n in range(len(cases))]


BAD_FIELDS = [
    ("amplitude", "abc", "'abc'", f"a valid number, {AMPLITUDE}"),
    ("amplitude", "5", "'5'", f"a valid number, {AMPLITUDE}"),
    ("amplitude", None, "None", f"a valid number, {AMPLITUDE}"),
    ("amplitude", True, "True", f"a valid number, {AMPLITUDE}"),
    ("amplitude", [5], "[5]", f"a valid number, {AMPLITUDE}"),
    ("amplitude", {"a": 1}, "{'a': 1}", f"a valid number, {AMPLITUDE}"),
    ("amplitude", math.nan, "nan", f"a finite number, {AMPLITUDE}"),
    ("amplitude", math.inf, "inf", f"a finite number, {AMPLITUDE}"),
    ("amplitude", -1e999, "-inf", f"a finite number, {AMPLITUDE}"),
    ("amplitude", 100.5, "100.5", "less than or equal to 100"),
    ("amplitude", -101, "-101", "greater than or equal to -100"),
    ("amplitude", 10**5000, "a value of type int that cannot be shown", f"a valid number, {AMPLITUDE}"),
    ("amplitude", 1 + 2j, "(1+2j)", f"a valid number, {AMPLITUDE}"),
    ("period", 0, "0", "greater than or equal to 0.01"),
    ("period", -5.0, "-5.0", "greater than or equal to 0.01"),
    ("period", 2.0**31, "2147483648.0", "less than 2147483648"),
    ("period", "1200", "'1200'", "a valid number, at least 0.01 and below 2147483648"),
    ("phase", 1.5, "1.5", "less than or equal to 1"),
    ("phase", math.nan, "nan", "a finite number, at least -1 and at most 1"),
    (
        "schedule",
        "sine",
        "'sine'",
        "'triangular', 'constant', 'linear_decay', 'cosine', 'silver', 'piecewise' or 'shuffled'",
    ),
    (
        "schedule",
        "Triangular",
        "'Triangular'",
        "'triangular', 'constant', 'linear_decay', 'cosine', 'silver', 'piecewise' or 'shuffled'",
    ),
    (
        "schedule",
        ["constant"],
        "['constant']",
        "'triangular', 'constant', 'linear_decay', 'cosine', 'silver', 'piecewise' or 'shuffled'",
    ),
    ("schedule", None, "None", "'triangular', 'constant', 'linear_decay', 'cosine', 'silver', 'piecewise' or 'shuffled'"),
    ("origin", "start", "'start'", "'auto', 'think' or 'output'"),
    ("after_end", "stop", "'stop'", "'off', 'restart' or 'continue'"),
    ("multi_piece", "last", "'last'", "'skip' or 'first'"),
    ("preset", "refrence", "'refrence'", "'reference'"),
    ("preset", 1, "1", "'reference'"),
    ("preset", ["reference"], "['reference']", "'reference'"),
    ("start_position", -1, "-1", "greater than or equal to 0"),
    ("start_position", 2.5, "2.5", "a valid integer, at least 0 and below 2147483648"),
    ("start_position", "3", "'3'", "a valid integer, at least 0 and below 2147483648"),
    ("start_position", 2**63, "9223372036854775808", "less than 2147483648"),
    ("leading_space", 2, "2", "a valid boolean"),
    ("leading_space", "yes", "'yes'", "a valid boolean"),
    ("ignore_case", 1.0, "1.0", "a valid boolean"),
    ("window", 8192, "8192", "a list, in brackets"),
    ("window", [], "[]", "a list of at least 1 item, not 0"),
    ("window[0]", [[0]], "[0]", "a list of at least 2 items, not 1"),
    ("window[0]", [[0, 1, 2]], "[0, 1, 2]", "a list of at most 2 items, not 3"),
    ("window", [0, 5, 9], "[0, 5, 9]", "a list of pairs, or a flat list of an even number of numbers"),
    ("window", [[5, 5]], "[[5, 5]]", "pairs (start, end) with start below end"),
    ("window", [[0, 1]] * 17, "[[0, 1], [0, 1], [0, 1], ", "a list of at most 16 items, not 17"),
    ("window", {"0": 5}, "{'0': 5}", "a list, in brackets"),
    ("words", "wait", "'wait'", "a list, not a text that holds one"),
    ("words[0]", [""], "''", "a string of at least 1 character"),
    ("words[0]", ["x" * 65], "'xxxxx", "a string of at most 64 characters"),
    ("words[0]", ["\ud800"], "'\\ud800'", "a valid string, unable to parse raw data as a unicode string"),
    ("words", ["a"] * 65, "['a', 'a', ", "a list of at most 64 items, not 65"),
    ("words[1]", ["a", None], "None", "a valid string"),
    ("words", {"a": 1}, "{'a': 1}", "a list, in brackets"),
    ("words", [], "[]", "a list with at least one word, unless token_ids are given"),
    ("token_ids[0]", [-1], "-1", "greater than or equal to 0"),
    ("token_ids[1]", [3, 2**31], "2147483648", "less than 2147483648"),
    ("token_ids[0]", [1.5], "1.5", "a valid integer, at least 0 and below 2147483648"),
    ("token_ids[0]", ["3"], "'3'", "a valid integer, at least 0 and below 2147483648"),
    ("token_ids[0]", [True], "True", "a valid integer, at least 0 and below 2147483648"),
    ("token_ids", 3, "3", "a list, in brackets"),
    ("token_ids", list(range(1025)), "a list of 1025 items", "a list of at most 1024 items, not 1025"),
    ("token_ids[0]", [10**400], "10000", "less than 2147483648"),
    ("points", [[0, 1]], "[[0, 1]]", "left out with schedule='triangular', which does not read it"),
    ("points[0][1]", [[0, math.nan]], "nan", "a finite number"),
    ("points[0][0]", [["a", 1]], "'a'", "a valid number"),
    ("points[0][0]", json.loads(DEEP), "[[[", "a valid number"),
    ("Amplitude", 5, "5", f"a parameter of {RC}: {FIELDS} (did you mean 'amplitude'?)"),
    ("amplitud", 5, "5", f"a parameter of {RC}: {FIELDS} (did you mean 'amplitude'?)"),
    ("temperature", 5, "5", f"a parameter of {RC}: {FIELDS}"),
    ("", 5, "5", f"a parameter of {RC}: {FIELDS}"),
    ("\ud800", 5, "5", f"a parameter of {RC}: {FIELDS}"),
    ("model_config", {}, "{}", f"a parameter of {RC}: {FIELDS}"),
    ("__class__", 5, "5", f"a parameter of {RC}: {FIELDS}"),
    ("self", 5, "5", f"a parameter of {RC}: {FIELDS}"),
    ("name", "odd", "'odd'", f"a parameter of {RC}: {FIELDS}"),
    ("x" * 5000, 5, "5", f"a parameter of {RC}: {FIELDS}"),
]
"""Where the mistake is, the value of the whole field, how the message shows the mistake, what would be valid."""


def check(error: pytest.ExceptionInfo[SteerError], field: str, shown: str, valid: str) -> None:
    message = str(error.value)
    shown_field = field.encode(errors="backslashreplace").decode()
    if len(field) < 200:
        assert message.startswith(f"{shown_field}: got {shown}")
    assert message.endswith(f"; must be {valid}")
    assert error.value.field == field
    assert error.value.valid == valid
    assert len(message) < 650
    assert "Input should be" not in message
    assert "pydantic" not in message
    message.encode()


@pytest.mark.parametrize(("where", "value", "shown", "valid"), BAD_FIELDS, ids=_numbered(BAD_FIELDS))
def test_a_bad_parameter_is_named_as_it_was_written(where, value, shown, valid):
    """In each of the places where it can stand."""
    field = where.partition("[")[0]
    for call, prefix in (
        (lambda: spec.parse(RC, {field: value}), ""),
        (lambda: spec.parse(RC, {field: value}, prefix="steer_"), "steer_"),
        (lambda: spec.parse(RC, {field: value}, default(amplitude=3)), ""),
        (lambda: spec.parse(True, {field: value}, default(period=9), prefix="steer_"), "steer_"),
        (lambda: spec.parse_flat({"steer": RC, f"steer_{field}": value}), "steer_"),
        (lambda: spec.parse([RC], {field: value}), ""),
    ):
        with pytest.raises(SteerError) as caught:
            call()
        check(caught, f"{prefix}{where}", shown, valid)
    if field != "name":
        for call, prefix in (
            (lambda: spec.parse({"name": RC, field: value}), "steer."),
            (lambda: spec.parse({field: value}, {}, default(period=9)), "steer."),
            (lambda: spec.parse(["odd", {"name": RC, field: value}]), "steer[1]."),
            (lambda: spec.from_wire([["odd", {}], [RC, {field: value}]]), "steer[1]."),
        ):
            with pytest.raises(SteerError) as caught:
                call()
            check(caught, f"{prefix}{where}", shown, valid)


SPELLING = "written 'steer', or 'steer_' and a parameter's name in lower case"
ANY_FORM = f"the name of a plugin, or a mapping with one, or a list of them, or off; {ONE_OF}"

BAD_REQUESTS = [
    ("Reflection_Cycle", {}, "steer", "'Reflection_Cycle'", f"{ONE_OF}, or off (did you mean 'reflection_cycle'?)"),
    ("reflection-cycle", {}, "steer", "'reflection-cycle'", f"{ONE_OF}, or off (did you mean 'reflection_cycle'?)"),
    ("OFF", {}, "steer", "'OFF'", f"{ONE_OF}, or off (did you mean 'off'?)"),
    ("", {}, "steer", "''", f"{ONE_OF}, or off"),
    ("nothing like it", {}, "steer", "'nothing like it'", f"{ONE_OF}, or off"),
    ("x" * 5000, {}, "steer", "a str of 5000 characters", f"{ONE_OF}, or off"),
    ("\ud800", {}, "steer", "'\\ud800'", f"{ONE_OF}, or off"),
    ('"reflection_cycle"', {}, "steer", "'\"reflection_cycle\"'", f"{ONE_OF}, or off (did you mean 'reflection_cycle'?)"),
    (5, {}, "steer", "5", ANY_FORM),
    (-1, {}, "steer", "-1", ANY_FORM),
    (1.0, {}, "steer", "1.0", ANY_FORM),
    (math.nan, {}, "steer", "nan", ANY_FORM),
    (b"off", {}, "steer", "b'off'", ANY_FORM),
    (True, {}, "steer", "True", f"{ONE_OF}: there is no default here"),
    (1, {}, "steer", "1", f"{ONE_OF}: there is no default here"),
    ({}, {}, "steer", "{}", f'a mapping with "name", {ONE_OF}'),
    ({"amplitude": 5}, {}, "steer", "{'amplitude': 5}", f'a mapping with "name", {ONE_OF}'),
    ({"name": 5}, {}, "steer.name", "5", ONE_OF),
    ({"name": [RC]}, {}, "steer.name", "['reflection_cycle']", ONE_OF),
    ({"name": "cycle"}, {}, "steer.name", "'cycle'", ONE_OF),
    ({"name": "reflection_cycl"}, {}, "steer.name", "'reflection_cycl'", f"{ONE_OF} (did you mean 'reflection_cycle'?)"),
    ({"name": "off"}, {}, "steer.name", "'off'", ONE_OF),
    ({"Name": RC}, {}, "steer", "{'Name': 'reflection_cycle'}", f'a mapping with "name", {ONE_OF}'),
    ({"name": RC, 3: 4}, {}, "steer.3", "4", "a parameter of reflection_cycle, by its name"),
    ({"name": RC, None: 4}, {}, "steer.None", "4", "a parameter of reflection_cycle, by its name"),
    (["off"], {}, "steer[0]", "'off'", ONE_OF),
    ([RC, "Odd"], {}, "steer[1]", "'Odd'", f"{ONE_OF} (did you mean 'odd'?)"),
    ([RC, ["odd"]], {}, "steer[1]", "['odd']", "the name of a plugin, or a mapping with one"),
    ([[RC]], {}, "steer[0]", "['reflection_cycle']", "the name of a plugin, or a mapping with one"),
    ([None], {}, "steer[0]", "None", "the name of a plugin, or a mapping with one"),
    ([{"name": "odd"}, {}], {}, "steer[1]", "{}", f'a mapping with "name", {ONE_OF}'),
    ([RC, RC], {}, "steer[1]", "'reflection_cycle'", "a plugin that is not in the list already"),
    ([RC, {"name": RC}], {}, "steer[1]", "'reflection_cycle'", "a plugin that is not in the list already"),
    ([RC] * 9, {}, "steer", "['reflection_cycle', ", "at most 8 plugins"),
    ([RC] * 5000, {}, "steer", "a list of 5000 items", "at most 8 plugins"),
    ("off", {"amplitude": 5}, "steer_amplitude", "5", "left out when steer is off"),
    (None, {"amplitude": 5}, "steer_amplitude", "5", "left out when steer is off"),
    (
        [RC, "odd"],
        {"period": 5},
        "steer_period",
        "5",
        'inside a mapping {"name": ..., parameters} when several plugins steer',
    ),
    ({"name": RC}, {"period": 5}, "steer_period", "5", "inside the mapping that holds the plugin's name"),
    ('{"name": "reflection_cycle"}', {"period": 5}, "steer_period", "5", "inside the mapping that holds the plugin's name"),
    ('{"name"', {}, "steer", "'{\"name\"'", "valid JSON (Expecting ':' delimiter: line 1 column 8 (char 7))"),
    ("[1", {}, "steer", "'[1'", "valid JSON (Expecting ',' delimiter: line 1 column 3 (char 2))"),
    ('{"name": "odd", "name": "odd"}', {}, "steer", "'{", "valid JSON ('name' is there twice)"),
    ("[" * 60_000, {}, "steer", "a str of 60000 characters", "valid JSON, not nested as deeply"),
    ("[" * 70_000, {}, "steer", "a str of 70000 characters", "at most 65536 characters of JSON"),
    (DEEP, {}, "steer[0]", "[[[[[[...]]]]]]", "the name of a plugin, or a mapping with one"),
    (
        '{"name": "reflection_cycle", "amplitude": 1e999}',
        {},
        "steer.amplitude",
        "inf",
        "a finite number, at least -100 and at most 100",
    ),
    (
        '{"name": "reflection_cycle", "amplitude": NaN}',
        {},
        "steer.amplitude",
        "nan",
        "a finite number, at least -100 and at most 100",
    ),
]


@pytest.mark.parametrize(("value", "fields", "field", "shown", "valid"), BAD_REQUESTS, ids=_numbered(BAD_REQUESTS))
def test_a_bad_request_is_told_what_would_be_valid(value, fields, field, shown, valid):
    with pytest.raises(SteerError) as caught:
        spec.parse_flat({"steer": value, **{f"steer_{name}": v for name, v in fields.items()}})
    check(caught, field, shown, valid)


@pytest.mark.parametrize(
    ("arguments", "field", "shown", "valid"),
    [
        ({"STEER": RC}, "STEER", "'reflection_cycle'", SPELLING),
        ({"STEER_amplitude": 5}, "STEER_amplitude", "5", SPELLING),
        ({"steering": 5}, "steering", "5", SPELLING),
        ({"steer-amplitude": 5}, "steer-amplitude", "5", SPELLING),
        ({"steer_amplitude": 5}, "steer_amplitude", "5", f"accompanied by 'steer', {ONE_OF}: there is no default here"),
        ({"steer": RC, "steer_Phase": 5}, "steer_Phase", "5", f"a parameter of {RC}: {FIELDS} (did you mean 'phase'?)"),
        ({"steer": RC, "steer_trace": 2}, "steer_trace", "2", "0 or 1"),
        ({"steer": RC, "steer_trace": "1"}, "steer_trace", "'1'", "0 or 1"),
        ({"steer": RC, "steer_trace": 1.0}, "steer_trace", "1.0", "0 or 1"),
        ({"steer": RC, "steer_trace": [1]}, "steer_trace", "[1]", "0 or 1"),
        ({"steer": RC, "steer_trace": None}, "steer_trace", "None", "0 or 1"),
    ],
)  # fmt: skip
def test_bad_keys(arguments, field, shown, valid):
    with pytest.raises(SteerError) as caught:
        spec.parse_flat(arguments)
    check(caught, field, shown, valid)


def test_parameters_beside_several_defaults():
    defaults = (*default(), Steer(Odd, OddParams()))
    with pytest.raises(SteerError) as caught:
        spec.parse_flat({"steer_period": 9}, defaults)
    check(caught, "steer_period", "9", f"accompanied by 'steer', {ONE_OF}: several plugins steer by default")


@pytest.mark.parametrize(
    ("text", "field", "shown", "valid"),
    [
        ("cycle", "steer", "'cycle'", ONE_OF),
        ("Reflection_Cycle:period=5", "steer", "'Reflection_Cycle'", f"{ONE_OF} (did you mean 'reflection_cycle'?)"),
        (f"{RC}:period", f"{RC}:period", "'period'", "written key=value; lists need NAME:{json} or NAME:@file.yaml"),
        (f"{RC}:words=[Hmm", f"{RC}:words", "'[Hmm'", "a list, not a text that holds one"),
        (f"{RC}:words=*a", f"{RC}:words", "'*a'", "a list, not a text that holds one"),
        (f"{RC}:period=5,period=6", f"{RC}:period", "'6'", "given once"),
        (f"{RC}:=6", f"{RC}:", "6", f"a parameter of {RC}: {FIELDS}"),
        (f"{RC}:period=", f"{RC}:period", "''", "a valid number, at least 0.01 and below 2147483648"),
        (f"{RC}:period=nan", f"{RC}:period", "nan", "a finite number, at least 0.01 and below 2147483648"),
        (f"{RC}:period=20:00", f"{RC}:period", "'20:00'", "a valid number, at least 0.01 and below 2147483648"),
        (f"{RC}:amplitude=1e5", f"{RC}:amplitude", "100000.0", "less than or equal to 100"),
        (
            f"{RC}:" + "{",
            RC,
            "'{'",
            "valid JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))",
        ),
        (f"{RC}:" + '{"period": 1, "period": 2}', RC, "'{", "valid JSON ('period' is there twice)"),
        (f"{RC}:" + '{"period": "x"}', f"{RC}:period", "'x'", "a valid number, at least 0.01 and below 2147483648"),
        (f"{RC}:@/does/not/exist", RC, "'/does/not/exist'", "a readable YAML file (No such file or directory)"),
    ],
)
def test_bad_options(text, field, shown, valid):
    registry_names = registry.names()
    assert registry_names == ["odd", RC]
    with pytest.raises(SteerError) as caught:
        spec.parse_option(text)
    if field == "steer":  # the registry's own words, which know of installed plugins only
        assert str(caught.value).startswith(f"steer: got {shown}; must be one of ")
        return
    check(caught, field, shown, valid)


@pytest.mark.parametrize(("text", "shown"), [("- 1\n- 2\n", "[1, 2]"), ("", "None"), ("word\n", "'word'")])
def test_a_file_that_holds_no_mapping(text, shown, tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SteerError) as caught:
        spec.parse_option(f"{RC}:@{path}")
    check(caught, RC, shown, "a mapping of parameter names to values")


# -- a third party's parameters ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "field", "shown", "valid"),
    [
        ({"size": 1.5}, "steer_size", "1.5", "a valid integer or a valid string"),
        ({"values": ["a"]}, "steer_values[0]", "'a'", "a valid integer"),
        ({"values": "a"}, "steer_values", "'a'", "a valid integer or a list, not a text that holds one"),
        ({"table": {"x": "a"}}, "steer_table.x", "'a'", "a valid number"),
        ({"table": [1]}, "steer_table", "[1]", "a valid dictionary"),
        ({"inner": {}}, "steer_inner.layer", "None", "given"),
        ({"inner": {"layer": "a"}}, "steer_inner.layer", "'a'", "a valid integer"),
        ({"code": "A"}, "steer_code", "'A'", "valid (String should match pattern '^[a-z]+$')"),
        ({"needed": 7}, "steer", "{'needed': 7}", "valid parameters of odd (needed and size cannot both be 7)"),
        ({"needed": 8}, "steer_needed", "8", "any number but 8"),
        ({"needed": 9}, "steer_layers[0]", "1", "another layer"),
    ],
)
def test_third_party_parameters(fields, field, shown, valid):
    with pytest.raises(SteerError) as caught:
        spec.parse("odd", fields, prefix="steer_")
    check(caught, field, shown, valid)


def test_the_field_of_an_http_body_is_not_an_argument():
    with pytest.raises(SteerError, match=r"vllm_xargs: got .*must be a field of an HTTP body"):
        spec.parse_flat({"vllm_xargs": {"steer": "off"}})
    assert spec.parse_flat({"vllm_xargs": {"other": 1}}).spec == ()
