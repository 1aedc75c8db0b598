"""Why scores are scaled: every printed number, the Monte Carlo errors, and what the sentences say."""

from __future__ import annotations

import math

import pytest

from attemper.lab.scaling import DIVISORS, SAMPLES, SIZES, sampled_variance
from tests.support.experiments import Run


@pytest.fixture(scope="module")
def result(experiment: Run):
    return experiment("scaling")


def test_the_tables_hold_the_printed_numbers(result):
    two = result.table("where 95% of the scores lie")
    for size, number in ((2, "2.8"), (4, "4.0"), (512, "45.3"), (1024, "64.0")):
        place = two.column("d").index(size)
        assert f"{two.column('unscaled, +-')[place]:.1f}" == number
    three = result.table("three standard deviations, d = 64")
    assert three.column("variance") == (64, 1, 1 / 64, 1 / 64**3)
    assert three.column("three sigma, +-") == pytest.approx((24, 3, 0.375, 3 / 512))
    rows = result.table("softmax of [12, 8, 10], d = 16").rows
    assert [[f"{cell:.3f}" for cell in row[4:]] for row in rows] == [
        ["0.867", "0.016", "0.117"],
        ["0.506", "0.186", "0.307"],
        ["0.376", "0.293", "0.332"],
        ["0.336", "0.331", "0.333"],
    ]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.quick("-64")
def test_a_drawn_variance_lies_within_three_standard_errors(size: int, seed: int):
    variance, error = sampled_variance(size, seed)
    assert abs(variance - size) < 3 * error
    # For normal entries the fourth moment of q.k is 3 d^2 + 6 d, which gives the error in closed form.
    assert error == pytest.approx(math.sqrt((2 * size**2 + 6 * size) / SAMPLES), rel=0.15)


def test_only_sqrt_d_leaves_the_same_variance_at_every_size(result):
    table = result.table("variance of a score")
    exact: dict[str, set[float]] = {name: set() for name in DIVISORS}
    for row in table.rows:
        exact[str(row[1])].add(float(row[2]))
        assert abs(row[3] - row[2]) < 3 * row[4]
    assert exact["sqrt(d)"] == {1.0}
    assert all(len(exact[name]) == len(SIZES) for name in DIVISORS if name != "sqrt(d)")
