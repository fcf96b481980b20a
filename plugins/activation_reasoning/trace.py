"""What was detected, concluded and done in one request, as JSON: plain reasoning over the recorded facts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .detection import Detector
from .history import History
from .logic import RuleSet
from .logic.closed import BOTTOM, HELPER, ClosedProgram
from .logic.formula import Literal
from .logic.proof import Proof, prove_weighed
from .logic.soft import HALF, Norm, weigh
from .own import Own
from .program import Action, Program
from .scan import unordered

MAX_ENTRIES = 64
"""Moments that are explained."""
HIDDEN = ('"action ', HELPER)
"""What names of atoms begin with that no one wrote."""


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
        count += 1
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
    levels = history.degrees(slot)
    for index, (position, columns) in enumerate(entries[:MAX_ENTRIES]):
        facts = {detector.literals[column][1] for column in columns if column < width} | given
        if program.truth == "crisp":
            known = _crisp(rules, facts, before)
        else:
            mine = zip(detector.literals, levels[index], strict=True)
            known = _soft(rules, {literal.atom: level for (n, literal), level in mine if n == number}, program.truth)
        new = sorted(c for c in known.conclusions if c not in before and c not in facts)
        proofs = {goal: known.proofs[goal] for goal in new} if not known.contradiction else {}
        moments.append(
            {
                "position": position,
                "detected": sorted(str(fact) for fact in facts - before),
                "ended": sorted(str(c) for c in before if c not in known.conclusions),
                "concluded": [str(c) for c in new],
                **({"degrees": known.degrees} if known.degrees else {}),
                "actions": [_shown(program, actions[c - width]) for c in columns if c >= width],
                "contradiction": [step.to_json() for step in known.contradiction] if known.contradiction else None,
                "proofs": {str(goal): [step.to_json() for step in proof] for goal, proof in sorted(proofs.items())},
            }
        )
        before = known.conclusions
    return {
        "semantics": program.semantics,
        "truth": program.truth,
        "propositions": propositions,
        "moments": moments,
        "changes": count,
        "missed_tokens": program.reads_prompt and bool(detector.missed[slot, 0] > 0),
        "broken_tokens": int(detector.broken[slot, 0]),
    }


@dataclass(frozen=True)
class _Known:
    """What follows from what was detected."""

    conclusions: set[Literal]
    contradiction: Proof | None
    proofs: dict[Literal, Proof]
    degrees: dict[str, float] = field(default_factory=dict)
    """How true atoms are, where truth is not crisp; those that are not at all are left out."""


def _crisp(rules: RuleSet, facts: set[Literal], before: set[Literal]) -> _Known:
    conclusions = {c for c in rules.conclusions(facts) if not c.atom.startswith(HIDDEN)}
    contradiction = rules.proof_of_contradiction(facts)
    new = [c for c in conclusions if c not in before and c not in facts]
    return _Known(conclusions, contradiction, {} if contradiction else rules.proofs(facts, new))


def _soft(rules: RuleSet, degrees: dict[str, float], norm: Norm) -> _Known:
    assert isinstance(rules.program, ClosedProgram)
    weighed = weigh(rules.program, degrees, norm)
    shown = {
        atom: level for atom, level in sorted(weighed.degrees.items()) if atom != BOTTOM and not atom.startswith(HIDDEN)
    }
    conclusions = {Literal(atom) for atom, level in shown.items() if level > HALF}
    proofs = prove_weighed(rules.program, weighed, [*(c.atom for c in conclusions), BOTTOM])
    contradiction = proofs[BOTTOM] if weighed.degrees.get(BOTTOM, 0.0) > HALF else None
    told = {atom: round(level, 4) for atom, level in shown.items()}
    return _Known(conclusions, contradiction, {c: proofs[c.atom] for c in conclusions}, told)


def _shown(program: Program, action: Action) -> dict[str, Any]:
    """``number`` is the action's place in the file."""
    concept = {"concept": program.concepts[action.concept]} if action.concept >= 0 else {}
    return {"number": program.actions.index(action), "kind": action.kind, "when": action.when, **concept}
