"""The control function against values computed with the released code's formulas."""

import math

import pytest
import torch
from llm_steer.plugins.rebalance.control import COLUMNS, PRESETS, Constants, coefficient

R1_1_5B, R1_7B, QWQ_32B, QWEN3_14B = (preset.constants for preset in PRESETS.values())

STEEPNESS = [(R1_1_5B, 15.433133), (R1_7B, 17.997249), (QWQ_32B, 22.402513), (QWEN3_14B, 30.241609)]
POINTS = [(0.5, 0), (0.5, 0.02), (0.70, 0.001), (0.80, 0.001), (0.85, 0.02), (0.90, 0.001), None, (0.97, 0), (0.97, 0.001)]
POINTS += [(1, 0), (1, 0.02)]
VALUES = [
    (R1_1_5B, "-1.032464 -1.91 -.993398 -.551618 -.196907 -.040578 .050079 .096138 .006138 .1 .01"),
    (R1_7B, "-1.200781 -2.34 -1.164849 -.561030 -.145196 -.018091 .046639 .098430 .008430 .1 .01"),
    (QWQ_32B, "-1.320255 -2.73 -1.310301 -.788601 -.173186 -.012011 .045468 .099273 .009273 .1 .01"),
    (QWEN3_14B, "-1.041422 -1.13 -1.041412 -1.037099 -.959075 -.371997 .047785 .092752 .002752 .1 .01"),
]


def evaluate(constants: Constants, points: list[tuple[float, float]]) -> list[float]:
    values = {**vars(constants), "steepness": constants.steepness()}
    columns = {name: torch.full((len(points),), float(values[name]), dtype=torch.float64) for name in COLUMNS}
    c, v = torch.tensor(points, dtype=torch.float64).T
    return coefficient(c, v, columns).tolist()


@pytest.mark.parametrize(("constants", "expected"), STEEPNESS)
def test_steepness(constants: Constants, expected: float) -> None:
    assert constants.steepness() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("constants", "expected"), VALUES)
def test_published_constants(constants: Constants, expected: str) -> None:
    points = [p or (constants.q75c, constants.q25v) for p in POINTS]
    assert evaluate(constants, points) == pytest.approx([float(x) for x in expected.split()], abs=1e-6)


@pytest.mark.parametrize("constants", [c for c, _ in STEEPNESS])
def test_anchors(constants: Constants) -> None:
    floor, at_q75 = evaluate(constants, [(constants.q25c, constants.q75v), (constants.q75c, 0.5)])
    assert floor == pytest.approx(constants.floor)
    assert at_q75 == pytest.approx(0.0, abs=1e-9)


def test_swapped_quartiles_are_sorted() -> None:
    swapped = Constants(0.94805, 0.662293, 0.011597, 0.000560, -1.02, -1.91)
    columns = {**vars(swapped), "steepness": R1_1_5B.steepness()}
    of = {name: torch.tensor([float(columns[name])], dtype=torch.float64) for name in COLUMNS}
    got = coefficient(torch.tensor([0.8], dtype=torch.float64), torch.tensor([0.001], dtype=torch.float64), of)
    assert got.item() == pytest.approx(-0.551618, abs=1e-6)


def test_missing_confidence_counts_as_one_half() -> None:
    assert evaluate(R1_7B, [(math.nan, 0.02)]) == evaluate(R1_7B, [(0.5, 0.02)])


def test_range() -> None:
    grid = [(c / 50, v / 500) for c in range(51) for v in range(20)]
    for constants, _ in STEEPNESS:
        values = evaluate(constants, grid)
        assert min(values) == pytest.approx(constants.floor)
        assert max(values) <= 0.1 + 1e-12
