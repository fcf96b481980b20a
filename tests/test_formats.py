"""Parameters as text: the same plain values in JSON, YAML and on a command line."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_steer import SteerError
from llm_steer.formats import MAX_TEXT, from_json, from_option, from_yaml_file

PLAIN = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False) | st.text(max_size=20)
NESTED = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=12
)


@pytest.fixture
def yaml_of(tmp_path):
    def read(text: str):
        path = tmp_path / "parameters.yaml"
        path.write_text(text, encoding="utf-8")
        return from_yaml_file(path, "cycle")

    return read


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-3", -3),
        ("010", 10),
        ("1e3", 1000.0),
        ("1E-3", 0.001),
        ("2.5", 2.5),
        (".5", 0.5),
        ("5.", 5.0),
        ("true", True),
        ("False", False),
        ("null", None),
        ("no", "no"),
        ("off", "off"),
        ("20:00", "20:00"),
        ("2020-01-01", "2020-01-01"),
        ("reference", "reference"),
        ("1_0x", "1_0x"),
    ],
)
def test_a_plain_value_is_the_same_on_a_command_line_and_in_yaml(text, value, yaml_of):
    for read in (from_option(text), yaml_of(f"key: {text}\n")["key"], yaml_of(f"- {text}\n")[0]):
        assert read == value
        assert type(read) is type(value)


@given(value=NESTED)
@settings(max_examples=100, deadline=None)
def test_json_is_read_as_it_was_written(value):
    assert from_json(json.dumps(value), "steer") == value


@given(
    value=st.dictionaries(
        st.text("abcdef", min_size=1), st.lists(st.integers() | st.booleans()) | st.text("xyz "), max_size=5
    )
)
@settings(max_examples=100, deadline=None)
def test_yaml_is_read_as_it_was_written(value, tmp_path_factory):
    path = tmp_path_factory.mktemp("yaml") / "file.yaml"
    path.write_text(yaml.safe_dump(value), encoding="utf-8")
    assert from_yaml_file(path, "cycle") == value


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ('{"a"', "valid JSON (Expecting ':' delimiter: line 1 column 5 (char 4))"),
        ("[1,]", "valid JSON ("),
        ('{"a": 1, "b": 2, "a": 3}', "valid JSON ('a' is there twice)"),
        ('[{"x": {"a": 1, "a": 1}}]', "valid JSON ('a' is there twice)"),
        ("[" * 50_000, "valid JSON, not nested as deeply"),
        ("[" + "1" * 5000 + "]", "valid JSON (Exceeds the limit"),
        ('"' + "x" * MAX_TEXT + '"', "at most 65536 characters of JSON"),
        ("", "valid JSON ("),
    ],
)
def test_bad_json(text, valid):
    with pytest.raises(SteerError) as caught:
        from_json(text, "steer")
    assert caught.value.field == "steer"
    assert caught.value.valid.startswith(valid)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("a: 1\nb: [1\n", "a valid YAML file (expected ',' or ']'"),
        ("a: 1\nb: 2\na: 3\n", "a valid YAML file ('a' is there twice, line 3)"),
        ("x: {a: 1, a: 2}\n", "a valid YAML file ('a' is there twice, line 1)"),
        ("a: &x [1]\nb: *x\n", "a valid YAML file (aliases are not supported, line 2)"),
        ("a: &x [1]\nb: [*x, *x]\nc: &y [*x]\n", "a valid YAML file (aliases are not supported, line 2)"),
        ("a: !!python/object/apply:os.system ['true']\n", "a valid YAML file (could not determine a constructor"),
        ("? [1, 2]\n: 3\n", "a valid YAML file (found unhashable key"),
        ("{" * 400, "a valid YAML file, not nested as deeply"),
        ("a: " + "1" * 5000 + "\n", "a valid YAML file (Exceeds the limit"),
        ("a\x00b: 1\n", "a valid YAML file (unacceptable character #x0000: special characters are not allowed)"),
        ("a: 1\n" + "# padding\n" * 7000, "a YAML file of at most 65536 characters"),
    ],
)
def test_bad_yaml(text, valid, yaml_of):
    with pytest.raises(SteerError) as caught:
        yaml_of(text)
    assert caught.value.field == "cycle"
    assert caught.value.valid.startswith(valid)
    assert "\n" not in caught.value.valid


def test_ampersands_and_stars_are_no_aliases(yaml_of):
    assert yaml_of("words: ['R&D', '* so', a&b]\n") == {"words": ["R&D", "* so", "a&b"]}


def test_files_that_cannot_be_read(tmp_path):
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, reason in (
        (tmp_path / "missing.yaml", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (binary, "'utf-8' codec can't decode"),
        (tmp_path / "nul\0byte", "embedded null byte"),
    ):
        with pytest.raises(SteerError) as caught:
            from_yaml_file(path, "cycle")
        assert caught.value.valid.startswith(f"a readable YAML file ({reason}")
