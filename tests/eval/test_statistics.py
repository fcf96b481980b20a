"""Against plain definitions, exhaustive enumeration and simulation."""

from __future__ import annotations

import itertools
import math
from statistics import NormalDist, mean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llm_steer.eval import statistics as s

NAN = math.nan


def matrix(*rows):
    return np.array(rows, dtype=np.float64)


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=5), st.integers(1, 4))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(rows, k):
    plain = mean(mean(any(c) for c in itertools.combinations(row, k)) for row in rows)
    assert s.pass_at_k(matrix(*rows), k) == pytest.approx(plain)


def test_missing_answers():
    m = matrix([1, 1, NAN], [0, NAN, NAN], [NAN, NAN, NAN])
    assert s.avg_at_k(m).value == pytest.approx(0.5)
    assert s.pass_at_k(m, 2) == 1.0
    assert math.isnan(s.pass_at_k(m, 3))


@pytest.mark.parametrize(
    ("votes", "value"),
    [
        ([[("7", True), ("7", True), ("8", False)]], 1.0),
        ([[("7", True), ("8", False), ("8", False)]], 0.0),
        ([[("7", True), ("8", False)]], 0.5),
        ([[("7", True), ("8", False), ("9", False)]], 1 / 3),
        ([[(None, False), (None, False), ("7", True)]], 1.0),
        ([[(None, False)]], 0.0),
        ([[("7", True)], [("1", False)]], 0.5),
    ],
)
def test_majorities(votes, value):
    assert s.maj_at_k(votes) == pytest.approx(value)


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (1, 0), (5, 1), (10, 3), (7, 7), (0, 12)])
def test_sign_test_by_enumeration(better, worse):
    n = better + worse
    as_uneven = [k for k in range(n + 1) if min(k, n - k) <= min(better, worse)]
    plain = min(1.0, sum(math.comb(n, k) for k in as_uneven) / 2**n)
    assert s.sign_test(better, worse) == pytest.approx(plain)
    assert s.sign_test(worse, better) == s.sign_test(better, worse)


def test_sign_test_of_many():
    assert 0 < s.sign_test(3000, 2700) < 1e-4
    assert s.sign_test(2850, 2850) == 1.0


def test_holm():
    # The example of Holm's procedure with p = .01, .04, .03, .005: adjusted .03, .06, .06, .02.
    assert s.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert s.holm([]) == []
    assert s.holm([0.9, 0.8]) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("p", "df", "value"),
    [(0.975, 1, 12.7062), (0.975, 2, 4.3027), (0.975, 5, 2.5706), (0.975, 29, 2.0452), (0.95, 10, 1.8125)],
)
def test_student(p, df, value):
    assert s.student_quantile(p, df) == pytest.approx(value, rel=2e-3)


def test_both_ways_of_resampling_agree():
    few, many = np.repeat([0.0, 0.25, 1.0], [10, 20, 30]), np.linspace(0, 1, 60)
    for values in (few, many):
        means = s.resampled_means(values, 20_000, seed=1)
        assert means.mean() == pytest.approx(values.mean(), abs=0.005)
        assert means.std() == pytest.approx(values.std() / math.sqrt(len(values)), rel=0.03)
    assert (s.resampled_means(few, 50, 3) == s.resampled_means(few, 50, 3)).all()


def test_the_two_errors():
    rng = np.random.default_rng(0)
    difficulty = rng.beta(0.5, 0.5, size=4000)
    drawn = (rng.random((4000, 8)) < difficulty[:, None]).astype(float)
    found = s.errors(drawn)
    assert found.problems == pytest.approx(difficulty.std() / math.sqrt(4000), rel=0.05)
    assert found.sampling == pytest.approx(math.sqrt((difficulty * (1 - difficulty)).mean() / 8 / 4000), rel=0.05)
    assert found.total == pytest.approx(math.hypot(found.problems, found.sampling))
    assert math.isnan(s.errors(drawn[:, :1]).sampling)


def test_the_detectable_difference_is_detected_in_four_of_five():
    rng = np.random.default_rng(1)
    error = 0.02
    found = rng.normal(s.detectable(error), error, size=20_000)
    assert (found > NormalDist().inv_cdf(0.975) * error).mean() == pytest.approx(0.8, abs=0.01)


def test_a_comparison_is_paired():
    rng = np.random.default_rng(2)
    base = (rng.random((200, 1)) < 0.5).astype(float)
    better = base.copy()
    better[:20] = 1.0
    found = s.compare(better, base)
    assert found.worse == 0
    assert found.better == int((base[:20] == 0).sum())
    assert found.difference.low > 0
    assert found.difference.value == pytest.approx(found.better / 200)
    same = s.compare(base, base)
    assert (same.difference.low, same.difference.high, same.p) == (0.0, 0.0, 1.0)


def test_pairs_need_both():
    found = s.compare(matrix([1, NAN], [NAN, NAN], [1, 1]), matrix([0, 0], [1, 1], [1, NAN]))
    assert (found.problems, found.better, found.worse) == (2, 1, 0)


def simulated(n: int, k: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Two methods on n problems of U-shaped difficulty, of which the second helps some and hurts others."""
    logit = rng.logistic(-0.5, 2.0, size=n)
    effect = rng.normal(0.4, 1.0, size=n)
    return tuple((rng.random((n, k)) < 1 / (1 + np.exp(-z[:, None]))).astype(float) for z in (logit, logit + effect))


def coverage(n: int, k: int, trials: int, rounds: int, seed: int = 0) -> float:
    """How often the interval holds the true difference."""
    rng = np.random.default_rng(seed)
    truth = np.subtract(*(m.mean() for m in simulated(2_000_000, 1, rng)[::-1]))
    inside = 0
    for trial in range(trials):
        base, method = simulated(n, k, rng)
        found = s.compare(method, base, rounds=rounds, seed=trial).difference
        inside += found.low <= truth <= found.high
    return inside / trials


@pytest.mark.parametrize("n", [30, 500])
def test_coverage(n):
    assert 0.92 < coverage(n, 4, trials=600, rounds=600) < 0.98


def test_no_values():
    assert math.isnan(s.mean(np.array([])).value)
    one = s.mean(np.array([0.5]))
    assert one.value == 0.5
    assert math.isnan(one.low)
