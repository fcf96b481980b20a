"""What checking one response says, whatever the text answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Check:
    """The answer that was computed."""

    answer: str | None
    """None where nothing could be computed."""
    reason: str
    """How it was computed, or why not; one of a few words, for counting."""
    sound: bool = True
    """False where parts of what was written are wrong, though there is an answer."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """JSON types."""


def named(value: str, options: Mapping[str, str] | None) -> str | None:
    """The answer that a computed value names: a verdict, an option by its letter or text, or the value itself."""
    if options is None:
        return value or None
    by_verdict = {"true", "false"} <= {text.lower() for text in options.values()}
    word = value.strip().strip("().").lower()
    if by_verdict and word in ("unknown", "none", "undetermined"):
        word = "uncertain"
    for letter, text in options.items():
        if word in (letter.lower(), text.lower()):
            return text if by_verdict else letter
    return None
