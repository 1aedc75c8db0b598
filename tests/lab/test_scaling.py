"""Why scores are scaled: every printed number, the Monte Carlo errors, and what the sentences say."""

from __future__ import annotations

import math

import pytest
import torch

from attemper.functional import softmax
from attemper.lab.scaling import DIVISORS, SAMPLES, SIZES, exact_variance, sampled_variance
from tests.lab.printed import Printed
from tests.support.experiments import Run

WHY, NORMALISED = "why scores are scaled", "variance normalisation by d_k"
SCORES = torch.tensor([12.0, 8.0, 10.0], dtype=torch.float64)


@pytest.fixture(scope="module")
def result(experiment: Run):
    return experiment("scaling")


def weights() -> list[Printed]:
    printed = {
        "1": "0.867 0.016 0.117",
        "4": "0.506 0.186 0.307",
        "16": "0.376 0.293 0.332",
        "256": "0.336 0.331 0.333",
    }
    scaled = {"4": "3 2 2.5", "16": "0.75 0.5 0.625", "256": "0.0469 0.03125 0.0391"}
    lines = []
    for divisor, numbers in printed.items():
        p = softmax(SCORES / float(divisor)).tolist()
        lines += [
            Printed(NORMALISED, f"[12, 8, 10] / {divisor}, weight {key}", number, p[key])
            for key, number in enumerate(numbers.split())
        ]
    for divisor, numbers in scaled.items():
        lines += [
            Printed(NORMALISED, f"[12, 8, 10] / {divisor}, score {key}", number, float(SCORES[key]) / float(divisor))
            for key, number in enumerate(numbers.split())
        ]
    return lines


def two_sigma(size: int) -> float:
    return 2 * math.sqrt(exact_variance(size, 0.0))


PRINTED = [
    *(Printed(WHY, f"variance, d = {size}", str(size), exact_variance(size, 0.0)) for size in (2, 4, 512, 1024)),
    Printed(WHY, "variance of one product", "1", exact_variance(1, 0.0)),
    Printed(WHY, "variance after the division by sqrt(d)", "1", exact_variance(1024, 0.5)),
    # It says "+-2 variance" there; its numbers are two standard deviations.
    Printed(WHY, "two standard deviations of an entry", "2", two_sigma(1)),
    Printed(WHY, "two standard deviations, d = 2", "2.8", two_sigma(2)),
    Printed(WHY, "two standard deviations, d = 4", "4", two_sigma(4)),
    Printed(WHY, "two standard deviations, d = 512", "45.2", two_sigma(512), correction="45.3"),
    Printed(WHY, "two standard deviations, d = 1024", "64", two_sigma(1024)),
    Printed(WHY, "its square under the root, d = 512", "2048", two_sigma(512) ** 2),
    Printed(WHY, "its square under the root, d = 1024", "4096", two_sigma(1024) ** 2),
    Printed(NORMALISED, "variance, d = 64", "64", exact_variance(64, 0.0)),
    Printed(NORMALISED, "three sigma, d = 64", "24", 3 * math.sqrt(exact_variance(64, 0.0))),
    Printed(NORMALISED, "three sigma after sqrt(d)", "3", 3 * math.sqrt(exact_variance(64, 0.5))),
    Printed(NORMALISED, "three sigma after d", "0.9375", 3 * math.sqrt(exact_variance(64, 1.0)), correction="0.3750"),
    Printed(NORMALISED, "variance after d^2", "3.8e-5", exact_variance(64, 2.0), correction="3.8e-6"),
    # Truncated, and of sd 0.00195, the root of 3.8e-6: its own 3.8e-5 would give 0.0185.
    Printed(NORMALISED, "three sigma after d^2", "0.0058", 3 * math.sqrt(exact_variance(64, 2.0)), correction="0.0059"),
    Printed(NORMALISED, "three sigma of variance 16", "12", 3 * math.sqrt(exact_variance(16, 0.0))),
    Printed(NORMALISED, "variance of [12, 8, 10]", "16", float(SCORES.var()), correction="4"),
    Printed(NORMALISED, "a uniform weight of three", "0.333", 1 / 3),
    *weights(),
]


@pytest.mark.parametrize("number", PRINTED, ids=str)
def test_a_printed_number_is_ours_or_is_corrected(number: Printed):
    number.check()


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
@pytest.mark.quick("0-", "-64")
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


def test_what_the_larger_divisors_leave_is_said_in_numbers_of_the_tables(result):
    three = result.table("three standard deviations, d = 64")
    factors = [math.exp(2 * range_) for range_ in three.column("three sigma, +-")]
    assert [f"{factors[1]:.0f}", f"{factors[2]:.1f}", f"{factors[3]:.2f}"] == ["403", "2.1", "1.01"]
    assert "by a factor of 403 if scores are divided by sqrt(d), of 2.1 by d and of 1.01 by d^2" in three.see
    weights = result.table("softmax of [12, 8, 10], d = 16")
    assert f"{max(abs(weight - 1 / 3) for weight in weights.rows[-1][4:]):.1%}" == "0.3%"
    assert "one key takes 87%; divided by d, 38%" in weights.see
    assert "uniform to 0.3%" in weights.see


def test_uncorrelated_entries_are_not_enough_for_a_variance_of_d():
    """Keys that are the queries with random signs, as the page says: entries uncorrelated, squares not."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(SAMPLES, 16, generator=generator, dtype=torch.float64)
    key = query * (torch.randint(0, 2, query.shape, generator=generator) * 2 - 1)
    assert abs((query * key).mean().item()) < 4 * math.sqrt(3 / query.numel())
    squares = (query * key).sum(-1).square()
    assert abs(squares.mean().item() - 3 * 16) < 3 * squares.std().item() / math.sqrt(SAMPLES)
