"""Satisfiability within a budget: formulas that take longer than that are left undecided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llm_steer.errors import MissingDependencyError

CONFLICTS = 2_000
PROPAGATIONS = 2_000_000
"""Of all questions to one solver together: some tenths of a second, in which no other thread of this process runs."""


class Undecided(Exception):
    """The budget is used up."""


class Solver:
    """Clauses, and questions about them.

    Raises:
        MissingDependencyError: python-sat is not installed.
    """

    def __init__(self, clauses: Sequence[Sequence[int]]) -> None:
        try:
            from pysat.solvers import Glucose4  # type: ignore[import-untyped]
        except ImportError:
            raise MissingDependencyError("python-sat", "logic", "truth tables of more than 16 variables") from None
        self._sat: Any = Glucose4(bootstrap_with=clauses)

    def __enter__(self) -> Solver:
        return self

    def __exit__(self, *_: object) -> None:
        self._sat.delete()

    def solve(self, assumptions: Sequence[int] = ()) -> bool:
        """Something satisfies the clauses.

        Raises:
            Undecided: this question, or those before it, took the budget.
        """
        spent = self._sat.accum_stats()
        conflicts, propagations = CONFLICTS - spent["conflicts"], PROPAGATIONS - spent["propagations"]
        if conflicts <= 0 or propagations <= 0:
            raise Undecided
        self._sat.conf_budget(conflicts)
        self._sat.prop_budget(propagations)
        found = self._sat.solve_limited(assumptions=list(assumptions))
        if found is None:
            raise Undecided
        return bool(found)

    def add(self, clause: Sequence[int]) -> None:
        self._sat.add_clause(list(clause))

    def model(self) -> set[int]:
        """Literals that hold, after a question that was answered with yes."""
        return set(self._sat.get_model())
