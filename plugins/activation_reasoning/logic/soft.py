"""Soft truth: rules over degrees in [0, 1], where detection knows how sure it is.

``and`` is a t-norm, product or minimum (Goedel); ``or`` and several rules for one conclusion are their best way; ``not x``
is ``1 - x``, at the propositions (formulas are brought to negation normal form first). So a degree never grows by going
round a cycle, and the fixpoint is reached in as many passes as for plain truth. On 0 and 1 both norms are the closed
semantics.
Soft operators in programs, as in NePTune (Kamali and Kordjamshidi, 2025), with recursion and stratified negation beside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal as OneOf

from .closed import Clause, ClosedProgram

Norm = OneOf["product", "goedel"]
Truth = OneOf["crisp", "product", "goedel"]
HALF = 0.5
"""What is above counts as true: for contradictions, and where a trace says what was concluded."""


@dataclass(frozen=True)
class Weighed:
    """How true everything is, and why."""

    degrees: dict[str, float]
    """By atom, helpers included; what is left out is 0."""
    clauses: dict[str, Clause | None]
    """That give each atom its degree; none for a fact."""


def weigh(program: ClosedProgram, facts: Mapping[str, float], norm: Norm) -> Weighed:
    """Degrees of all conclusions, in plain Python: the slow twin of :class:`~.reasoner.SoftReasoner`.

    Args:
        program: compiled with ``crisp=False``.
        facts: degrees of atoms; those left out are 0.
    """
    degrees = {atom: degree for atom, degree in facts.items() if degree > 0}
    clauses: dict[str, Clause | None] = dict.fromkeys(degrees)
    by_head: dict[str, list[Clause]] = {}
    for clause in program.clauses:
        by_head.setdefault(clause.head, []).append(clause)
    for group in program.strata:
        changed = True
        while changed:
            changed = False
            for clause in (clause for atom in group for clause in by_head.get(atom, ())):
                degree = _degree(clause, degrees, norm)
                # Only what is truly more: a clause that goes round a cycle never is, so proofs have no cycles.
                if degree > degrees.get(clause.head, 0.0):
                    degrees[clause.head], clauses[clause.head] = degree, clause
                    changed = True
    return Weighed(degrees, clauses)


def _degree(clause: Clause, degrees: Mapping[str, float], norm: Norm) -> float:
    known = ((literal.positive, degrees.get(literal.atom, 0.0)) for literal in clause.body)
    values = [degree if positive else 1 - degree for positive, degree in known]
    return prod(values) if norm == "product" else min(values, default=1.0)
