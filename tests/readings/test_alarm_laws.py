"""The laws of alarms as functions of arrays, each against its formula."""

from __future__ import annotations

import math

import numpy as np
import pytest

from attemper.readings.alarm_laws import (
    LEAST_FALL,
    LEAST_SHARE,
    LEAST_SPREAD,
    Array,
    doubling_time,
    median_of_three,
    rate,
    settle,
    shift,
)


def column(*values: float) -> Array:
    return np.array(values, float)[:, None]


def steps(values: Array, apart: float = 10.0) -> Array:
    return np.broadcast_to(apart * np.arange(len(values), dtype=float)[:, None], values.shape)


def test_the_doubling_time_of_an_exponential_is_its_own():
    for time in (3.0, 20.0, 80.0):
        values = 5.0 * 2.0 ** (steps(np.zeros((30, 1)), 7.0) / time)
        assert doubling_time(steps(values, 7.0), values)[0] == pytest.approx(time, rel=1e-12)


def test_the_doubling_time_is_measured_since_the_value_was_last_half_of_what_it_is():
    values = column(1, 4, 3, 9, 8)
    assert doubling_time(steps(values), values)[0] == pytest.approx(20 / math.log2(8 / 3))
    jump = column(8, 8, 8, 128)
    assert doubling_time(steps(jump), jump)[0] == pytest.approx(10 / 4)


def test_what_was_never_half_as_large_has_no_doubling_time():
    for values in ((5, 6, 7, 8), (9, 8, 7, 6), (0, 0, 0, 0), (-8, -4, -2, -1), (math.nan, math.nan, 3)):
        given = column(*values)
        assert doubling_time(steps(given), given)[0] == math.inf


def test_a_value_from_nothing_doubles_fast_and_no_number_has_no_time():
    for first in (0.0, -3.0, 1e-30):
        given = column(first, 100.0)
        assert doubling_time(steps(given), given)[0] == pytest.approx(10 / 10)
    unknown = column(1.0, 2.0, math.nan)
    assert math.isnan(doubling_time(steps(unknown), unknown)[0])


def test_the_rate_is_that_of_the_steepest_fall_in_100_steps():
    given = column(0.9, 0.9, 0.5, 0.1)
    assert rate(steps(given), given)[0] == pytest.approx(100 * 0.4 / 10)
    slow = column(0.9, 0.9, 0.4, 0.3)
    assert rate(steps(slow), slow)[0] == pytest.approx(100 * 0.6 / 20)


def test_a_small_fall_or_a_rise_has_no_rate():
    for values in ((0.1, 0.5, 0.9), (0.5, 0.5, 0.5 - 0.99 * LEAST_FALL), (math.nan, 0.4)):
        given = column(*values)
        assert rate(steps(given), given)[0] == 0.0


def test_a_stretch_that_moves_on_has_not_settled():
    rng = np.random.default_rng(0)
    still = 0.5 + 0.2 * rng.normal(size=(16, 1000))
    centre, spread = settle(still)
    known = ~np.isnan(centre)
    assert known.mean() > 0.7, "a stretch that moves by chance is looked at again later"
    np.testing.assert_array_equal(centre[known], np.median(still, 0)[known])
    expected = np.maximum(1.4826 * np.median(abs(still - np.median(still, 0)), 0), LEAST_SPREAD)
    np.testing.assert_array_equal(spread[known], expected[known])
    assert np.isnan(settle(np.linspace(0.9, 0.5, 16)[:, None] + 0.05 * still)).all()
    assert settle(np.full((16, 1), 0.5))[1][0] == LEAST_SPREAD


def test_one_wild_reading_neither_moves_a_stretch_nor_a_median_of_three():
    stretch = np.full((16, 1), 0.5)
    stretch[7] = 0.0
    assert settle(stretch)[0][0] == 0.5
    for given in ((1.0, 2.0, 3.0), (3.0, 1.0, 2.0), (2.0, 3.0, 1.0), (2.0, 2.0, 9.0)):
        assert median_of_three(*(np.array([value]) for value in given))[0] == 2.0


def test_a_shift_is_measured_from_the_range_of_17_readings_in_spreads_of_these():
    before = np.linspace(0.40, 0.56, 17)
    spread = max(1.4826 * float(np.median(abs(before - 0.48))) / 0.48, LEAST_SHARE)
    for latest, expected in (
        ((0.2, 0.2, 0.2), 0.40 / 0.2 - 1),
        ((0.5, 0.2, 0.1), 0.40 / 0.2 - 1),
        ((0.9, 0.8, 0.5), 0.8 / 0.56 - 1),
        ((0.5, 0.5, 0.0), 0.0),
        ((0.0, 0.0, 0.0), 1023.0),
    ):
        assert shift(column(*before, *latest))[0] == pytest.approx(expected / spread, rel=1e-12)
    still = shift(column(*[0.5] * 17, 0.4, 0.4, 0.4))[0]
    assert still == pytest.approx((0.5 / 0.4 - 1) / LEAST_SHARE), "of a head without noise a share of its median"
    assert math.isnan(shift(column(math.nan, *before[1:], 0.2, 0.2, 0.2))[0])
