"""Steps of finished outputs: as the rules see them token by token, with the labels of both modes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llm_steer.plugins.rebalance.control import PRESETS
from llm_steer.plugins.rebalance.steps import LEXICON, Step, Thresholds, split, variances

from support.rebalance_rules import Sequence

CONSTANTS = vars(PRESETS["r1-distill-qwen-1.5b"].constants)


def test_the_parts_of_an_output() -> None:
    #          step 1        ends  again  step 2  ends  step 3 (closed)  outside  in again, cut off
    boundary = [False, False, True, True, False, True, False, False, False, False, False]
    inside = [True, True, True, True, True, True, True, True, False, True, True]
    confidences = [0.5, 0.7, 0.1, 0.1, 0.9, 0.2, 0.3, 0.4, 0.99, 0.6, 0.6]
    assert split(confidences, boundary, inside, "reference") == [
        Step(0, 3, pytest.approx(0.6), False),
        Step(4, 6, pytest.approx(0.9), True),
        Step(6, 8, pytest.approx(0.35), True),
    ]
    paper = split(confidences, boundary, inside, "paper")
    assert [step.confidence for step in paper] == pytest.approx([math.sqrt(0.35), 0.9, math.sqrt(0.12)])


@given(st.lists(st.tuples(st.floats(0.01, 1.0), st.booleans()), max_size=60), st.sampled_from(["reference", "paper"]))
def test_confidences_are_those_that_the_plugin_sees(tokens: list[tuple[float, bool]], mode: str) -> None:
    rules = Sequence(CONSTANTS, -1.0, paper=mode == "paper")
    for confidence, delimiter in tokens:
        rules.last = confidence
        rules.feed(delimiter, True)
    steps = split([c for c, _ in tokens], [d for _, d in tokens], [True] * len(tokens), mode)
    assert [step.confidence for step in steps] == pytest.approx(rules.history)


def test_variances() -> None:
    values = [0.8, 0.985, 0.5, 0.9675]
    assert variances(values) == pytest.approx([0.0, 0.00855625, 0.05880625, 0.05463906], abs=1e-8)
    assert variances(values, 4)[3] == pytest.approx(float(np.var(values)))


def test_thresholds() -> None:
    def steps(*confidences: float) -> list[Step]:
        return [Step(0, 1, c, True) for c in confidences]

    found = Thresholds.of([steps(0.0, 0.2, 0.4), steps(1.0), steps(0.6, 0.8)])
    assert (found.q25c, found.q75c) == pytest.approx((0.25, 0.75))
    assert (found.q25v, found.q75v) == pytest.approx((0.01, 0.01))


@pytest.mark.parametrize(
    ("confidence", "variance", "text", "reference", "paper"),
    [
        (0.3, 0.05, "So it is 4.", True, True),
        (0.3, 0.00, "So it is 4.", True, None),
        (0.9, 0.00, "So it is 4.", False, False),
        (0.9, 0.05, "So it is 4.", False, None),
        (0.6, 0.02, "So it is 4.", None, None),
        (0.9, 0.00, "Wait, is it?", True, False),
        (0.6, 0.02, "let me double-check", True, None),
        (0.9, 0.00, "The butter is waiting.", False, False),
        (0.9, 0.00, "Something else altogether", False, False),
        (0.9, 0.00, "HOWEVER", True, False),
    ],
)
def test_labels(confidence, variance, text, reference, paper) -> None:
    thresholds = Thresholds(0.5, 0.8, 0.01, 0.04)
    assert thresholds.label(confidence, variance, text, "reference") is reference
    assert thresholds.label(confidence, variance, text, "paper") is paper


def test_the_lexicon_holds_no_blanks() -> None:
    assert all(word == word.strip() != "" for word in LEXICON)
    assert len(set(LEXICON)) == len(LEXICON)
