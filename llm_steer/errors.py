"""Errors that name what was wrong, with which value, and what would be valid."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from typing import Any


class SteerError(ValueError):
    """A request, parameter or file that steering refuses.

    Args:
        field: what the caller set, in the caller's spelling (``steer_amplitude``, ``words[2]``).
        value: the value that was given; shortened when it is shown.
        valid: what would have been accepted, as a phrase that follows "must be".
    """

    def __init__(self, field: str, value: Any, valid: str) -> None:
        self.field = field
        self.value = value
        self.valid = valid
        message = f"{shorten_text(field)}: got {shorten(value)}; must be {valid}"
        super().__init__(message.encode(errors="backslashreplace").decode())  # a lone surrogate could not be sent


class UnsupportedError(RuntimeError):
    """Steering that cannot be carried out here: it says what is in the way and what to do.

    Raised instead of returning an answer that was silently not steered.
    """


class MissingDependencyError(ImportError):
    """An optional dependency is not installed; the message names the ``pip install`` line."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs {package}, which is not installed. Install it with: pip install 'llm-steer-plugin[{extra}]'",
            name=package,
        )


def shorten(value: Any, limit: int = 80) -> str:
    """``repr(value)``, cut to ``limit`` characters; the size of a huge value instead. Never fails, whatever the value."""
    if isinstance(value, str | bytes | list | tuple | dict) and len(value) > 1000:
        unit = {str: "characters", bytes: "bytes"}.get(type(value), "items")
        return f"a {type(value).__name__} of {len(value)} {unit}"
    try:
        return shorten_text(_BOUNDED.repr(value), limit)
    except Exception:  # an integer too long to print, a class whose repr() is broken
        return f"a value of type {type(value).__name__} that cannot be shown"


def shorten_text(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """``" (did you mean 'amplitude'?)"``, or nothing if no choice is close to the name."""
    close = difflib.get_close_matches(name.lower()[:100], list(choices), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


_BOUNDED = reprlib.Repr()
"""Looks at so much of a value as can be shown: a deep or wide one costs nothing."""
_BOUNDED.maxlevel = 5
_BOUNDED.maxlist = _BOUNDED.maxtuple = _BOUNDED.maxdict = 30
_BOUNDED.maxstring = _BOUNDED.maxlong = _BOUNDED.maxother = 70
