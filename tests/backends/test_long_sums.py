"""Sums over many keys or rows: what a float32 sum may lose by its roundings, and no more."""

from __future__ import annotations

import math

import pytest
import torch

import attemper
from attemper.nn import Entmax
from tests.support.budgets import UNIT
from tests.support.fixtures import NATIVE

pytestmark = pytest.mark.each

U = UNIT[torch.float32]
PIECE, BLOCK = 64, 256
"""Terms that one float32 sum takes in (source/multiply.h), and keys of a block (source/rows.h)."""


def lost(terms: int) -> float:
    """Six standard deviations of the relative error of a sum of so many terms, summed in pieces, blocks and in order.

    The k-th of n additions is off by u / sqrt(3) of a sum that has k / n of its size: u sqrt(n) / 3 in all. The errors
    of pieces, and of blocks, average out.
    """
    pieces, blocks = -(-terms // PIECE), -(-terms // BLOCK)
    levels = min(PIECE, terms) / pieces + min(BLOCK // PIECE, pieces) / blocks + blocks
    return 6 * U / 3 * levels**0.5 + 4 * U  # weights, 1 / Z, the product and the result: one rounding each


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("normalizer", ["softmax", "entmax15", Entmax(1.2)], ids=["softmax", "entmax15", "entmax 1.2"])
@pytest.mark.parametrize("keys", [456, 20_000])
def test_the_output_over_equal_values_is_that_value(keys: int, normalizer: object, backend: str):
    query, key = torch.randn(1, 2, 33, 16), torch.randn(1, 2, keys, 16) / 10
    for value in (0.1, 1.0, 1 / 3):
        values = torch.full((1, 1, 1, 16), value).expand(1, 2, keys, 16)
        output = attemper.attention(query, key, values, normalizer=normalizer, backend=backend).output
        error = ((output.double() - values[0, 0, 0, 0].double()) / value).abs().max().item()
        assert error <= lost(keys), f"{error:.2e}, {lost(keys):.2e} allowed"


@pytest.mark.parametrize("backend", NATIVE)
def test_the_gradient_of_a_value_that_many_rows_read_alike_is_their_sum(backend: str):
    rows, keys = 20_000, 5
    query, key = torch.zeros(1, 1, rows, 4), torch.zeros(1, 1, keys, 4)
    value = torch.zeros(1, 1, keys, 16, requires_grad=True)
    output = attemper.attention(query, key, value, backend=backend).output
    above = torch.tensor(1 / 3)
    (found,) = torch.autograd.grad(output, value, above.expand(output.shape))
    error = (found.double() / (rows / keys * above.double()) - 1).abs().max().item()
    assert error <= lost(rows), f"{error:.2e}, {lost(rows):.2e} allowed"


@pytest.mark.parametrize("backend", ["blocked", *NATIVE])
@pytest.mark.parametrize("alpha", [2.5, 3.0, 4.0])
def test_equal_keys_give_the_query_no_gradient_however_steep_entmax_is(alpha: float, backend: str):
    # The gradients of 456 equal scores add up to 0, each up to 456^(alpha - 2) times the gradient of a weight.
    query, key = torch.randn(1, 1, 33, 8, requires_grad=True), torch.randn(1, 1, 1, 8).expand(1, 1, 456, 8)
    value, bias = torch.randn(1, 1, 456, 4), torch.zeros(1, 1, 33, 456, dtype=torch.float64, requires_grad=True)
    output = attemper.attention(query, key, value, normalizer=Entmax(alpha), backend=backend).output
    (found,) = torch.autograd.grad(output.sum(), query)
    q, k, v = (tensor.detach().double() for tensor in (query, key, value))
    exact = attemper.attention(q, k, v, bias, normalizer=Entmax(alpha), backend="reference").output
    (terms,) = torch.autograd.grad(exact.sum(), bias)
    # What is left is the rounding of one term.
    budget = 2 * U * terms.abs().amax(-1, keepdim=True) * key.abs().max() / 8**0.5
    assert (found.abs() <= budget).all(), f"{(found.abs() / budget).max():.1f} times the rounding of one term"


@pytest.mark.parametrize("backend", NATIVE)
def test_visible_keys_are_exact_to_two_to_the_24_and_then_the_nearest_float32(backend: str):
    for keys, counted in {2**24: 2**24, 2**24 + 1: 2**24}.items():
        query, key = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1).expand(1, 1, keys, 1)
        stats = attemper.attention_statistics(query, key, stats=("visible_keys", "entropy"), backend=backend)
        assert stats.visible_keys.dtype == torch.int64
        assert stats.visible_keys.item() == counted
        assert math.isclose(stats.entropy.item(), math.log(keys), rel_tol=2 * U)
