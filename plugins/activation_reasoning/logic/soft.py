"""Soft truth: rules over values in [0, 1], for whoever wants a degree rather than a verdict.

``and`` is a t-norm, product or minimum (Goedel); ``not x`` is ``1 - x``; several ways to a conclusion are its best one. So a
value never grows by going round a cycle, and the fixpoint is reached in as many passes as for plain truth. On 0 and 1 both
norms are the closed semantics.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal as OneOf

import torch

from .formula import Literal
from .schedule import Schedule

Norm = OneOf["product", "goedel"]


def soft(schedule: Schedule, facts: Mapping[Literal, torch.Tensor], norm: Norm = "product") -> dict[Literal, torch.Tensor]:
    """The degree of every conclusion.

    Args:
        schedule: of a rule set with closed semantics.
        facts: degrees in [0, 1], float ``[rows]`` each; those left out are 0.

    Returns:
        float ``[rows]`` for each literal that can be concluded.
    """
    some = next(iter(facts.values()))
    values = [torch.zeros_like(some) for _ in range(schedule.nodes)]
    for literal, degree in facts.items():
        values[schedule.inputs[literal]] = degree
    for layer in schedule.layers:
        for _ in range(layer.times):
            found = dict[int, torch.Tensor]()
            for gate in layer.gates:
                degree = torch.ones_like(some)
                for node, positive in gate.body:
                    value = values[node] if positive else 1 - values[node]
                    degree = degree * value if norm == "product" else torch.minimum(degree, value)
                found[gate.head] = torch.maximum(found.get(gate.head, values[gate.head]), degree)
            for head, degree in found.items():
                values[head] = degree
    return {literal: values[node] for literal, node in schedule.outputs.items()}
