"""Schedules over steps and layers: closed forms, always above 0, the same after a resume, mistakes."""

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attemper import InputError, schedules

positive = st.floats(1e-3, 1e3)
SCHEDULES: list[Callable[[float, float], schedules.Schedule]] = [
    lambda a, b: schedules.constant(a),
    lambda a, b: schedules.warmup_anneal(a, b),
    lambda a, b: schedules.warmup_anneal(a, b, start=0.5, warmup=0.0),
    lambda a, b: schedules.curriculum(a, b),
    lambda a, b: schedules.piecewise([(0.2, a), (0.6, b)]),
    lambda a, b: schedules.piecewise([(0.2, a), (0.6, b)], interpolation="constant"),
]


@pytest.mark.parametrize("make", SCHEDULES)
@given(one=positive, two=positive, step=st.integers(-5, 2_000), total=st.integers(1, 1_000))
def test_it_is_positive_finite_and_between_its_numbers_at_every_step(
    make: Callable[[float, float], schedules.Schedule], one: float, two: float, step: int, total: int
):
    value = make(one, two)(step, total)
    assert min(one, two, 0.5) * (1 - 1e-12) <= value <= max(one, two, 1.0) * (1 + 1e-12)
    assert math.isfinite(value)


@pytest.mark.parametrize("make", SCHEDULES)
def test_what_is_outside_of_training_is_its_first_or_its_end_and_a_resumed_run_has_the_same_bits(
    make: Callable[[float, float], schedules.Schedule],
):
    schedule = make(2.0, 0.1)
    resumed = pickle.loads(pickle.dumps(schedule))
    assert resumed == schedule
    assert [resumed(step, 70) for step in range(70)] == [schedule(step, 70) for step in range(70)]
    assert schedule(-3, 70) == schedule(0, 70)
    assert schedule(71, 70) == schedule(70, 70) == schedule(10**9, 70)


def test_warm_up_rises_in_a_line_and_anneals_along_a_cosine():
    schedule = schedules.warmup_anneal(2.0, 0.1, start=1.0, warmup=0.1)
    for step in (0, 1, 5, 9, 10, 11, 55, 99, 100):
        share = step / 100
        want = 1 + share / 0.1 if share < 0.1 else 0.1 + 1.9 * (1 + math.cos(math.pi * (share - 0.1) / 0.9)) / 2
        assert schedule(step, 100) == pytest.approx(want, rel=1e-12)
    values = [schedule(step, 100) for step in range(10, 101)]
    assert values == sorted(values, reverse=True)


def test_points_are_joined_by_lines_or_by_stairs():
    points = [(0.25, 2.0), (0.5, 1.0), (1.0, 3.0)]
    lines, stairs = schedules.piecewise(points), schedules.piecewise(points, interpolation="constant")
    assert [lines(step, 8) for step in range(9)] == [2.0, 2.0, 2.0, 1.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert [stairs(step, 8) for step in range(9)] == [2.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0, 3.0]
    assert [schedules.curriculum(2.0, 1.0)(step, 4) for step in range(5)] == [2.0, 1.75, 1.5, 1.25, 1.0]


def test_layers_go_in_a_line_in_a_u_or_by_equal_ratios():
    assert schedules.layerwise(3, 0.5, 1.5) == [0.5, 1.0, 1.5]
    assert schedules.layerwise(4, 2.0, 16.0, "exponential") == pytest.approx([2.0, 4.0, 8.0, 16.0])
    u = schedules.layerwise(7, 0.5, 1.5, "u")
    assert u[0] == u[-1] == max(u) == 1.5
    assert u[3] == min(u) == 0.5
    assert schedules.layerwise(1, 0.5, 1.5) == [0.5]
    assert schedules.layerwise(2, 0.5, 1.5, "u") == [1.5, 1.5]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedules.constant(0.0), r"constant\(value=...\) must be finite and above 0, got 0.0"),
        (lambda: schedules.warmup_anneal(final=-1.0), r"warmup_anneal\(final=...\) must be finite and above 0"),
        (lambda: schedules.warmup_anneal(start=0.0), r"warmup_anneal\(start=...\) must be finite and above 0"),
        (lambda: schedules.warmup_anneal(warmup=1.0), "is the share of steps, from 0 to below 1; got 1.0"),
        (lambda: schedules.curriculum(math.inf, 1.0), "must be finite and above 0, got inf"),
        (lambda: schedules.piecewise([]), "must rise by share"),
        (lambda: schedules.piecewise([(0.5, 1.0), (0.2, 1.0)]), "must rise by share"),
        (lambda: schedules.piecewise([(0.5, 1.0), (100, 1.0)]), "must rise by share"),
        (lambda: schedules.piecewise([3.0]), "must hold pairs"),  # type: ignore[list-item]
        (lambda: schedules.piecewise([(0.0, 1.0)], interpolation="cubic"), "must be one of 'linear', 'constant'"),
        (lambda: schedules.layerwise(0, 1.0, 2.0), "must be an int of at least 1, got 0"),
        (lambda: schedules.layerwise(3, 1.0, 2.0, "v"), "must be one of 'linear', 'u', 'exponential'; got 'v'"),
        (lambda: schedules.curriculum()(3, 0), "needs a total of at least 1 step, got 0"),
    ],
)
def test_mistakes_are_told(make: Callable[[], Any], message: str):
    with pytest.raises(InputError, match=message):
        make()
