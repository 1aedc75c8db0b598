"""Hostile inputs, table "Softmax alternatives", for functions of scores."""

from __future__ import annotations

import math

import pytest
import torch

from attemper import functional as F
from tests.functional.test_normalizers import NORMALIZERS
from tests.support import row_oracle as oracle

pytestmark = [
    pytest.mark.each,
    pytest.mark.turns(3),
    pytest.mark.hostile,
    pytest.mark.usefixtures("row_kernels", "poisoned_empty"),
]
SHIFTED = [name for name in NORMALIZERS if NORMALIZERS[name].shift]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NORMALIZERS)
def test_a_row_with_nothing_visible_is_0_with_a_gradient_of_0(name: str, dtype: torch.dtype):
    scores = torch.full((2, 3, 4), -math.inf, dtype=dtype)
    scores[0, 1, 2] = 1.5
    leaf = scores.clone().requires_grad_()
    temperature = torch.tensor(2.0, dtype=dtype, requires_grad=True)
    weights = NORMALIZERS[name].call(leaf, temperature=temperature)
    assert (weights[scores == -math.inf] == 0).all()
    above = torch.ones_like(weights)
    for grad in torch.autograd.grad(weights, (leaf, temperature), above, create_graph=True):
        assert grad.isfinite().all()
    (grad,) = torch.autograd.grad(weights, leaf, above)
    assert (grad[scores == -math.inf] == 0).all()


@pytest.mark.parametrize("name", SHIFTED)
@pytest.mark.parametrize("offset", [1e5, -1e5])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
def test_an_offset_of_all_scores_costs_no_digits(name: str, offset: float, temperature: float):
    # The rounding of s + c is not ours: the oracle takes the rounded scores.
    scores = torch.randn(12, 40) * 2 + offset
    got = NORMALIZERS[name].call(scores, temperature=temperature)
    want = oracle.rows(NORMALIZERS[name].oracle, (scores.double() - offset) / temperature)
    error = (got.double() - want).abs().max().item()
    assert error <= 2e-6, f"off by {error}"


@pytest.mark.parametrize("name", ["topk 3", "topk 1", "threshold", "sparsemax", "entmax15", "entmax 1.3", "entmax 3"])
@pytest.mark.parametrize("spread", [0.0, 1e-6, 1.0, 30.0])
def test_a_hundred_thousand_keys(name: str, spread: float):
    scores = torch.randn(2, 100_000) * spread
    weights = NORMALIZERS[name].call(scores)
    torch.testing.assert_close(weights.double().sum(-1), torch.ones(2).double(), rtol=0, atol=1e-6)
    if "entmax 1.3" not in name and name != "entmax 3":
        torch.testing.assert_close(
            weights.double(), oracle.rows(NORMALIZERS[name].oracle, scores), rtol=1e-4, atol=3e-7
        )


@pytest.mark.parametrize("k", [1, 2, 3, 4, 10**12])
def test_ties_at_the_border_of_top_k_go_to_the_lower_index(k: int):
    scores = torch.tensor([[1.0, 2.0, 1.0, 2.0, -math.inf, 1.0], [0.0, -0.0, 0.0, -math.inf, -math.inf, -math.inf]])
    kept = F.topk_softmax(scores, k) > 0
    order = ([1, 3, 0, 2, 5], [0, 1, 2])
    for row, places in zip(kept.tolist(), order, strict=True):
        assert [place for place in range(6) if row[place]] == sorted(places[:k])


@pytest.mark.parametrize("sink", [-math.inf, -1e4, 0.0, 1e4, math.inf])
def test_a_sink_takes_from_nothing_to_all(sink: float):
    scores = torch.tensor([[1.0, 2.0], [-math.inf, -math.inf]], requires_grad=True)
    logit = torch.tensor(sink, requires_grad=True)
    weights = F.softmax_with_sink(scores, logit)
    assert (weights[1] == 0).all()
    mass = {-math.inf: 1.0, -1e4: 1.0, 1e4: 0.0, math.inf: 0.0}.get(sink, 1 - 1 / (1 + math.e + math.e**2))
    assert weights[0].sum().item() == pytest.approx(mass, abs=1e-6)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(weights.square().sum(), (scores, logit)))


@pytest.mark.parametrize("offset", [1e5, -1e5])
def test_a_sink_far_from_0_meets_scores_far_from_0(offset: float):
    scores = torch.randn(5, 8) + offset
    got = F.softmax_with_sink(scores, offset)
    want = oracle.rows(oracle.with_sink(0.0), scores.double() - offset)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1e30, 1e38])
@pytest.mark.parametrize("name", SHIFTED)
def test_scores_near_the_ends_of_float32(name: str, scale: float):
    scores = torch.tensor([[1.0, -1.0, 0.5], [3.0, 3.0, -3.0]]) * scale
    weights = NORMALIZERS[name].call(scores)
    assert weights.isfinite().all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2), rtol=0, atol=1e-6)
    tie = [1.0, 0.0] if name == "topk 1" else [0.5, 0.5]
    if scale > 1:
        torch.testing.assert_close(weights, torch.tensor([[1.0, 0.0, 0.0], [*tie, 0.0]]), rtol=0, atol=1e-7)
