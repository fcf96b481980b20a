"""Traces hold flaws in the proportions of the mix, and grade as the flaws say."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest
from llm_steer.eval.testbed.arithmetic import Arithmetic, apply
from llm_steer.eval.testbed.data import example, progress
from llm_steer.eval.testbed.grading import grade
from llm_steer.eval.testbed.problem import draw
from llm_steer.eval.testbed.recipes import RECIPES
from llm_steer.eval.testbed.traces import REFLECTIONS, Mix, Step, _attempts, write

TASK = Arithmetic()


def collect(mix: Mix, level: int = 6, count: int = 1500) -> tuple[Counter[str], float]:
    rng, counts, right = random.Random(0), Counter[str](), 0
    for _ in range(count):
        problem = TASK.sample(rng, level)
        trace = write(TASK.walk(problem), rng, mix)
        counts += trace.counts
        right += grade(problem, trace.text)
    return counts, right / count


def test_proportions() -> None:
    mix = Mix()
    counts, right = collect(mix)
    assert counts["fixes"] / counts["slips"] == pytest.approx(mix.fix, abs=0.03)
    chance = mix.recheck * (1 + mix.recheck_again * (1 + mix.recheck_again))
    assert counts["rechecks"] / counts["steps"] == pytest.approx(chance, rel=0.2)
    assert counts["overthinking"] / counts["steps"] == pytest.approx(
        mix.recheck * mix.recheck_again * (1 - mix.spoil), rel=0.35
    )
    assert counts["early"] / 1500 == pytest.approx(mix.stop_early, abs=0.02)
    assert 0.6 < right < 0.9


def test_slips_follow_visible_difficulty() -> None:
    rng, rates = random.Random(1), {}
    for difficulty, expected in enumerate(Mix().slip):
        counts = Counter[str]()
        for _ in range(2000):
            _attempts(Step("a: 1 + 1 = ", "2", (("3", 1.0),), difficulty), rng, Mix(), [], counts)
        rates[difficulty] = counts["slips"] / 2000
        assert rates[difficulty] == pytest.approx(expected, abs=0.04)


def test_every_sum_that_is_called_right_is_right() -> None:
    """Without slips and spoils, re-checks change nothing."""
    rng = random.Random(2)
    for _ in range(100):
        problem = TASK.sample(rng, 8)
        text = write(
            TASK.walk(problem), rng, Mix(slip=(0, 0, 0), spoil=0, stop_early=0, recheck=0.6, recheck_again=0.6)
        ).text
        assert grade(problem, text)
        for value, operator, operand, result in re.findall(r"(-?\d+) ([-+*]) (\d+) = (-?\d+)", text):
            assert apply(int(value), (operator, int(operand))) == int(result)


def test_reflections_open_a_step_or_follow_inline() -> None:
    rng = random.Random(3)
    text = "".join(write(TASK.walk(TASK.sample(rng, 8)), rng, Mix(recheck=0.5)).text for _ in range(200))
    for word in REFLECTIONS:
        assert f"\n\n{word}, " in text
        assert f" {word}, " in text
    assert max(len(run) for run in re.findall(r"(?:\w: [^\n]*?\n\nWait, )+", text)) < 200


def test_stopping_early_ends_in_the_second_half() -> None:
    rng = random.Random(4)
    for _ in range(200):
        trace = write(TASK.walk(TASK.sample(rng, 6)), rng, Mix(stop_early=1.0))
        assert trace.counts["early"] == 1
        assert 3 <= trace.counts["steps"] <= 5


def test_curriculum_starts_without_slips() -> None:
    counts, right = collect(Mix().at(0.0), count=300)
    assert counts["slips"] == counts["early"] == counts["spoiled"] == 0
    assert right == 1.0
    assert Mix().at(1.0) == Mix() == Mix().at(7.0)
    recipe = RECIPES["arithmetic"]
    assert progress(recipe, 0) < 0 < progress(recipe, recipe.steps // 2)
    assert progress(recipe, recipe.steps) > 1


@pytest.mark.parametrize("name", RECIPES)
def test_examples_are_from_the_training_split(name: str) -> None:
    rng = random.Random(5)
    for _ in range(50):
        problem, text = example(RECIPES[name], rng, RECIPES[name].steps)
        assert problem.split == "train"
        assert text.count("</think>") == 1
        assert text.endswith("}")


def test_hard_levels_are_long_enough() -> None:
    """The level of 12 steps thinks for 150 tokens and more."""
    from llm_steer.eval.testbed.tokenizer import build

    rng, tokenizer = random.Random(6), build()
    traces = [write(TASK.walk(draw(TASK, rng, 12, "train")), rng, Mix()) for _ in range(100)]
    lengths = [len(tokenizer.encode(t.text.split("</think>")[0], add_special_tokens=False)) for t in traces]
    assert sum(lengths) / 100 > 150
