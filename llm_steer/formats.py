"""Parameters as text: JSON, YAML files and plain values of a command line, read strictly.

The three agree: ``1e3`` is a number, ``no`` and ``off`` are words, and a key that is given twice is an error.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from llm_steer.errors import SteerError

MAX_TEXT = 65_536


def from_json(text: str, field: str) -> Any:
    """Parse JSON text; ``field`` is what errors call it."""
    if len(text) > MAX_TEXT:
        raise SteerError(field, text, f"at most {MAX_TEXT} characters of JSON")
    try:
        return json.loads(text, object_pairs_hook=_without_repetition)
    except RecursionError:
        raise SteerError(field, text, "valid JSON, not nested as deeply") from None
    except ValueError as error:
        raise SteerError(field, text, f"valid JSON ({error})") from error


def from_yaml_file(path: Path, field: str) -> Any:
    """Parse a small YAML file."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_TEXT + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SteerError(field, str(path), f"a readable YAML file ({reason})") from error
    if len(text) > MAX_TEXT:
        raise SteerError(field, str(path), f"a YAML file of at most {MAX_TEXT} characters")
    try:
        return yaml.load(text, Loader=YamlLoader)
    except RecursionError:
        raise SteerError(field, str(path), "a valid YAML file, not nested as deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        problem, mark = getattr(error, "problem", None) or str(error).split("\n")[0], getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise SteerError(field, str(path), f"a valid YAML file ({problem}{line})") from error


def from_option(text: str) -> Any:
    """The value of ``key=value``: a number, ``true``, ``false``, ``null``, or else the text itself."""
    text = text.strip()
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return {"true": True, "false": False, "null": None}.get(text.lower(), text)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} is there twice")
        found[key] = value
    return found


class YamlLoader(yaml.SafeLoader):
    """YAML 1.2's plain values (PyYAML reads 1.1, where ``no`` is false, ``1e3`` text, ``010`` eight, ``20:00`` 1200)."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (as in the base class)

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "aliases are not supported", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for i, key in enumerate(keys):
            if key in keys[:i]:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is there twice", node.value[i][0].start_mark)
        return super().construct_mapping(node, deep=deep)


def _number(kind: type[int] | type[float]) -> Any:
    return lambda loader, node: kind(loader.construct_scalar(node))


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
):
    YamlLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _first)
YamlLoader.add_constructor("tag:yaml.org,2002:int", _number(int))
YamlLoader.add_constructor("tag:yaml.org,2002:float", _number(float))
