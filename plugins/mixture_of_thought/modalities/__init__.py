"""The ways of reasoning: how each is opened, and how what it wrote can be checked."""

from __future__ import annotations

from collections.abc import Callable

from llm_steer.plugins.mixture_of_thought.modalities import code, natural, table
from llm_steer.plugins.mixture_of_thought.modalities.check import Check

__all__ = ["CHECKS", "TAGS", "Check", "Checker"]

Checker = Callable[[str, dict[str, str] | None], Check]
"""From a model's text and the options of the question (None: a free answer) to what checking it says."""

CHECKS: dict[str, Checker] = {"natural": natural.check, "code": code.check, "table": table.check}

TAGS = {"natural": "<nl_cot>", "code": "<code>", "table": "<truth_table>"}
"""The last line of a prompt opens the modality."""
