"""Saturation: every printed digit of weights and gradients, the Jacobian's norms, and what the sentences say."""

from __future__ import annotations

import math

import pytest
import torch

from attemper.lab.saturation import GAPS, jacobian_norms
from tests.lab.printed import column
from tests.support.experiments import Run


@pytest.fixture(scope="module")
def result(experiment: Run):
    return experiment("saturation")


def test_the_tables_hold_the_printed_numbers_in_all_their_digits(result):
    table = result.table("softmax of [100, 120, 150] in float32, d = 1024")
    assert table.column("weight") == (1.9287498933537385e-22, 9.357622912219837e-14, 1.0)
    assert table.column("weight, scaled") == (0.13090753555297852, 0.24456748366355896, 0.6245249509811401)
    table = result.table("gradient of the first weight, torch.softmax in float32")
    assert table.column("unscaled softmax") == pytest.approx(
        (1.9287498933537385e-22, -1.8048514720778033e-35, -1.9287498933537385e-22), rel=2.0**-22
    )
    assert table.column("scaled, to unscaled scores") == pytest.approx(
        (0.0035553360357880592, -0.0010004914365708828, -0.002554844366386533), rel=2.0**-22
    )
    # Printed as "the gradient after scaling": of what the scaled softmax is given, it is 32 times as large.
    ratios = [
        b / a
        for a, b in zip(
            table.column("scaled, to unscaled scores"), table.column("scaled, to scaled scores"), strict=True
        )
    ]
    assert ratios == [32.0] * 3


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.turns(2)
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
