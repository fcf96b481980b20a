"""What is compared: steering methods, each with a label."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from llm_steer.eval.continuation import S1, Continuation
from llm_steer.eval.settings import validated

from llm_steer import registry
from llm_steer.errors import SteerError
from llm_steer.formats import from_json, from_option
from llm_steer.spec import OFF, Spec, parse, parse_option

NONE = "none"
LOOPS: Mapping[str, type[Continuation]] = {"s1": S1}
"""Methods that ask several times instead of steering: no plugin can."""


@dataclass(frozen=True)
class Method:
    """One way of answering."""

    label: str
    spec: Spec = ()
    loop: Continuation | None = None

    @property
    def steer(self) -> Any:
        """For ``Request.steer``."""
        if not self.spec:
            return OFF
        items = [{"name": s.name, **s.params.model_dump(mode="json", exclude_unset=True)} for s in self.spec]
        return items[0] if len(items) == 1 else items

    def identity(self) -> dict[str, Any]:
        """Everything that decides what the method does: JSON types."""
        plugins = [
            {"name": s.name, "version": _version(s.name), "params": s.params.model_dump(mode="json")} for s in self.spec
        ]
        return {"plugins": plugins, "loop": self.loop.identity() if self.loop else None}


def parse_methods(given: Sequence[str | Mapping[str, Any]]) -> list[Method]:
    """Methods in any form that a caller writes.

    Args:
        given: texts as of :func:`split`, or mappings ``{"label": ..., "steer": ...}`` with what ``steer(model, ...)`` takes.

    Raises:
        SteerError: an unknown method or parameter, or the same one twice.
    """
    methods = [_from_text(m) if isinstance(m, str) else _from_mapping(m) for m in given]
    for i, method in enumerate(methods):
        for other in methods[:i]:
            if other.label == method.label:
                raise SteerError("--steer", method.label, "given once; a label in YAML tells two apart")
            if other.identity() == method.identity():
                raise SteerError("--steer", method.label, f"another method than {other.label}")
    if not methods:
        raise SteerError("--steer", list(given), "at least one method, or none")
    return methods


def split(text: str) -> list[str]:
    """``none,tip:alpha=3,beta=600,no_wait`` as its three methods: what has a ``=`` but no name belongs to the one before."""
    if "{" in text or ":@" in text:
        return [text]
    parts: list[str] = []
    for part in text.split(","):
        if parts and ":" in parts[-1] and "=" in part and ":" not in part.split("=")[0]:
            parts[-1] += f",{part}"
        elif part.strip():
            parts.append(part.strip())
    return parts


def _from_text(text: str) -> Method:
    if text in (NONE, OFF):
        return Method(NONE)
    name, _, rest = text.partition(":")
    if name in LOOPS and not registry.is_plugin(name):
        return Method(text, loop=_loop(name, _fields(rest, name)))
    if not registry.is_plugin(name.split("+")[0]):
        choices = [NONE, *LOOPS, *registry.names()]
        raise SteerError("--steer", text, f"one of {', '.join(choices)}, with parameters as NAME:key=value")
    steers = [parse_option(part) for part in re.split(r"\+(?=[a-z_])", text)]
    return Method(text, parse([{"name": s.name, **s.params.model_dump(exclude_unset=True)} for s in steers]))


def _from_mapping(given: Mapping[str, Any]) -> Method:
    if set(given) != {"label", "steer"} or not isinstance(given["label"], str) or not given["label"]:
        raise SteerError("steer", dict(given), "a text, or a mapping with label and steer")
    steer = given["steer"]
    if isinstance(steer, Mapping) and steer.get("name") in LOOPS and not registry.is_plugin(steer["name"]):
        return Method(given["label"], loop=_loop(steer["name"], {k: v for k, v in steer.items() if k != "name"}))
    if steer == NONE:
        return Method(given["label"])
    return Method(given["label"], parse(steer))


def _loop(name: str, fields: Mapping[str, Any]) -> Continuation:
    return validated(LOOPS[name], dict(fields), f"{name}:")


def _fields(rest: str, name: str) -> dict[str, Any]:
    if rest.startswith("{"):
        fields = from_json(rest, name)
        return fields if isinstance(fields, dict) else {"": fields}
    fields = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise SteerError(f"{name}:{part}", part, "written key=value")
        fields[key.strip()] = from_option(value)
    return fields


def _version(name: str) -> str | None:
    """Of the distribution that ships a plugin."""
    for point in entry_points(group=registry.GROUP, name=name):
        if point.dist is not None:
            return f"{point.dist.name} {point.dist.version}"
    return None
