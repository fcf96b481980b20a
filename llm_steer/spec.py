"""What a caller asked for, in any of the forms that callers write, as a validated list of plugins with parameters.

The same words mean the same everywhere:

==============================================  =======================================================================
``"reflection_cycle"``                          one plugin; its parameters stand beside it (keywords, ``steer_*`` keys)
``{"name": "reflection_cycle", "amplitude": 7}``  one plugin with parameters; without ``name``, the default plugin
``["reflection_cycle", {...}]``                 several, applied in this order
a JSON string of one of the two above           what HTTP carries, where nested values are not allowed
``True``                                        the default
``"off"``, ``None``, ``False``                  not steered, whatever the default is
==============================================  =======================================================================

1 and 0 stand for True and False: HTTP carries them so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from llm_steer import registry
from llm_steer.errors import SteerError, did_you_mean
from llm_steer.formats import from_json, from_option, from_yaml_file
from llm_steer.plugin import Params, Plugin

if TYPE_CHECKING:
    from llm_steer.artifact import Shelf
    from llm_steer.tokens import Vocabulary

OFF = "off"
PREFIX = "steer"
MAX_PLUGINS = 8


@dataclass(frozen=True)
class Steer:
    """One plugin with the parameters of one request."""

    plugin: type[Plugin[Any]]
    params: Params
    label: str = field(default="", compare=False)
    """What stands before a parameter's name where the caller wrote it (``steer_``, ``steer[1].``): for errors."""

    @property
    def name(self) -> str:
        return self.plugin.name


Spec = tuple[Steer, ...]
"""Plugins in the order in which they act; empty for a request that is not steered."""


@dataclass(frozen=True)
class Request:
    """The steering part of one engine request."""

    spec: Spec
    trace: bool = False


def parse(value: Any, fields: Mapping[str, Any] | None = None, defaults: Spec = (), *, prefix: str = "") -> Spec:
    """Validate a steering request.

    Args:
        value: one of the forms of the module docstring.
        fields: parameters that stand beside a single plugin's name.
        defaults: what is steered when the request says nothing, and what its fields are merged over. Not resolved yet:
            a request may change how words become tokens.
        prefix: how the caller spells ``fields`` in errors (``"steer_"`` over HTTP).

    Raises:
        SteerError: naming the field, its value, and what would be valid.
    """
    fields = dict(fields or {})
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        value = from_json(value, PREFIX)
    given = value
    if type(value) is int and value in (0, 1):
        value = bool(value)
    several = isinstance(value, list | tuple)
    if several and not value:
        raise SteerError(PREFIX, given, f"a list of at least one plugin, or {OFF}")
    if value is None or value is False or (isinstance(value, str) and value == OFF):
        _refuse_beside(fields, prefix, "left out when steer is off")
        return ()
    if value is True:
        if not defaults:
            raise SteerError(PREFIX, given, f"{_a_plugin()}: there is no default here")
        if not fields:
            return defaults
        if len(defaults) > 1:
            _refuse_beside(fields, prefix, f"accompanied by {PREFIX!r}, {_a_plugin()}: several plugins steer by default")
        value = defaults[0].name
    items = value if several else [value]
    if len(items) > MAX_PLUGINS:
        raise SteerError(PREFIX, value, f"at most {MAX_PLUGINS} plugins")
    if len(items) > 1:
        _refuse_beside(fields, prefix, 'inside a mapping {"name": ..., parameters} when several plugins steer')
    spec: list[Steer] = []
    for index, item in enumerate(items):
        where = f"{PREFIX}[{index}]" if several else PREFIX
        steer = _parse_one(item, fields, defaults, where, prefix)
        if any(steer.name == other.name for other in spec):
            raise SteerError(where, steer.name, "a plugin that is not in the list already")
        spec.append(steer)
    return tuple(spec)


def parse_flat(arguments: Mapping[str, Any], defaults: Spec = ()) -> Request:
    """Validate the ``steer*`` keys of an engine request (``SamplingParams.extra_args``, HTTP ``vllm_xargs``).

    ``steer`` holds the request, ``steer_trace`` asks for the trace, every other ``steer_NAME`` is the parameter NAME of
    the one plugin that is asked for, or of the default. Keys that do not start with ``steer`` are not ours.
    """
    ours = {key: value for key, value in arguments.items() if isinstance(key, str) and key.lower().startswith(PREFIX)}
    if isinstance(body := arguments.get("vllm_xargs"), Mapping) and any(str(key).lower().startswith(PREFIX) for key in body):
        raise SteerError("vllm_xargs", dict(body), "a field of an HTTP body; in extra_args its keys stand by themselves")
    fields: dict[str, Any] = {}
    for key, value in ours.items():
        if key == PREFIX or key == f"{PREFIX}_trace":
            continue
        if not key.startswith(f"{PREFIX}_"):
            raise SteerError(key, value, f"written {PREFIX!r}, or '{PREFIX}_' and a parameter's name in lower case")
        fields[key.removeprefix(f"{PREFIX}_")] = value
    trace = ours.get(f"{PREFIX}_trace", False)
    if not isinstance(trace, int) or trace not in (0, 1):
        raise SteerError(f"{PREFIX}_trace", trace, "0 or 1")
    if PREFIX in ours:
        spec = parse(ours[PREFIX], fields, defaults, prefix=f"{PREFIX}_")
    elif fields:
        if not defaults:
            _refuse_beside(fields, f"{PREFIX}_", f"accompanied by {PREFIX!r}, {_a_plugin()}: there is no default here")
        spec = parse(True, fields, defaults, prefix=f"{PREFIX}_")
    else:
        spec = defaults
    return Request(spec, bool(trace))


def parse_option(text: str) -> Steer:
    """Validate ``NAME``, ``NAME:key=value,key=value``, ``NAME:{json}`` or ``NAME:@file.yaml``, as on a command line."""
    name, _, rest = text.partition(":")
    plugin, label = registry.get(name), f"{name}:"
    fields: Any = {}
    if rest.startswith("@"):
        fields = from_yaml_file(Path(rest[1:]), name)
    elif rest.startswith("{"):
        fields = from_json(rest, name)
    else:
        for part in filter(None, rest.split(",")):
            key, equals, value = part.partition("=")
            key = key.strip()
            if not equals:
                raise SteerError(f"{label}{part}", part, "written key=value; lists need NAME:{json} or NAME:@file.yaml")
            if key in fields:
                raise SteerError(f"{label}{key}", value, "given once")
            fields[key] = from_option(value)
    if not isinstance(fields, dict):
        raise SteerError(name, fields, "a mapping of parameter names to values")
    return Steer(plugin, build(plugin, fields, label), label)


def build(plugin: type[Plugin[Any]], fields: Mapping[Any, Any], prefix: str = "") -> Params:
    """Validate one plugin's parameters; ``prefix`` is put before the field's name in errors."""
    for key, value in fields.items():
        if not isinstance(key, str):
            raise SteerError(f"{prefix}{key!r}", value, f"a parameter of {plugin.name}, by its name")
        if any("\ud800" <= character <= "\udfff" for character in key):  # which pydantic cannot take
            raise SteerError(f"{prefix}{key}", value, _a_parameter(plugin, key))
    try:
        return plugin.Params(**fields)
    except ValidationError as error:
        raise _explain(plugin, error, fields, prefix) from error


def resolve(spec: Spec, vocabulary: Vocabulary | None, shelf: Shelf | None = None) -> Spec:
    """Turn words and markers into token ids, names of artifacts into hashes, where the tokenizer is.

    Raises:
        SteerError: in the caller's spelling, as ``parse`` does.
    """
    resolved = []
    for steer in spec:
        try:
            params = steer.params.resolve(vocabulary, shelf)
        except SteerError as error:
            whole = error.field == PREFIX  # not a parameter, but that the plugin was asked for
            where = steer.label.rstrip("_.:") if whole else f"{steer.label}{error.field}"
            raise SteerError(where or PREFIX, error.value, error.valid) from error
        resolved.append(Steer(steer.plugin, params, steer.label))
    return tuple(resolved)


def to_wire(spec: Spec) -> list[list[Any]]:
    """JSON types, for another process."""
    return [[s.name, s.params.model_dump(mode="json", exclude_unset=True)] for s in spec]


def from_wire(items: Sequence[Sequence[Any]]) -> Spec:
    """Inverse of :func:`to_wire`. Validates again: the other side may be anyone."""
    spec = []
    for index, item in enumerate(_checked(items, list | tuple, PREFIX)):
        where = f"{PREFIX}[{index}]"
        if not isinstance(item, list | tuple) or len(item) != 2 or not isinstance(item[0], str):
            raise SteerError(where, item, "a pair of a plugin's name and its parameters")
        plugin = _plugin(item[0], where)
        spec.append(Steer(plugin, build(plugin, _checked(item[1], Mapping, where), f"{where}."), f"{where}."))
    return tuple(spec)


# ----------------------------------------------------------------------------------------------------------------------


def _parse_one(item: Any, fields: Mapping[str, Any], defaults: Spec, where: str, prefix: str) -> Steer:
    by_name = {s.name: s for s in defaults}
    own, label = dict(fields), prefix
    if isinstance(item, str):
        plugin = _plugin(item, where, or_off=where == PREFIX)
    elif isinstance(item, Mapping):
        if item:
            _refuse_beside(fields, prefix, "inside the mapping that holds the plugin's name")
            own, label = dict(item), f"{where}."
        name = own.pop("name", None) if item else None
        if name is None:
            if len(by_name) != 1:
                raise SteerError(where, item, f'a mapping with "name", {_a_plugin()}')
            name = next(iter(by_name))
        plugin = _plugin(name, f"{where}.name")
    else:
        valid = "the name of a plugin, or a mapping with one"
        raise SteerError(where, item, valid if where != PREFIX else f"{valid}, or a list of them, or off; {_a_plugin()}")
    if default := by_name.get(plugin.name):
        own = plugin.Params.inherit(default.params.model_dump(exclude_unset=True), own)
    return Steer(plugin, build(plugin, own, label), label)


def _plugin(name: Any, where: str, *, or_off: bool = False) -> type[Plugin[Any]]:
    if isinstance(name, str) and registry.is_plugin(name):
        return registry.get(name)
    choices = [*registry.names(), *([OFF] if or_off else [])]
    raise SteerError(where, name, _a_plugin(or_off=or_off) + (did_you_mean(name, choices) if isinstance(name, str) else ""))


def _a_plugin(*, or_off: bool = False) -> str:
    return f"one of {', '.join(registry.names())}" + (f", or {OFF}" if or_off else "")


def _a_parameter(plugin: type[Plugin[Any]], unknown: str) -> str:
    fields = plugin.Params.model_fields
    return f"a parameter of {plugin.name}: {', '.join(fields)}{did_you_mean(unknown, fields)}"


def _refuse_beside(fields: Mapping[str, Any], prefix: str, valid: str) -> None:
    for name, value in fields.items():
        raise SteerError(f"{prefix}{name}", value, valid)


def _checked(value: Any, kind: Any, where: str) -> Any:
    if not isinstance(value, kind):
        raise SteerError(where, value, "a mapping" if kind is Mapping else "a list")
    return value


def _explain(plugin: type[Plugin[Any]], error: ValidationError, given: Mapping[str, Any], prefix: str) -> SteerError:
    """The first mistake that pydantic found, in the caller's words."""
    problems = [(_path(p["loc"], given, p["type"] == "missing"), p) for p in error.errors(include_url=False)]
    problems.sort(key=lambda problem: problem[1]["type"] != "extra_forbidden")  # a misspelt one may be what is missing
    if not problems[0][0]:  # a validator of the whole model, which names the field itself
        problem = problems[0][1]
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, SteerError):
            return SteerError(f"{prefix}{cause.field}", cause.value, cause.valid)
        name, _, valid = _phrase(problem).partition(": ")
        if name in plugin.Params.model_fields and valid:
            return SteerError(f"{prefix}{name}", given.get(name), valid)
        return SteerError(prefix.rstrip("_.:") or plugin.name, dict(given), f"valid parameters of {plugin.name} ({name})")
    # A union reports every alternative: say what each would take, at the place to which the closest one led.
    root = problems[0][0][0]
    alternatives = [(path, p) for path, p in problems if path[:1] == (root,)]
    path, first = max(alternatives, key=lambda alternative: len(alternative[0]))
    name = prefix + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    if first["type"] == "extra_forbidden":
        return SteerError(name, first["input"], _a_parameter(plugin, str(path[-1])))
    phrases = dict.fromkeys(_phrase(p) + _limits(plugin, path, p["type"]) for where, p in alternatives if where == path)
    return SteerError(name, None if first["type"] == "missing" else first["input"], " or ".join(phrases))


def _path(location: tuple[int | str, ...], given: Any, missing: bool) -> tuple[int | str, ...]:
    """Where in the caller's own data a problem lies: pydantic mixes the tags of unions and validators in."""
    path: list[int | str] = []
    for depth, part in enumerate(location, 1):
        absent = missing and depth == len(location)
        if isinstance(part, int) or not path or absent or (isinstance(given, Mapping) and part in given):
            path.append(part)
            try:
                given = given[part]
            except (LookupError, TypeError):
                given = None
    return tuple(path)


def _limits(plugin: type[Plugin[Any]], path: Sequence[int | str], problem: str) -> str:
    """The range of a number that is none: pydantic tells of it only once it has a number."""
    if not problem.startswith(("float_", "int_", "finite_")):
        return ""
    schemas = [{"properties": plugin.Params.model_json_schema()["properties"]}]
    for part in path:
        inner = [s.get("items") if isinstance(part, int) else s.get("properties", {}).get(part) for s in schemas]
        schemas = [option for schema in inner if schema for option in schema.get("anyOf", [schema])]
    wordings = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    numbers = [s for s in schemas if s.get("type") in ("number", "integer")]
    bounds = [f"{words} {n[key]}" for n in numbers[:1] for key, words in wordings.items() if key in n]
    return "".join(f", {bound}" for bound in bounds[:1]) + "".join(f" and {bound}" for bound in bounds[1:])


def _phrase(problem: Mapping[str, Any]) -> str:
    """A pydantic message as a phrase that follows "must be"."""
    message: str = problem["msg"]
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, SteerError):
        return cause.valid
    if message.startswith("Value error, "):
        return message.removeprefix("Value error, ").removeprefix("must be ")
    if problem["type"] == "list_type" and isinstance(problem["input"], str):
        return "a list, not a text that holds one"
    if problem["type"] == "list_type":
        return "a list, in brackets"
    if message.startswith("Input should be "):
        return message.removeprefix("Input should be ")
    if size := re.fullmatch(r"(\w+) should have (at (?:least|most) \d+ \w+)(?: after validation)?(?:, not (\d+))?", message):
        kind, bound, actual = size.groups()
        kind = type(problem["input"]).__name__ if kind == "Value" else kind.lower()
        return f"a {kind} of {bound}" + (f", not {actual}" if actual else "")
    return {"missing": "given"}.get(problem["type"], f"valid ({message})")
