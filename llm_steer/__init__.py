"""Steer how language models reason, at inference time, without training: one hook interface for vLLM and Hugging Face."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from llm_steer.api import steer, steering, unsteer
    from llm_steer.errors import MissingDependencyError, SteerError, UnsupportedError
    from llm_steer.plugin import Context, Flag, Params, Plugin, Rows, Tokens

_HOMES = {
    "errors": ("MissingDependencyError", "SteerError", "UnsupportedError"),
    "plugin": ("Context", "Flag", "Params", "Plugin", "Rows", "Tokens"),
    "api": ("steer", "steering", "unsteer"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Context",
    "Flag",
    "MissingDependencyError",
    "Params",
    "Plugin",
    "Rows",
    "SteerError",
    "Tokens",
    "UnsupportedError",
    "__version__",
    "steer",
    "steering",
    "unsteer",
]


def __getattr__(name: str) -> Any:
    # Imported on first use, so that a vLLM process that never steers pays nothing.
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
