"""Saturation: every printed digit of weights and gradients, the Jacobian's norms, and what the sentences say."""

from __future__ import annotations

import math

import pytest
import torch

from attemper.functional import softmax
from attemper.lab.saturation import GAPS, LARGE, STEEP, gradient_of_first, jacobian_norms, usual
from tests.lab.printed import Printed, column
from tests.support.experiments import Run

WHY = "why scores are scaled"
SCORES = torch.tensor(LARGE)
WEIGHTS, SCALED = softmax(SCORES).tolist(), softmax(SCORES / 32).tolist()
UNSCALED_GRADIENT = gradient_of_first(SCORES, through=usual)[0].tolist()
TO_UNSCALED, TO_SCALED = (part.tolist() for part in gradient_of_first(SCORES, 32.0, usual))


def lines(what: str, printed: str, ours: list[float], corrections: str = "") -> list[Printed]:
    right = corrections.split() or [None] * len(ours)
    return [
        Printed(WHY, f"{what} {key}", number, value, correction)
        for key, (number, value, correction) in enumerate(zip(printed.split(), ours, right, strict=True), 1)
    ]


PRINTED = [
    *lines("softmax of [10, 20, 30]", "0 0 1", softmax(torch.tensor(STEEP)).tolist()),
    *lines("weight", "1.9287e-22 9.3576e-14 1.0000e+00", WEIGHTS),
    *lines("scaled score", "3.1250 3.7500 4.6875", (SCORES / 32).tolist()),
    *lines("scaled weight", "0.1309 0.2446 0.6245", SCALED),
    Printed(WHY, "scale factor", "32.0", math.sqrt(1024)),
    Printed(WHY, "sum of weights", "1.0000", sum(WEIGHTS)),
    Printed(WHY, "sum of scaled weights", "1.0000", sum(SCALED)),
    *lines("weight, all digits", "1.9287498933537385e-22 9.357622912219837e-14 1.0", WEIGHTS),
    *lines(
        "gradient, all digits", "1.9287498933537385e-22 -1.8048514720778033e-35 -1.9287498933537385e-22",
        UNSCALED_GRADIENT,
    ),
    *lines("scaled weight, all digits", "0.13090753555297852 0.24456748366355896 0.6245249509811401", SCALED),
    *lines(
        "gradient to the unscaled scores, all digits",
        "0.0035553360357880592 -0.0010004914365708828 -0.002554844366386533", TO_UNSCALED,
    ),
    # Printed as "the gradient after scaling": of what the scaled softmax is given, it is 32 times as large.
    *lines("gradient to the scaled scores", "0.003555 -0.001000 -0.002555", TO_SCALED, "0.113771 -0.032016 -0.081755"),
]  # fmt: skip


@pytest.fixture(scope="module")
def result(experiment: Run):
    return experiment("saturation")


@pytest.mark.parametrize("number", PRINTED, ids=str)
def test_a_printed_number_is_ours_or_is_corrected(number: Printed):
    number.check()


def test_the_tables_hold_the_printed_numbers_in_all_their_digits(result):
    table = result.table("softmax of [100, 120, 150] in float32, d = 1024")
    assert table.column("weight") == (1.9287498933537385e-22, 9.357622912219837e-14, 1.0)
    assert table.column("weight, scaled") == (0.13090753555297852, 0.24456748366355896, 0.6245249509811401)
    table = result.table("gradient of the first weight, torch.softmax in float32")
    assert table.column("unscaled softmax") == tuple(UNSCALED_GRADIENT)
    assert table.column("scaled, to unscaled scores") == tuple(TO_UNSCALED)
    ratios = [
        b / a
        for a, b in zip(
            table.column("scaled, to unscaled scores"), table.column("scaled, to scaled scores"), strict=True
        )
    ]
    assert ratios == [32.0] * 3


def test_two_steep_keys_keep_what_the_sentence_says(result):
    table = result.table("softmax of [10, 20, 30]")
    assert f"{sum(table.column('weight')[:2]):.2g}" == "4.5e-05"
    assert "4.5e-05" in table.see


@pytest.mark.parametrize("gap", GAPS)
def test_the_spectral_norm_of_two_keys_is_2_p_times_1_minus_p(gap: float):
    frobenius, spectral = jacobian_norms(torch.tensor([gap, 0.0], dtype=torch.float64))
    want = 2 * math.exp(-gap) / (1 + math.exp(-gap)) ** 2
    assert spectral.item() == pytest.approx(want, rel=1e-13)
    assert frobenius.item() == pytest.approx(want, rel=1e-13)


def test_the_larger_weight_loses_its_gradient_near_17_in_torch_and_beyond_100_in_ours(result):
    table = result.table("two keys, a gap apart")
    in_torch = dict(zip(table.column("gap"), table.column("gradient, torch float32"), strict=True))
    ours = dict(zip(table.column("gap"), table.column("gradient, ours float32"), strict=True))
    assert {gap for gap, gradient in in_torch.items() if gradient == 0} == {gap for gap in GAPS if gap > 17}
    assert {gap for gap, gradient in ours.items() if gradient == 0} == {110.0}
    for gap, norm in zip(table.column("gap"), table.column("spectral norm of J"), strict=True):
        if gap < 80:  # below, float32 has few digits left for e^-gap
            assert ours[gap] == pytest.approx(norm / 2, rel=1e-6)


def test_norms_are_those_of_autograd_and_of_singular_values():
    scores = torch.randn(3, 5, dtype=torch.float64)
    frobenius, spectral = jacobian_norms(scores)
    for row, f, s in zip(scores, frobenius, spectral, strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda x: torch.softmax(x, -1), row)
        assert isinstance(jacobian, torch.Tensor)
        assert f.item() == pytest.approx(jacobian.norm().item(), rel=1e-12)
        assert s.item() == pytest.approx(torch.linalg.matrix_norm(jacobian, 2).item(), rel=1e-12)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.quick("[0", "0]")
def test_the_norm_is_largest_at_a_spread_of_3_to_4_and_the_median_falls_below_half_the_mean_where_said(
    seed: int, experiment: Run
):
    table = next(t for t in experiment("saturation", seed).tables if t.title.startswith("norm of the Jacobian"))
    spreads, means = column(table, "standard deviation"), column(table, "spectral, mean")
    medians = column(table, "spectral, median")
    assert spreads[means.index(max(means))] in (3.0, 4.0)
    assert spreads[medians.index(max(medians))] in (3.0, 4.0)
    below = [s for s, mean, median in zip(spreads, means, medians, strict=True) if median < mean / 2]
    assert below in ([12.0, 16.0, 24.0, 32.0], [16.0, 24.0, 32.0])
    assert f"From {below[0]:g} on the median row has less than half the mean" in table.see
    assert means[0] == pytest.approx(1 / 64, rel=0.3)


def test_larger_heads_are_sharper_and_the_scaled_row_is_that_of_no_head_size(result):
    table = result.table("random rows of each head size, 64 keys")
    largest, entropies = table.column("largest weight, mean"), table.column("entropy, mean")
    assert list(largest[:-1]) == sorted(largest[:-1])
    assert list(entropies[:-1]) == sorted(entropies[:-1], reverse=True)
    assert largest[-1] < largest[0]
    assert entropies[-1] > entropies[0]
