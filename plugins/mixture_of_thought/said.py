"""What a model's text answers, with a reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """What a text says, and how that is known."""

    value: str | None
    """None abstains."""
    reason: str
    """Of an answer: ``tagged``, ``boxed``, ``stated``, ``last_line``, ``number``. Of an abstention: ``empty``,
    ``truncated``, ``no_answer``, ``ambiguous`` (two answers), ``contradictory`` (a letter with another option's text),
    ``not_an_option``."""
