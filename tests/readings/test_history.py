"""Mean, spread and trend of a statistic over steps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from attemper.readings import history


def slow_slope(x: np.ndarray, y: np.ndarray) -> float:
    """The median slope, pair by pair."""
    known = [(a, b) for a, b in zip(x, y, strict=True) if not np.isnan(b)]
    return float(np.median([(d - b) / (c - a) for (a, b), (c, d) in itertools.combinations(known, 2)]))


def test_a_mean_leaves_out_samples_without_a_number_and_is_of_float64() -> None:
    values = np.array([[1.0, np.nan, 3.0], [2.0, np.nan, np.nan]], np.float32)
    found = history.mean(values)
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, [1.5, np.nan, 3.0])


def test_a_deviation_is_that_of_the_population() -> None:
    values = np.random.default_rng(0).normal(size=(50, 2, 3))
    np.testing.assert_allclose(history.std(values), values.std(0), rtol=1e-12)


@pytest.mark.parametrize("samples", [2, 5, 40, 200])
def test_a_trend_is_the_median_of_all_slopes(samples: int) -> None:
    random = np.random.default_rng(samples)
    steps = np.sort(random.choice(5000, samples, replace=False))
    values = random.normal(size=(samples, 2, 3)).astype(np.float32)
    values[random.random(values.shape) < 0.1] = np.nan
    values[:2] = 0.25
    found = history.trend(steps, values).slope
    assert found.shape == (2, 3)
    for place in np.ndindex(2, 3):
        np.testing.assert_allclose(found[place], 1000 * slow_slope(steps, values[:, *place]), rtol=1e-5, atol=1e-9)


def test_a_trend_of_many_samples_is_that_of_at_most_200_medians_of_neighbours() -> None:
    steps = np.arange(0, 10_000, 7)
    values = np.random.default_rng(0).normal(size=(len(steps), 2))
    values[3] = np.nan
    middles, medians = history.block_medians(steps, values)
    assert len(middles) == len(medians) <= history.MOST_BLOCKS
    np.testing.assert_array_equal(medians[0], np.nanmedian(values[:9], 0))
    assert middles[0] == 28
    found, expected = history.trend(steps, values), history.trend(middles, medians)
    np.testing.assert_array_equal(found.slope, expected.slope)


@pytest.mark.parametrize("samples", [200, 201, 500, 1300, 10_000])
def test_a_trend_is_not_moved_by_a_quarter_of_samples_that_are_wrong(samples: int) -> None:
    random, steps = np.random.default_rng(samples), np.arange(samples)
    right = 3e-3 * steps[:, None] + 0.01 * random.normal(size=(samples, 8))
    for wrong in (random.permutation(samples)[: samples // 4], steps[samples // 2 :][: samples // 4], steps[::4]):
        values = right.copy()
        values[wrong] = 1e6
        np.testing.assert_allclose(history.trend(steps, values).slope, 3.0, rtol=0.02)


def test_a_trend_of_one_sample_or_none_is_no_number_and_of_no_head_empty() -> None:
    for samples in (0, 1):
        found = history.trend(np.arange(samples), np.zeros((samples, 3)))
        assert found.slope.shape == (3,)
        assert np.isnan([found.slope, found.low, found.high]).all()
    assert history.trend(np.arange(5), np.zeros((5, 0))).slope.shape == (0,)


def test_four_samples_do_not_bound_a_trend_and_ten_do() -> None:
    few = history.trend(np.arange(4), np.arange(4.0))
    assert (few.slope, few.low, few.high) == (1000.0, -np.inf, np.inf)
    assert not few.certain
    enough = history.trend(np.arange(10), np.arange(10.0))
    assert (enough.low, enough.high) == (1000.0, 1000.0)
    assert enough.certain


def test_a_head_that_never_changes_has_a_trend_of_0_that_is_certain_of_nothing() -> None:
    found = history.trend(np.arange(50), np.full((50, 1), 0.5))
    assert (found.slope[0], found.low[0], found.high[0]) == (0.0, 0.0, 0.0)
    assert not found.certain[0]


@pytest.mark.parametrize(
    ("likeness", "least", "samples"), [(0.0, 0.93, 120), (0.5, 0.90, 120), (0.8, 0.85, 120), (0.5, 0.93, 1000)]
)
def test_an_interval_holds_the_true_slope_as_often_as_it_says(likeness: float, least: float, samples: int) -> None:
    random, runs = np.random.default_rng(1), 600
    noise = random.normal(size=(samples, runs))
    for place in range(1, samples):
        noise[place] = likeness * noise[place - 1] + np.sqrt(1 - likeness**2) * noise[place]
    steps = 10 * np.arange(samples)
    found = history.trend(steps, noise + 2e-3 * steps[:, None])
    held = ((found.low <= 2.0) & (found.high >= 2.0)).mean()
    assert least <= held <= 0.995, held
