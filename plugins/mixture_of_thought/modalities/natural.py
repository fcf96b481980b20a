"""Natural language: nothing to compute."""

from __future__ import annotations

from llm_steer.plugins.mixture_of_thought.modalities.check import Check


def check(text: str, options: dict[str, str] | None) -> Check:  # noqa: ARG001  (as the others)
    return Check(None, "not_checked")
