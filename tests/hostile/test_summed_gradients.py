"""Gradients that many entries share are summed in float32 at least and rounded once, whatever type their tensor has."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.support.budgets import UNIT
from tests.support.calls import attended, packed

pytestmark = [pytest.mark.each, pytest.mark.hostile, pytest.mark.usefixtures("poisoned_empty")]

Q, K, H, D = 9, 70, 2, 8
HALVES = (torch.float16, torch.bfloat16)
SHAPES = {"one wide": (1, 1, Q, 1), "one number": (1, 1, 1, 1), "one row high": (1, 1, 1, K), "whole": (1, H, Q, K)}
TERMS = 64
"""Counted roundings of float32 in a term ds_j, relative to its largest part: scores, weight, mean and product."""


def tensors(dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(1, H, n, D).to(dtype) for n in (Q, K, K)]


def exact(given: list[Tensor], mask: Tensor, name: str, above: Tensor, normalizer: str) -> Tensor:
    """The gradient of every score, [1, H, Q, K], in float64."""
    query, key, value = (tensor.double() for tensor in given)
    bias = mask.detach().double().expand(1, H, Q, K).clone().requires_grad_()
    result = attended("reference", query, key, value, bias, normalizer=normalizer, stats=("mean_logit",))
    chosen = result.output if name == "output" else result.stats[name]
    return torch.autograd.grad(chosen, bias, above.double())[0]


def of_rounded_output(given: list[Tensor], mask: Tensor, result: Tensor, above: Tensor) -> Tensor:
    """What a softmax output that is kept in half precision adds, [1, H, Q, K]: ds = p (dP - D), D = sum dO O."""
    query, key = (tensor.double() for tensor in given[:2])
    weights = (query @ key.mT / D**0.5 + mask.detach().double()).softmax(-1)
    return weights * UNIT[result.dtype] * (above.double() * result.detach().double()).abs().sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("name", "normalizer"), [("output", "entmax15"), ("output", "softmax"), ("mean_logit", "softmax")]
)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_gradient_of_a_half_mask_is_summed_before_it_is_rounded(
    dtype: torch.dtype, shape: str, name: str, normalizer: str, backend: str
):
    given, mask = tensors(dtype), torch.randn(SHAPES[shape]).to(dtype).requires_grad_()
    result = attended(backend, *given, mask, normalizer=normalizer, stats=("mean_logit",))
    chosen = result.output if name == "output" else result.stats[name]
    above = 8 * torch.randn(chosen.shape).to(chosen.dtype)
    (found,) = torch.autograd.grad(chosen, mask, above)
    terms = exact(given, mask, name, above, normalizer)
    want = terms.sum_to_size(mask.shape)
    budget = TERMS * UNIT[torch.float32] * terms.abs().sum_to_size(mask.shape) + UNIT[dtype] * want.abs()
    if (name, normalizer) == ("output", "softmax"):
        budget += of_rounded_output(given, mask, chosen, above).sum_to_size(mask.shape)
    error = (found.double() - want).abs()
    assert found.dtype == dtype
    assert (error <= budget).all(), f"error {(error / budget).max():.1f} times the budget"


def test_a_half_mask_one_wide_hides_what_it_hides_when_it_is_as_wide_as_the_keys(backend: str):
    for dtype in HALVES:
        least = torch.finfo(dtype).min
        column = torch.tensor([least, 0.0, -1e4, least / 2, least / 4], dtype=dtype)[:, None]
        given = [torch.randn(1, 1, n, 4).to(dtype) for n in (5, 6, 6)]
        one = attended(backend, *given, column.clone().requires_grad_())
        wide = attended(backend, *given, column.expand(5, 6).contiguous())
        assert one.stats.visible_keys[0, 0].tolist() == [0, 6, 6, 0, 6]
        assert torch.equal(one.output, wide.output)
        for name in wide.stats:
            assert torch.equal(one.stats[name], wide.stats[name]), name


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_gradient_of_a_half_sink_is_summed_over_documents_before_it_is_rounded(dtype: torch.dtype, backend: str):
    # Each document adds -1: in bfloat16, 256 of them and one more are 256.
    documents = 24 if backend == "triton" else 300
    offsets = torch.arange(documents + 1)
    query, key = (torch.zeros(documents, 1, 4).to(dtype) for _ in range(2))
    value = torch.ones(documents, 1, 4).to(dtype)
    sink = torch.zeros(1, dtype=dtype, requires_grad=True)
    output = packed(backend, query, key, value, offsets, offsets, max_seqlen_q=1, max_seqlen_k=1, sink_logits=sink)
    (found,) = torch.autograd.grad(output.output, sink, torch.ones_like(output.output))
    # -(1 - mass) D of every row, mass = 1/2 and D = 4 mass.
    assert math.isclose(found.item(), -documents, rel_tol=2 * UNIT[dtype])
