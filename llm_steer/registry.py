"""Name -> plugin class, from the entry-point group ``llm_steer.plugins``.

A third party ships a method as a package of its own with::

    [project.entry-points."llm_steer.plugins"]
    my_method = "my_package:MyMethod"

The built-in methods register in the same way. A class is imported only when its name is used.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from llm_steer.errors import SteerError, did_you_mean
from llm_steer.plugin import Params, Plugin

GROUP = "llm_steer.plugins"

RESERVED = ("name", "trace")
"""Parameters no plugin may have: beside a plugin's parameters these keys mean something else."""


@cache
def _entry_points() -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        # The same distribution can be seen twice (an editable install next to its build folder).
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise RuntimeError(
                f"two packages register a steering plugin {point.name!r}: {other.value} and {point.value}. Uninstall one."
            )
    return found


def names() -> list[str]:
    """Names of all installed plugins, sorted."""
    return sorted(_entry_points())


def is_plugin(name: str) -> bool:
    return name in _entry_points()


@cache
def get(name: str) -> type[Plugin[Any]]:
    """The plugin class behind a name.

    Raises:
        SteerError: no installed plugin has this name.
        RuntimeError: the plugin cannot be imported, or is not a plugin.
    """
    point = _entry_points().get(name)
    if point is None:
        raise SteerError("steer", name, f"one of {', '.join(names())}{did_you_mean(name, names())}")
    try:
        plugin = point.load()
    except Exception as error:
        raise RuntimeError(f"the steering plugin {name!r} ({point.value}) cannot be imported: {error}") from error
    if not (isinstance(plugin, type) and issubclass(plugin, Plugin) and getattr(plugin, "name", None) == name):
        raise RuntimeError(f"{point.value} is registered as the steering plugin {name!r}, but is no Plugin of that name")
    if not issubclass(plugin.Params, Params):
        raise RuntimeError(f"{point.value}.Params must be a subclass of llm_steer.Params")
    if taken := [field for field in RESERVED if field in plugin.Params.model_fields]:
        raise RuntimeError(
            f"{point.value}.Params must not have a field {taken[0]!r}: requests use that key for something else"
        )
    return plugin
