"""What was detected, concluded and done in one request, as JSON: plain reasoning over the recorded facts."""

from __future__ import annotations

import math
from typing import Any

from .detection import Detector
from .history import History
from .logic.formula import Literal
from .program import Program
from .scan import unordered

MAX_ENTRIES = 64
"""Moments that are explained."""


def trace(program: Program, number: int, slot: int, detector: Detector, history: History) -> dict[str, Any]:
    """The trace of a request that has ended and still owns its slot."""
    rules = program.ruleset()
    entries, count = history.entries(slot)
    propositions = []
    for column, (owner, detected) in enumerate(detector.order):
        if owner != number or detector.peak_at[slot, column] < 0:
            continue
        score = float(unordered(detector.peak[slot, column : column + 1])[0])
        propositions.append(
            {
                "proposition": str(detected.literal),
                "highest_score": round(score, 6) if math.isfinite(score) else None,
                "at": int(detector.peak_at[slot, column]),
                "threshold": None if detected.pattern else detected.threshold,
            }
        )
    moments = []
    before: set[Literal] = set()
    for position, columns in entries[:MAX_ENTRIES]:
        facts = {detector.literals[column][1] for column in columns}
        conclusions = set(rules.conclusions(facts))
        contradiction = rules.proof_of_contradiction(facts)
        shown = [c for c in conclusions if not c.atom.startswith('"action ')]
        new = sorted(c for c in shown if c not in before)
        proofs = (
            rules.proofs(facts, [c for c in conclusions if c not in before and c not in facts]) if not contradiction else {}
        )
        moments.append(
            {
                "position": position,
                "detected": sorted(str(fact) for fact in facts - before),
                "ended": sorted(str(c) for c in before if c not in conclusions),
                "concluded": [str(c) for c in new if c not in facts],
                "actions": _actions(program, conclusions, bool(contradiction)),
                "contradiction": [step.to_json() for step in contradiction] if contradiction else None,
                "proofs": {str(goal): [step.to_json() for step in proof] for goal, proof in sorted(proofs.items())},
            }
        )
        before = conclusions
    return {
        "semantics": program.semantics,
        "propositions": propositions,
        "moments": moments,
        "changes": count,
        "missed_tokens": bool(detector.missed[slot, 0] > 0),
        "broken_tokens": int(detector.broken[slot, 0]),
    }


def _actions(program: Program, conclusions: set[Literal], contradiction: bool) -> list[dict[str, Any]]:
    """The actions whose formula holds: what acts among those that exclude each other follows from their priorities."""
    if contradiction and not program.ignores_contradiction:
        return []
    return [
        {
            "kind": action.kind,
            "when": action.when,
            **({"concept": program.concepts[action.concept]} if action.concept >= 0 else {}),
        }
        for action in program.actions
        if Literal(action.atom, action.positive) in conclusions
    ]
