"""Errors that name what was wrong, with which value, and what would be valid."""

from __future__ import annotations

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
        super().__init__(f"{field}: got {shorten(value)}; must be {valid}")


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
    """``repr(value)``, cut in the middle of its own length so that a huge value stays readable."""
    if isinstance(value, str | bytes | list | tuple | dict) and len(value) > 1000:
        return f"a {type(value).__name__} of {len(value)} items"
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
