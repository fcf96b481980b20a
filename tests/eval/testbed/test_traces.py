"""Traces hold flaws in the proportions of the mix, and grade as the flaws say."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest
from llm_steer.eval.testbed.arithmetic import Arithmetic, apply
from llm_steer.eval.testbed.data import IGNORE, _encode, example, progress
from llm_steer.eval.testbed.grading import grade
from llm_steer.eval.testbed.problem import draw
from llm_steer.eval.testbed.recipes import RECIPES
from llm_steer.eval.testbed.traces import COUNTS, REFLECTIONS, Mix, Step, Trace, _attempts, write

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
    mix = Mix(storm=0.0)
    counts, right = collect(mix)
    assert counts["fixes"] / counts["slips"] == pytest.approx(mix.fix, abs=0.03)
    # A second and a third one follow the first, needless or not.
    more = mix.recheck_again * (1 + mix.recheck_again)
    expected = (counts["steps"] - counts["slips"]) * mix.recheck * (1 + more) + counts["fixes"] * more
    assert counts["rechecks"] == pytest.approx(expected, rel=0.12)
    assert counts["spoiled"] / (counts["rechecks"] + counts["fixes"]) == pytest.approx(mix.spoil, rel=0.2)
    expected = (counts["steps"] - counts["slips"]) * mix.recheck * mix.recheck_again
    expected += counts["fixes"] * mix.recheck_again**2
    assert counts["overthinking"] == pytest.approx(expected, rel=0.25)
    assert counts["early"] / 1500 == pytest.approx(mix.stop_early, abs=0.02)
    assert 0.6 < right < 0.9


def test_slips_follow_visible_difficulty() -> None:
    rng, mix = random.Random(1), Mix()
    for difficulty, expected in enumerate(mix.slip):
        trace = Trace()
        for _ in range(2000):
            _attempts(Step("a: 1 + 1 = ", "2", (("3", 1.0),), difficulty), rng, mix, 0.0, trace)
        assert trace.counts["slips"] / 2000 == pytest.approx(expected, abs=0.04)


def test_every_sum_that_is_called_right_is_right() -> None:
    """Without slips and spoils, re-checks change nothing."""
    rng = random.Random(2)
    for _ in range(100):
        problem = TASK.sample(rng, 8)
        mix = Mix(slip=(0, 0, 0), spoil=0, stop_early=0, recheck=0.6, recheck_again=0.6, storm=0.0)
        text = write(TASK.walk(problem), rng, mix).text
        assert grade(problem, text)
        for value, operator, operand, result in re.findall(r"(-?\d+) ([-+*]) (\d+) = (-?\d+)", text):
            assert apply(int(value), (operator, int(operand))) == int(result)


def test_reflections_open_a_step_or_follow_inline() -> None:
    rng = random.Random(3)
    text = "".join(write(TASK.walk(TASK.sample(rng, 8)), rng, Mix(recheck=0.5, storm=0.0)).text for _ in range(200))
    for word in REFLECTIONS:
        assert f"\n\n{word}, " in text
        assert f" {word}, " in text


def parts(text: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """The thinking as steps: the first attempt at each, and what follows as pairs of count and attempt."""
    steps: list[tuple[str, list[tuple[str, str]]]] = []
    for part in re.split(rf"\.?\n\n| ?(?=(?:{'|'.join(REFLECTIONS)}))", text.partition("</think>")[0])[:-1]:
        if match := re.fullmatch(rf"(?:{'|'.join(REFLECTIONS)})({'|'.join(COUNTS)}), (.*)", part):
            steps[-1][1].append((match[1], match[2]))
        elif part:
            steps.append((part, []))
    return steps


def test_reflections_are_counted_in_the_text_and_end_after_the_last() -> None:
    rng, mix, most = random.Random(7), Mix(recheck=0.5, recheck_again=0.9, storm=0.0), 0
    for _ in range(200):
        for _, checks in parts(write(TASK.walk(TASK.sample(rng, 6)), rng, mix).text):
            assert [count for count, _ in checks] == list(COUNTS[: len(checks)])
            most = max(most, len(checks))
    assert most == len(COUNTS)


def test_rechecks_agree_with_the_recheck_before() -> None:
    """Unless spoiled; here a first re-check is, by a spoil of 1 that the mix then drops."""
    rng = random.Random(8)
    step = Step("a: 1 + 1 = ", "2", (("3", 1.0),))
    for _ in range(50):
        trace = Trace()
        believed = _attempts(step, rng, Mix(slip=(0.0,), recheck=1.0, recheck_again=1.0, spoil=0.3, storm=0.0), 0.0, trace)
        results = [attempt[-1] for _, attempt in parts(trace.text + "</think>")[0][1]]
        assert len(results) == len(COUNTS)
        assert results[-1] == believed
        assert results == sorted(results)  # the only wrong result is the larger one: once spoiled, it stays


def test_storms_force_words_that_are_not_learnt() -> None:
    """Forced words are the only tokens without a label, mid-attempt too, and the trace goes on with the same step."""
    from llm_steer.eval.testbed.tokenizer import build

    rng, tokenizer, inside = random.Random(9), build(), 0
    mix = Mix(slip=(0, 0, 0), recheck=0.0, recheck_again=0.0, spoil=0.0, stop_early=0.0, storm=1.0)
    for _ in range(100):
        problem = draw(TASK, rng, 6, "train")
        trace = write(TASK.walk(problem), rng, mix)
        assert grade(problem, trace.text)
        ids, labels = _encode([(problem, trace)], tokenizer)[0]
        told = ids[len(ids) - len(tokenizer.encode(trace.text + "<|end|>", add_special_tokens=False)) :]
        masked = [tokenizer.decode([i]) for i, label in zip(told, labels[-len(told) :], strict=True) if label == IGNORE]
        assert len(masked) == len(trace.forced) == len(re.findall("|".join(REFLECTIONS), trace.text))
        assert {word.strip() for word in masked} <= set(REFLECTIONS)
        lines = [line.split(": ")[0] for line in re.findall(r"\w: ", trace.text)]
        assert lines == sorted(lines)  # labels are in the order of the alphabet: no step is skipped or gone back to
        inside += sum(not re.search(r"= -?\d+$|\n\n$", trace.text[:at]) for at in trace.forced)
    assert inside > 100


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
        problem, trace = example(RECIPES[name], rng, RECIPES[name].steps)
        assert problem.split == "train"
        assert trace.text.count("</think>") == 1
        assert trace.text.endswith("}")


def test_hard_levels_are_long_enough() -> None:
    """The level of 12 steps thinks for 150 tokens and more."""
    from llm_steer.eval.testbed.tokenizer import build

    rng, tokenizer = random.Random(6), build()
    traces = [write(TASK.walk(draw(TASK, rng, 12, "train")), rng, Mix()) for _ in range(100)]
    lengths = [len(tokenizer.encode(t.text.split("</think>")[0], add_special_tokens=False)) for t in traces]
    assert sum(lengths) / 100 > 150
