"""Document 004 in numbers: each snippet against torch, autograd or a loop."""

from __future__ import annotations

import math

import pytest
import torch

from attemper import functional
from tests.articles.cases.document_004 import ATTENTION, COMPLEXITY, SCALED, STABLE, TOP_K
from tests.articles.cases.document_004_tools import (
    ADAPTIVE,
    ANALYSIS,
    ENTMAX,
    GRADIENT,
    KERNEL,
    MIXED,
    OPTIMISATION,
)
from tests.articles.runner import run_of


def article(case):
    return run_of(case).names["article"]


def test_softmax_and_attention_are_those_of_torch_until_a_row_sees_nothing() -> None:
    assert run_of(ATTENTION).complaints == [
        "NameError: name 'torch' is not defined",
        "NameError: name 'math' is not defined",
    ]
    x = torch.randn(3, 5)
    torch.testing.assert_close(article(ATTENTION).softmax(x), x.softmax(-1))
    hidden = torch.full((3,), -math.inf)
    assert article(ATTENTION).softmax(hidden).isnan().all()
    assert functional.softmax(hidden).tolist() == [0, 0, 0]


def test_complexity_fails_on_numbers_and_counts_with_symbols() -> None:
    fails, counts = run_of(COMPLEXITY).outputs
    assert fails == "AttributeError: 'int' object has no attribute 'subs'"
    assert counts == f"{2 * 512 * 512 * 64 + 512 * 512} 33816576"
    every_operation = 2 * (2 * 512 * 512 * 64) + 6 * 512 * 512
    assert run_of(COMPLEXITY).here == f"{every_operation} 33816576"


def test_the_stable_softmax_is_the_first_one_again() -> None:
    x = torch.randn(4, 6) * 1000
    assert torch.equal(article(STABLE).numerically_stable_softmax(x), article(ATTENTION).softmax(x))
    torch.testing.assert_close(functional.softmax(x), x.softmax(-1))


def test_the_scaled_softmax_takes_0_and_negative_temperatures() -> None:
    scores = torch.tensor([1.0, 2.0, 3.0])
    scaled = article(SCALED).scaled_softmax
    torch.testing.assert_close(scaled(scores, 2.0), functional.softmax(scores, temperature=2.0))
    assert scaled(scores, 0.0).isnan().all()
    assert scaled(scores, -1.0).argmax() == 0
    assert "InputError: softmax(temperature=...) must be above 0, got -1.0." in run_of(SCALED).here


def test_top_k_keeps_exactly_k_of_ties_copes_with_hidden_keys_and_fails_beyond_the_row() -> None:
    top_k = article(TOP_K).top_k_softmax
    row = torch.tensor([3.0, 1.0, 2.0, 0.0])
    e = [math.exp(3), 0, math.exp(2), 0]
    assert top_k(row, 2).tolist() == pytest.approx([x / sum(e) for x in e], rel=1e-6)
    assert (top_k(torch.ones(7), 3) > 0).sum() == 3
    assert top_k(torch.tensor([0.0, -math.inf, -math.inf]), 2).tolist() == [1, 0, 0]
    assert run_of(TOP_K).outputs[1] == "RuntimeError: selected index k out of range"


def test_kernel_attention_is_right_for_three_dimensions_and_refuses_four() -> None:
    q, k, v = torch.randn(3, 1, 4, 3, dtype=torch.float64).unbind()
    elu = torch.where(q > 0, q + 1, q.exp()), torch.where(k > 0, k + 1, k.exp())
    weights = torch.tensor([[float((elu[0][0, i] * elu[1][0, j]).sum()) for j in range(4)] for i in range(4)])
    expected = (weights / weights.sum(-1, keepdim=True)).double() @ v[0]
    torch.testing.assert_close(article(KERNEL).kernel_attention(q, k, v)[0], expected, rtol=1e-4, atol=1e-5)
    assert run_of(KERNEL).outputs[1] == "RuntimeError: batch1 must be a 3D tensor"


def test_kernel_attention_sees_the_future() -> None:
    q, k, v = torch.randn(3, 1, 4, 3).unbind()
    later = v.clone()
    later[0, -1] += 1
    attend = article(KERNEL).kernel_attention
    assert (attend(q, k, v)[0, 0] - attend(q, k, later)[0, 0]).abs().max() > 0.01


def test_entmax_lacks_its_threshold_and_is_right_with_2_tau_and_wrong_with_tau() -> None:
    run = run_of(ENTMAX)
    assert run.outputs[0] == "NameError: name 'threshold_and_support_for_entmax15' is not defined"
    scores, tau = run.names["scores"], run.names["tau"]
    right = (scores / 2 - tau).clamp(min=0) ** 2
    assert right.sum().item() == pytest.approx(1, abs=1e-12)
    # The optimality of alpha-entmax: sqrt(p) is score / 2 less one threshold, on the support.
    assert (right[0].sqrt() - right[1].sqrt()).item() == pytest.approx((scores[0] - scores[1]).item() / 2, abs=1e-12)
    snippet = run.names["article"]
    snippet.threshold_and_support_for_entmax15 = lambda x, dim: 2 * tau
    assert snippet.entmax15(scores).tolist() == pytest.approx(right.tolist(), abs=1e-12)
    snippet.threshold_and_support_for_entmax15 = lambda x, dim: tau
    assert snippet.entmax15(scores).sum().item() == pytest.approx(0.6047, abs=1e-4)


def test_their_gini_is_the_right_one_with_the_wrong_sign() -> None:
    analyze = article(ANALYSIS).analyze_attention_distribution
    for n in (2, 4, 9):
        uniform, one_hot = torch.full((n,), 1 / n), torch.eye(n)[0]
        assert analyze(uniform)["gini"].item() == pytest.approx(0, abs=1e-6)
        assert analyze(one_hot)["gini"].item() == pytest.approx(-(n - 1) / n, abs=1e-6)
        assert functional.gini(one_hot).item() == pytest.approx((n - 1) / n, abs=1e-6)
    weights = torch.rand(5, 8).softmax(-1)
    torch.testing.assert_close(analyze(weights)["gini"], -functional.gini(weights), rtol=1e-4, atol=1e-6)


def test_the_other_measures_of_the_analysis_are_right() -> None:
    weights = torch.rand(5, 8).softmax(-1)
    theirs = article(ANALYSIS).analyze_attention_distribution(weights)
    torch.testing.assert_close(theirs["entropy"], functional.entropy_of(weights))
    torch.testing.assert_close(theirs["max_weight"], functional.max_weight(weights))
    torch.testing.assert_close(theirs["effective_tokens"], functional.effective_tokens(weights))


def test_their_jacobian_is_that_of_autograd_for_the_last_dimension_alone() -> None:
    gradient, x = article(GRADIENT).softmax_gradient, torch.randn(4, dtype=torch.float64)
    expected = torch.autograd.functional.jacobian(lambda x: x.softmax(-1), x)
    torch.testing.assert_close(gradient(x), expected, rtol=1e-10, atol=1e-12)
    square = torch.randn(3, 3)
    assert (gradient(square, dim=0) - functional.softmax_jacobian(square, dim=0)).abs().max() > 0.01
    assert run_of(GRADIENT).outputs[1].split("\n")[1] == (
        "RuntimeError: The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 2"
    )


def test_the_optimisation_stops_at_flash_attention() -> None:
    run = run_of(OPTIMISATION)
    assert run.failure == "NameError: name 'flash_attention' is not defined"
    assert "NameError: name 'query' is not defined" in run.complaints
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(getattr(run.names["article"], name) for name in ("query", "key", "value"))
    )
    torch.testing.assert_close(run.names["result"].output, expected, rtol=1e-5, atol=1e-6)


def test_a_learned_temperature_without_a_floor_goes_below_0_and_turns_the_order_round() -> None:
    run = run_of(ADAPTIVE)
    third = run.outputs[0].split("\n")[2]
    assert third.startswith("temperature -0.0")
    assert third.endswith("weights [1.0, 0.0, 0.0]")
    temperatures = [float(line.split()[1].rstrip(",")) for line in run.here.split("\n")]
    assert temperatures == sorted(temperatures, reverse=True)
    assert min(temperatures) > 0


def test_mixed_precision_rounds_half_precision_once_and_float64_to_float32() -> None:
    mixed = article(MIXED).mixed_precision_softmax
    x = torch.randn(50, dtype=torch.float64)
    error = (mixed(x) - x.softmax(-1)).abs().max().item()
    assert 1e-12 < error < 1e-7
    assert (functional.softmax(x) - x.softmax(-1)).abs().max().item() < 1e-15
    assert torch.equal(mixed(x.half()), x.half().float().softmax(-1).half())
