"""vllm_throughput.py --hidden: what it asks for, and how its figures come from blocks. The engines run in ``--quick``."""

from __future__ import annotations

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


def test_figures(hidden: Any) -> None:
    conditions = list(hidden.conditions([1, 8], [0]))
    vanilla = [1.0, 2.0, 1.0, 2.0]  # a machine that is slow at times, for all of them
    cost = {"one_layer": 1.01, "all_layers": 1.2}
    seconds = {"vanilla": dict.fromkeys(conditions, vanilla)}
    seconds |= {name: {c: [factor * t for t in vanilla] for c in conditions} for name, factor in cost.items()}
    seconds["one_layer"]["open_8"] = [1.1 * t for t in vanilla]
    figures = hidden.summarise(seconds, [1, 8])
    assert figures["one_layer.open_1.ratio"] == pytest.approx(1 / 1.01, abs=1e-4)
    assert figures["one_layer.open_1.ratio_low"] == figures["one_layer.open_1.ratio_high"]
    assert figures["one_layer.closed_8.verdict"] == "met"
    assert figures["all_layers.idle.verdict"] == "not met"
    assert figures["one_layer.open_growth"] == pytest.approx(1.1 / 1.01, abs=1e-4)
    assert (figures["one_layer.open_growth_verdict"], figures["one_layer.closed_growth_verdict"]) == ("grows", "flat")
