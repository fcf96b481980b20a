"""Reasoning on tensors: many requests at once, static shapes, no Python over requests, no waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llm_steer.errors import SteerError
from llm_steer.slots import copy_async

from .formula import Literal
from .schedule import Gate, Layer, Schedule
from .soft import Norm

BITS = 64


class PackedReasoner:
    """One rule set for all rows. Rows are bits: a gate is one machine word for 64 of them.

    Args:
        schedule: the rule set.
        facts: the literals whose truth is given, in the order of the columns of ``facts``.
        wanted: the literals that are asked for.
        device: where it runs.
    """

    def __init__(
        self, schedule: Schedule, facts: Sequence[Literal], wanted: Sequence[Literal], device: torch.device
    ) -> None:
        def index(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        # The last node is false, and stays so.
        self._nodes = schedule.nodes + 1
        self._facts = index([schedule.inputs[fact] for fact in facts])
        outputs = [schedule.outputs.get(literal, schedule.nodes) for literal in wanted]
        self._wanted = index([*outputs, schedule.contradiction])
        self._layers = [_Gates(layer, schedule.nodes, device) for layer in schedule.layers]
        self._shift = torch.arange(BITS, device=device)

    def __call__(self, facts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw all conclusions.

        Args:
            facts: bool ``[rows, facts]``.

        Returns:
            bool ``[rows, wanted]``, and bool ``[rows]``: facts and rules exclude each other.
        """
        rows = facts.shape[0]
        words = -(-rows // BITS)
        padded = torch.nn.functional.pad(facts, (0, 0, 0, words * BITS - rows))
        bits = (padded.view(words, BITS, -1).to(torch.int64) << self._shift[:, None]).sum(1)
        values = bits.new_zeros(self._nodes, words)
        values.index_copy_(0, self._facts, bits.T)
        for gates in self._layers:
            for _ in range(gates.times):
                gates.run(values)
        found = (values[self._wanted].T[:, None, :] >> self._shift[:, None]) & 1
        known = found.reshape(words * BITS, -1)[:rows].bool()
        return known[:, :-1], known[:, -1]


class SoftReasoner:
    """One rule set for all rows, over degrees of truth (``soft``).

    Args:
        schedule: of a rule set with closed semantics, compiled with ``crisp=False``.
        facts: the literals whose degree is given, in the order of the columns of ``facts``.
        wanted: the literals that are asked for.
        norm: what ``and`` is.
        device: where it runs.
    """

    def __init__(
        self, schedule: Schedule, facts: Sequence[Literal], wanted: Sequence[Literal], norm: Norm, device: torch.device
    ) -> None:
        def index(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        self._nodes, self._norm = schedule.nodes + 1, norm
        self._facts = index([schedule.inputs[fact] for fact in facts])
        outputs = [schedule.outputs.get(literal, schedule.nodes) for literal in wanted]
        self._wanted = index([*outputs, schedule.contradiction])
        self._layers = [_Gates(layer, schedule.nodes, device) for layer in schedule.layers]

    def __call__(self, facts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw all conclusions.

        Args:
            facts: float32 ``[rows, facts]`` in [0, 1].

        Returns:
            float32 ``[rows, wanted]``, and ``[rows]``: how much facts and rules exclude each other.
        """
        values = facts.new_zeros(self._nodes, facts.shape[0])
        values.index_copy_(0, self._facts, facts.T)
        for gates in self._layers:
            for _ in range(gates.times):
                gates.weigh(values, self._norm)
        found = values[self._wanted].T
        return found[:, :-1], found[:, -1]


class _Gates:
    """A layer. Gates are sorted by width and heads by fan-in, so that column ``j`` of either is a prefix."""

    def __init__(self, layer: Layer, false: int, device: torch.device) -> None:
        def index(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        self.times = layer.times
        # What is empty is "not false".
        gates = sorted(layer.gates, key=lambda gate: -len(gate.body))
        bodies = [gate.body or ((false, False),) for gate in gates]
        self._columns = []
        for column in range(len(bodies[0])):
            cells = [body[column] for body in bodies if len(body) > column]
            flip = index([0 if positive else -1 for _, positive in cells])[:, None]
            self._columns.append((index([node for node, _ in cells]), flip if bool(flip.any()) else None))
        into: dict[int, list[int]] = {}
        for number, gate in enumerate(gates):
            into.setdefault(gate.head, []).append(number)
        heads = sorted(into, key=lambda head: -len(into[head]))
        self._heads = index(heads)
        self._members = [
            index([into[head][column] for head in heads if len(into[head]) > column])
            for column in range(len(into[heads[0]]))
        ]

    def run(self, values: torch.Tensor) -> None:
        """Make heads true: int64 ``[nodes, words]``, in place."""
        (nodes, flip), *rest = self._columns
        gates = values[nodes] if flip is None else values[nodes] ^ flip
        for nodes, flip in rest:
            gates[: len(nodes)] &= values[nodes] if flip is None else values[nodes] ^ flip
        heads = values[self._heads]
        for members in self._members:
            heads[: len(members)] |= gates[members]
        values.index_copy_(0, self._heads, heads)

    def weigh(self, values: torch.Tensor, norm: Norm) -> None:
        """Raise the degrees of heads: float32 ``[nodes, rows]``, in place."""
        (first, *rest) = [
            values[nodes] if flip is None else torch.where(flip < 0, 1 - values[nodes], values[nodes])
            for nodes, flip in self._columns
        ]
        for column in rest:
            part = first[: len(column)]
            first[: len(column)] = part * column if norm == "product" else torch.minimum(part, column)
        heads = values[self._heads]
        for members in self._members:
            heads[: len(members)] = torch.maximum(heads[: len(members)], first[members])
        values.index_copy_(0, self._heads, heads)


@dataclass(frozen=True)
class SlotLimits:
    """Sizes of the tables of a :class:`SlotReasoner`."""

    nodes: int = 64
    gates: int = 128
    width: int = 4
    """Nodes in one gate; wider ones are cut in parts."""
    passes: int = 12


class SlotReasoner:
    """A rule set of its own for each slot, in tables of fixed size.

    Args:
        limits: sizes of the tables.
        num_slots: slots; the last one has no rules.
        device: where it runs.
    """

    def __init__(self, limits: SlotLimits, num_slots: int, device: torch.device) -> None:
        self.limits = limits
        # Node 0 is false. A gate: its nodes, whether each is negated, its head, and the passes in which it is computed.
        shape = (num_slots, limits.gates)
        self._host = torch.zeros(*shape, 2 * limits.width + 3, dtype=torch.int32)
        self._tables = self._host.to(device, copy=True)

    def write(self, slot: int, schedule: Schedule | None) -> None:
        """Give a slot its rules, or none.

        Raises:
            SteerError: the rule set is larger than the tables.
        """
        self._host[slot] = 0
        if schedule is not None:
            rows = _rows(schedule, self.limits)
            self._host[slot, : len(rows)] = torch.tensor(rows, dtype=torch.int32).view(len(rows), self._host.shape[2])
        copy_async(self._host[slot], self._tables[slot])

    def __call__(self, facts: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        """Draw all conclusions.

        Args:
            facts: bool ``[rows, nodes]``: column ``i`` is node ``i`` of the slot's schedule.
            slot: int64 ``[rows]``.

        Returns:
            bool ``[rows, nodes]``.
        """
        width, rows = self.limits.width, facts.shape[0]
        table = self._tables[slot].to(torch.int64)
        nodes, negated = table[:, :, :width], table[:, :, width : 2 * width]
        head, begin, end = table[:, :, 2 * width :].unbind(2)
        values = torch.nn.functional.pad(facts, (1, 0)).to(torch.int32)
        flat, flip = nodes.flatten(1), negated.to(torch.int32)
        for number in range(self.limits.passes):
            gates = (values.gather(1, flat).view(rows, -1, width) ^ flip).amin(2)
            gates = gates * ((begin <= number) & (number < end))
            values = values.scatter_reduce(1, head, gates, "amax")  # empty rows say that false is false
        return values[:, 1:].bool()


def _rows(schedule: Schedule, limits: SlotLimits) -> list[list[int]]:
    """A schedule as rows of a table. Wide gates become trees with nodes of their own."""
    free = schedule.nodes
    rows: list[list[int]] = []
    number = 0

    def row(gate: Gate, begin: int, end: int) -> list[int]:
        nodes = [node + 1 for node, _ in gate.body]
        negated = [int(not positive) for _, positive in gate.body]
        pad = limits.width - len(nodes)  # "not false"
        return [*nodes, *[0] * pad, *negated, *[1] * pad, gate.head + 1, begin, end]

    for layer in schedule.layers:
        waiting, own = list(layer.gates), [list[Gate]()]
        while waiting:
            gate = waiting.pop()
            if len(gate.body) <= limits.width:
                own[-1].append(gate)
                continue
            parts = [gate.body[i : i + limits.width] for i in range(0, len(gate.body), limits.width)]
            for part in parts:
                own[-1].append(Gate(free, part, gate.rule))
                free += 1
            waiting.append(Gate(gate.head, tuple((free - len(parts) + i, True) for i in range(len(parts))), gate.rule))
        widest = max((len(gate.body) for gate in layer.gates), default=1)
        depth = 1
        while limits.width**depth < widest:
            depth += 1
        # A part is computed one pass before what needs it: all of a layer's passes are that much longer.
        for gate in own[-1]:
            rows.append(row(gate, number, number + layer.times * depth))
        number += layer.times * depth
    for what, got, most in (
        ("nodes", free, limits.nodes), ("gates", len(rows), limits.gates), ("passes", number, limits.passes)
    ):  # fmt: skip
        if got > most:
            raise SteerError("rules", f"{got} {what}", f"a rule set of at most {most} {what} here")
    return rows
