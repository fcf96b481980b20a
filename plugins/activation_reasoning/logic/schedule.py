"""A rule set as layers of gates: what both reasoners on tensors are built from.

Nodes hold truth values. A layer's gates are conjunctions of nodes and negated nodes; each gate makes its head true. Layers
run in order, those with cycles several times: every atom is decided before anything looks whether it is absent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .closed import BOTTOM, ClosedProgram
from .formula import Literal
from .open import OpenProgram


@dataclass(frozen=True)
class Gate:
    head: int
    body: tuple[tuple[int, bool], ...]
    """Nodes with the value that is asked of them; true if there is none."""
    rule: int
    """Index of the ground rule, or of the implicate."""


@dataclass(frozen=True)
class Layer:
    gates: tuple[Gate, ...]
    times: int = 1


@dataclass(frozen=True)
class Schedule:
    nodes: int
    inputs: dict[Literal, int]
    """Node of each fact that can be given."""
    outputs: dict[Literal, int]
    """Node of each literal that can be concluded. Facts are conclusions."""
    contradiction: int
    """Node that is true where facts and rules exclude each other."""
    layers: tuple[Layer, ...]

    @property
    def passes(self) -> int:
        """How often gates are computed, one after the other."""
        return sum(layer.times for layer in self.layers)


def schedule(program: ClosedProgram | OpenProgram, extra: Sequence[str] = ()) -> Schedule:
    """Lay out a program.

    Args:
        extra: atoms that no rule mentions, but that can be facts.
    """
    if isinstance(program, OpenProgram):
        return _open(program, extra)
    return _closed(program, extra)


def _closed(program: ClosedProgram, extra: Sequence[str]) -> Schedule:
    atoms = list(dict.fromkeys([BOTTOM, *program.inputs, *extra, *(atom for group in program.strata for atom in group)]))
    node = {atom: index for index, atom in enumerate(atoms)}
    level: dict[str, int] = {}
    layers: dict[tuple[int, bool], list[Gate]] = {}
    times: dict[tuple[int, bool], int] = {}
    by_head: dict[str, list[Gate]] = {}
    needs: dict[str, set[str]] = {}
    for clause in program.clauses:
        body = tuple((node[literal.atom], literal.positive) for literal in clause.body)
        by_head.setdefault(clause.head, []).append(Gate(node[clause.head], body, clause.rule))
        needs.setdefault(clause.head, set()).update(literal.atom for literal in clause.body)
    for group in program.strata:
        members = set(group)
        outside = set[str]().union(*(needs.get(atom, set()) for atom in group)) - members
        cyclic = len(group) > 1 or group[0] in needs.get(group[0], ())
        # A fact that nothing derives is level 0. What runs in a cycle comes after what does not, on its level.
        derived = any(atom in by_head for atom in group)
        own = max((level[atom] for atom in outside), default=0) + derived
        level.update(dict.fromkeys(group, own))
        gates = [gate for atom in group for gate in by_head.get(atom, ())]
        if gates:
            layers.setdefault((own, cyclic), []).extend(gates)
            times[own, cyclic] = max(times.get((own, cyclic), 1), len(group) if cyclic else 1)
    atoms_of_facts = dict.fromkeys([*program.inputs, *extra])
    literals = {Literal(atom): node[atom] for atom in atoms_of_facts}
    ordered = tuple(Layer(tuple(gates), times[key]) for key, gates in sorted(layers.items()))
    return Schedule(len(atoms), literals, dict(literals), node[BOTTOM], ordered)


def _open(program: OpenProgram, extra: Sequence[str]) -> Schedule:
    atoms = list(dict.fromkeys([*program.inputs, *extra]))
    literals = [Literal(atom, positive) for atom in atoms for positive in (True, False)]
    given = {literal: 1 + index for index, literal in enumerate(literals)}
    known = {literal: 1 + len(literals) + index for index, literal in enumerate(literals)}
    gates = [Gate(known[literal], ((given[literal], True),), -1) for literal in literals]
    gates += [Gate(0, ((given[Literal(atom)], True), (given[Literal(atom, False)], True)), -1) for atom in atoms]
    for index, implicate in enumerate(program.implicates):
        denied = {literal: (given[~literal], True) for literal in implicate.literals}
        gates.append(Gate(0, tuple(denied.values()), index))
        gates += [
            Gate(known[literal], tuple(node for other, node in denied.items() if other != literal), index)
            for literal in implicate.literals
        ]
    return Schedule(1 + 2 * len(literals), given, known, 0, (Layer(tuple(gates)),) if gates else ())
