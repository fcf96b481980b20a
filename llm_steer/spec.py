"""What a caller asked for, in any of the forms that callers write, as a validated list of plugins with parameters.

The same words mean the same everywhere:

==============================================  =======================================================================
``"reflection_cycle"``                          one plugin; its parameters stand beside it (keywords, ``steer_*`` keys)
``{"name": "reflection_cycle", "amplitude": 7}``  one plugin with parameters; without ``name``, the default plugin
``["reflection_cycle", {...}]``                 several, applied in this order
a JSON string of one of the two above           what HTTP carries, where nested values are not allowed
``"off"``, ``None``, ``False``                  not steered, whatever the default is
==============================================  =======================================================================
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from llm_steer import registry
from llm_steer.errors import SteerError
from llm_steer.plugin import Params, Plugin

if TYPE_CHECKING:
    from llm_steer.tokens import Vocabulary

OFF = "off"
PREFIX = "steer"
MAX_TEXT = 65_536
MAX_PLUGINS = 8


@dataclass(frozen=True)
class Steer:
    """One plugin with the parameters of one request."""

    plugin: type[Plugin[Any]]
    params: Params

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
        value: one of the forms of the module docstring, or True for the defaults.
        fields: parameters that stand beside a single plugin's name.
        defaults: what is steered when the request says nothing, and what its fields are merged over.
        prefix: how the caller spells ``fields`` in errors (``"steer_"`` over HTTP).

    Raises:
        SteerError: naming the field, its value, and what would be valid.
    """
    fields = dict(fields or {})
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        value = _parse_json(value)
    if value is None or value is False or value == OFF or value == []:
        _refuse_beside(fields, prefix, "left out when steer is off")
        return ()
    if value is True:
        if not defaults:
            raise SteerError(PREFIX, value, f"{_one_of_plugins()}: there is no default here")
        if len(defaults) > 1 and not fields:
            return defaults
        value = {}
    items = value if isinstance(value, list | tuple) else [value]
    if len(items) > MAX_PLUGINS:
        raise SteerError(PREFIX, value, f"at most {MAX_PLUGINS} plugins")
    if len(items) > 1:
        _refuse_beside(fields, prefix, 'inside a mapping {"name": ..., parameters} when several plugins steer')
    spec: list[Steer] = []
    for index, item in enumerate(items):
        where = f"{PREFIX}[{index}]" if isinstance(value, list | tuple) else PREFIX
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
    ours = {key: value for key, value in arguments.items() if key.lower().startswith(PREFIX)}
    fields: dict[str, Any] = {}
    for key, value in ours.items():
        if key == PREFIX or key == f"{PREFIX}_trace":
            continue
        if not key.startswith(f"{PREFIX}_"):
            raise SteerError(key, value, f"written {PREFIX!r}, or '{PREFIX}_' and a parameter's name in lower case")
        fields[key.removeprefix(f"{PREFIX}_")] = value
    trace = ours.get(f"{PREFIX}_trace", False)
    if isinstance(trace, float | str) or trace not in (0, 1):
        raise SteerError(f"{PREFIX}_trace", trace, "0 or 1")
    if PREFIX in ours:
        value = ours[PREFIX]
    elif fields:
        if not defaults:
            _refuse_beside(fields, f"{PREFIX}_", f"accompanied by {PREFIX!r}, {_one_of_plugins()}: there is no default here")
        value = True
    else:
        return Request(defaults, bool(trace))
    return Request(parse(value, fields, defaults, prefix=f"{PREFIX}_"), bool(trace))


def parse_option(text: str) -> Steer:
    """Validate ``NAME``, ``NAME:key=value,key=value``, ``NAME:{json}`` or ``NAME:@file.yaml``, as on a command line."""
    import yaml

    name, _, rest = text.partition(":")
    plugin = registry.get(name)
    if rest.startswith("@"):
        fields = load_yaml(Path(rest[1:]), field=name)
    elif rest.startswith("{"):
        fields = _parse_json(rest)
    else:
        fields = {}
        for part in filter(None, rest.split(",")):
            key, equals, value = part.partition("=")
            if not equals:
                raise SteerError(f"{name}:{part}", part, "written key=value; lists need NAME:{json} or NAME:@file.yaml")
            fields[key.strip()] = yaml.safe_load(value)
    if not isinstance(fields, dict):
        raise SteerError(text, fields, "a mapping of parameter names to values")
    return Steer(plugin, build(plugin, fields, f"{name}:"))


def load_yaml(path: Path, field: str) -> Any:
    """Parse a small YAML file of parameters."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SteerError(field, str(path), f"a readable YAML file ({error})") from error
    if len(text) > MAX_TEXT or ("&" in text and "*" in text):
        raise SteerError(field, str(path), f"YAML of at most {MAX_TEXT} characters, without anchors and aliases")
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise SteerError(field, str(path), f"valid YAML ({error})") from error


def build(plugin: type[Plugin[Any]], fields: Mapping[str, Any], prefix: str = "") -> Params:
    """Validate one plugin's parameters; ``prefix`` is put before the field's name in errors."""
    try:
        return plugin.Params(**fields)
    except ValidationError as error:
        raise _explain(plugin, error, prefix) from error
    except TypeError as error:  # a key that is not a string
        raise SteerError(prefix or PREFIX, fields, f"parameters by name ({error})") from error


def resolve(spec: Spec, vocabulary: Vocabulary | None) -> Spec:
    """Turn words and markers into token ids, where the tokenizer is."""
    return tuple(Steer(s.plugin, s.params.resolve(vocabulary)) for s in spec)


def to_wire(spec: Spec) -> list[list[Any]]:
    """JSON types, for another process."""
    return [[s.name, s.params.model_dump(mode="json", exclude_unset=True)] for s in spec]


def from_wire(items: Sequence[Sequence[Any]]) -> Spec:
    """Inverse of :func:`to_wire`."""
    spec = []
    for name, fields in items:
        plugin = registry.get(name)
        spec.append(Steer(plugin, build(plugin, fields)))
    return tuple(spec)


# ----------------------------------------------------------------------------------------------------------------------


def _parse_one(item: Any, fields: Mapping[str, Any], defaults: Spec, where: str, prefix: str) -> Steer:
    by_name = {s.name: s for s in defaults}
    if isinstance(item, str):
        name, own, label = item, dict(fields), prefix
    elif isinstance(item, Mapping):
        own, label = dict(item), f"{where}."
        if item:
            _refuse_beside(fields, prefix, "inside the mapping that holds the plugin's name")
        else:  # the default plugin, with the fields beside it
            own, label = dict(fields), prefix
        name = own.pop("name", None)
        if name is None:
            if len(by_name) != 1:
                raise SteerError(where, item, f'a mapping with "name", {_one_of_plugins()}')
            name = next(iter(by_name))
    else:
        raise SteerError(
            where, item, f"the name of a plugin, {_one_of_plugins()}; a mapping with one; a list of them; or off"
        )
    if not isinstance(name, str):
        raise SteerError(f"{where}.name", name, _one_of_plugins())
    plugin = registry.get(name)
    if default := by_name.get(name):
        build(plugin, own, label)  # report a request's own mistakes before those of the combination
        own = plugin.Params.inherit(default.params.model_dump(exclude_unset=True), own)
    return Steer(plugin, build(plugin, own, label))


def _one_of_plugins() -> str:
    return f"one of {', '.join(registry.names())}"


def _refuse_beside(fields: Mapping[str, Any], prefix: str, valid: str) -> None:
    for name, value in fields.items():
        raise SteerError(f"{prefix}{name}", value, valid)


def _parse_json(text: str) -> Any:
    if len(text) > MAX_TEXT:
        raise SteerError(PREFIX, text, f"at most {MAX_TEXT} characters of JSON")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SteerError(PREFIX, text, f"valid JSON ({error})") from error


def _explain(plugin: type[Plugin[Any]], error: ValidationError, prefix: str) -> SteerError:
    first = error.errors(include_url=False)[0]
    location = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"] if part != "list")
    name = f"{prefix}{location.lstrip('.')}"
    if first["type"] == "extra_forbidden":
        return SteerError(name, first["input"], f"a parameter of {plugin.name}: {', '.join(plugin.Params.model_fields)}")
    message = first["msg"].removeprefix("Value error, ")
    for opening in ("Input should be ", "must be "):
        message = message.removeprefix(opening)
    if not first["loc"]:  # a validator of the whole model: it names the field itself
        field, _, rest = message.partition(": ")
        return SteerError(f"{prefix}{field}", first.get("ctx", {}).get("value", _value_of(first, field)), rest)
    return SteerError(name, first["input"], message[:1].lower() + message[1:])


def _value_of(problem: Any, field: str) -> Any:
    given = problem["input"]
    return given.get(field) if isinstance(given, Mapping) else given
