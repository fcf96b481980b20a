"""What was detected, concluded and done in one request, as JSON: plain reasoning over the recorded facts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .detection import Detector
from .history import History
from .logic.formula import Literal
from .own import Own
from .program import Action, Program
from .scan import unordered

MAX_ENTRIES = 64
"""Moments that are explained."""


def trace(
    program: Program,
    number: int,
    slot: int,
    detector: Detector,
    history: History,
    actions: Sequence[Action],
    own: Own | None,
) -> dict[str, Any]:
    """The trace of a request that has ended and still owns its slot.

    Args:
        actions: of the columns of ``history`` behind those of the facts.
        own: what the request reasons with instead of the program's rules.
    """
    rules, given = (own.rules, set(own.given)) if own is not None else (program.ruleset(), set[Literal]())
    entries, count = history.entries(slot)
    if given and (not entries or entries[0][0] > 0):
        entries.insert(0, (0, []))  # they hold from the start
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
    moments, width = [], len(detector.literals)
    before: set[Literal] = set()
    for position, columns in entries[:MAX_ENTRIES]:
        facts = {detector.literals[column][1] for column in columns if column < width} | given
        conclusions = {c for c in rules.conclusions(facts) if not c.atom.startswith('"action ')}
        contradiction = rules.proof_of_contradiction(facts)
        new = sorted(c for c in conclusions if c not in before and c not in facts)
        proofs = {} if contradiction else rules.proofs(facts, new)
        moments.append(
            {
                "position": position,
                "detected": sorted(str(fact) for fact in facts - before),
                "ended": sorted(str(c) for c in before if c not in conclusions),
                "concluded": [str(c) for c in new],
                "actions": [_shown(program, actions[c - width]) for c in columns if c >= width],
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
        "missed_tokens": program.reads_prompt and bool(detector.missed[slot, 0] > 0),
        "broken_tokens": int(detector.broken[slot, 0]),
    }


def _shown(program: Program, action: Action) -> dict[str, Any]:
    """``number`` is the action's place in the file."""
    concept = {"concept": program.concepts[action.concept]} if action.concept >= 0 else {}
    return {"number": program.actions.index(action), "kind": action.kind, "when": action.when, **concept}
