"""A truth table: what follows from its formulas, and whether its rows are those that they leave."""

from __future__ import annotations

from typing import Any

from llm_steer.plugins.mixture_of_thought import truth_table
from llm_steer.plugins.mixture_of_thought.formula import FormulaError
from llm_steer.plugins.mixture_of_thought.modalities.check import Check, named
from llm_steer.plugins.mixture_of_thought.solving import Undecided

from llm_steer.errors import MissingDependencyError


def check(text: str, options: dict[str, str] | None) -> Check:
    try:
        table = truth_table.read(text.rpartition("</think>")[2].partition("<answer>")[0])
    except FormulaError as error:
        return Check(None, "unreadable", notes={"error": str(error)[:200]})
    try:
        found = truth_table.check(table)
    except MissingDependencyError:
        return Check(None, "too_many_variables")
    except Undecided:
        return Check(None, "undecided")
    notes: dict[str, Any] = {"rows": len(table.rows), "wrong": found.wrong, "missing": found.missing, "extra": found.extra}
    if found.problems:
        notes |= {"problems": list(found.problems)}
    if found.verdict is None:
        return Check(None, "premises_contradict", notes=notes)
    verdict = found.verdict
    if options is not None and "Uncertain" not in options.values() and verdict == "Uncertain":
        verdict = "False"  # of two labels, what does not follow is false
    if found.kind == "none":
        return Check(named(verdict, options), "no_rows", sound=False, notes=notes)
    return Check(named(verdict, options), "enumerated", sound=found.rows_right, notes=notes)
