"""vllm_throughput.py --hidden: what it asks for, and how its figures come from blocks. The engines run in ``--quick``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def hidden(script: Callable[[str], Any]) -> Any:
    return script("vllm_hidden")


def test_distinct_configurations(hidden: Any) -> None:
    one, every = hidden.conditions([1, 8, 64], [5]), hidden.conditions([1, 8, 64], [0, 1, 2])
    assert list(one) == list(every)
    assert len(one) == 7
    for kind in ("open", "closed"):
        for count in (1, 8, 64):
            for asked in (one, every):
                assert len({repr(request) for request in asked[f"{kind}_{count}"]}) == count
    assert {request["steer"]["name"] for request in one["closed_8"]} == {"rebalance"}
    assert [part["name"] for part in every["closed_1"][0]["steer"]] == ["random_vector", "rebalance"]
    assert every["open_1"][0]["steer"]["layers"] == [0, 1, 2]


class Fake:
    """An engine on a machine that is slow at times, for all of them."""

    machine = itertools.cycle([1.0] * 9 + [5.0] * 9 + [2.0] * 3)

    def __init__(self, costs: dict[str, float]) -> None:
        self.costs = costs

    def begin(self, condition: str) -> None:
        self.cost = self.costs.get(condition, self.costs["else"])

    def turn(self) -> float:
        return self.cost * next(self.machine)


def test_figures(hidden: Any) -> None:
    conditions = list(hidden.conditions([1, 8], [0]))
    children = {
        "vanilla": Fake({"plain": 1.0, "else": math.nan}),
        "one_layer": Fake({"open_8": 1.1, "else": 1.01}),
        "all_layers": Fake({"else": 1.2}),
    }
    costs = hidden.take_turns(children, conditions, 4, 16)
    assert {name: {c: len(values) for c, values in of.items()} for name, of in costs.items()} == dict.fromkeys(
        ("one_layer", "all_layers"), dict.fromkeys(conditions, 4)
    )
    figures = hidden.summarise(costs, [1, 8])
    assert figures["one_layer.open_1.ratio"] == pytest.approx(1 / 1.01, abs=1e-4)
    assert figures["one_layer.open_1.ratio_low"] == figures["one_layer.open_1.ratio_high"]
    assert figures["one_layer.closed_8.verdict"] == "met"
    assert figures["all_layers.idle.verdict"] == "not met"
    assert figures["one_layer.open_growth"] == pytest.approx(1.1 / 1.01, abs=1e-4)
    assert (figures["one_layer.open_growth_verdict"], figures["one_layer.closed_growth_verdict"]) == ("grows", "flat")
