"""Each wave against the formula in plain Python, and the triangular one against both forms that the paper and code give."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_steer.plugins.reflection_cycle import schedule

from core_oracles import FORMS, code_form, paper_form, piecewise_form

T = torch.arange(0, 9001, dtype=torch.float64)
PERIODS = [37.3, 100.0, 600.0, 999.99, 1200.0, 2000.0, 0.5, 9001.7]
PHASES = [0.0, 0.25, 0.3, -0.125, 1.0, -1.0]


def column(value: float, like: torch.Tensor = T) -> torch.Tensor:
    return torch.full_like(like, value)


def wave(name: str, amplitude: float = 1.0, period: float = 1.0, phase: float = 0.0, t: torch.Tensor = T) -> list[float]:
    return schedule.WAVES[name](t, *(column(value, t) for value in (amplitude, period, phase))).tolist()


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("period", PERIODS)
@pytest.mark.parametrize("amplitude", [5.0, -3.0])
def test_triangular_equals_both_closed_forms(amplitude, period, phase):
    ours = wave("triangular", amplitude, period, phase)
    for form in (code_form, paper_form):
        theirs = [form(t, amplitude, period, phase) for t in range(9001)]
        assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-6


def test_triangular_passes_through_the_anchors():
    t = torch.tensor([0.0, 150.0, 300.0, 450.0, 600.0, 750.0], dtype=torch.float64)
    assert wave("triangular", 5.0, 600.0, t=t) == pytest.approx([0, 5, 0, -5, 0, 5], abs=1e-12)
    assert max(wave("triangular", 5.0, 600.0)) == pytest.approx(5)
    assert min(wave("triangular", 5.0, 600.0)) == pytest.approx(-5)


@pytest.mark.parametrize("name", sorted(FORMS))
@pytest.mark.parametrize("phase", [0.0, 0.4, -0.25])
@pytest.mark.parametrize("period", [37.3, 1200.0])
def test_every_wave_equals_its_formula(name, period, phase):
    ours = wave(name, 3.5, period, phase)
    theirs = [FORMS[name](t, 3.5, period, phase) for t in range(9001)]
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-6


def test_every_wave_has_a_formula_here():
    assert set(schedule.WAVES) == set(FORMS)


def test_silver_begins_as_the_reference_did():
    ours = wave("silver", 1.0)
    assert ours[:8] == [0.25, 0.5, 0.25, 1, 0.25, 0.5, 0.25, 2]
    assert ours[63] == 16
    assert ours[64:128] == ours[:64]


def test_linear_decay_goes_from_boost_to_penalty_and_stays():
    ours = wave("linear_decay", 5.0, 1000.0)
    assert ours[0] == 5
    assert ours[500] == pytest.approx(0, abs=1e-12)
    assert ours[1000] == ours[9000] == -5


POINTS = st.lists(
    st.tuples(st.floats(0, 500), st.floats(-100, 100)), min_size=1, max_size=7, unique_by=lambda point: round(point[0], 3)
).map(sorted)


@given(rows=st.lists(POINTS, min_size=1, max_size=5), data=st.data())
@settings(max_examples=150, deadline=None)
def test_piecewise_equals_interpolation_for_rows_of_different_length(rows, data):
    width = max(2, *map(len, rows))
    x, y = (
        torch.tensor([[p[i] for p in row + row[-1:] * (width - len(row))] for row in rows], dtype=torch.float64)
        for i in (0, 1)
    )
    knots = st.sampled_from([p[0] for row in rows for p in row])
    t = data.draw(st.lists(knots | st.floats(-5, 600), min_size=len(rows), max_size=len(rows)))
    ours = schedule.piecewise(torch.tensor(t, dtype=torch.float64), x, y).tolist()
    assert ours == pytest.approx([piecewise_form(time, row) for time, row in zip(t, rows, strict=True)], abs=1e-6)


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 9000), st.floats(-100, 100), st.floats(0.5, 5000), st.floats(-1, 1)), min_size=1, max_size=8
    ),
    name=st.sampled_from(sorted(FORMS)),
)
@settings(max_examples=150, deadline=None)
def test_rows_do_not_see_each_other(rows, name):
    columns = [torch.tensor(values, dtype=torch.float64) for values in zip(*rows, strict=True)]
    together = schedule.WAVES[name](*columns)
    alone = [schedule.WAVES[name](*(torch.tensor([v], dtype=torch.float64) for v in row)).item() for row in rows]
    assert together.tolist() == alone


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("period", [1, 60, 1200])
def test_shuffled_has_the_offsets_of_the_wave_in_each_period_in_another_order(period, seed):
    t = torch.arange(3 * period, dtype=torch.float64)
    order = torch.tensor(schedule.shuffled_order(period, seed), dtype=torch.float64)
    form = [column(value, t) for value in (5.0, float(period), 0.1)]
    wave, ours = schedule.triangular(t, *form), schedule.triangular(order[schedule.place(t, form[1])], *form)
    for one in ours.chunk(3):
        assert torch.equal(one.sort().values, wave[:period].sort().values)
    assert period == 1 or not torch.equal(ours, wave)
    assert period == 1 or schedule.shuffled_order(period, seed) != schedule.shuffled_order(period, seed + 1)
