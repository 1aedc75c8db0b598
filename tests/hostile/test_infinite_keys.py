"""Hostile inputs: a visible key with an infinite number, whose scores are -inf though nothing hides it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import attemper
from attemper import nn
from tests.support.calls import attended

pytestmark = [pytest.mark.each, pytest.mark.hostile, pytest.mark.usefixtures("poisoned_empty")]

NORMALIZERS: dict[str, Any] = {
    "softmax": "softmax", "sparsemax": "sparsemax", "entmax15": "entmax15", "entmax": nn.Entmax(1.2),
    "topk": nn.TopK(2), "threshold": nn.Threshold(0.1), "sigmoid": nn.Sigmoid(-1.0),
}  # fmt: skip


@pytest.mark.parametrize("infinite", [5, 2], ids=["every score", "some scores"])
@pytest.mark.parametrize("rows", [3, 20])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.turns(2)
def test_scores_of_minus_infinity_are_no_mask(normalizer: str, rows: int, infinite: int, backend: str):
    """Softmax leaves such keys out as long as it has others, but on Triton; what else is computed of the row is NaN,
    gradients too.
    """
    query = (-torch.ones(1, 1, rows, 16)).requires_grad_()
    key = torch.randn(1, 1, 5, 16)
    key[..., :infinite, 0] = math.inf
    key.requires_grad_()
    value = torch.randn(1, 1, 5, 16, requires_grad=True)
    output, stats = attemper.attention(
        query, key, value, normalizer=NORMALIZERS[normalizer], stats=("entropy", "max_logit"), backend=backend
    )
    if normalizer == "softmax" and infinite < 5 and backend != "triton":
        torch.testing.assert_close(output, torch.softmax(query @ key.mT / 4, -1) @ value)
    else:
        assert output.isnan().all()
    assert stats is not None
    assert stats.entropy.isnan().all()
    assert stats.max_logit.isnan().all()
    output.sum().backward()
    assert query.grad is not None
    assert query.grad.isnan().any(-1).all()
    if backend != "reference":  # what autograd makes of it
        for grad in (key.grad, value.grad):
            assert grad is not None
            assert grad[..., infinite % 5 :, :].isnan().all()


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("keys", [5, 33])
@pytest.mark.turns(2)
def test_a_row_of_minus_infinity_touches_no_other(normalizer: str, keys: int, backend: str):
    """Causal: the first row sees the infinite key alone, and the others hide it by their bias."""
    query, value = (-torch.ones(1, 1, keys, 16)).requires_grad_(), torch.randn(1, 1, keys, 16)
    key, bias = torch.randn(1, 1, keys, 16), torch.zeros(1, 1, keys, keys)
    key[..., 0, 0] = math.inf
    bias[..., 1:, 0] = -math.inf
    bias.requires_grad_()
    output = attemper.attention(
        query, key, value, attn_mask=bias, is_causal=True, normalizer=NORMALIZERS[normalizer], backend=backend
    ).output
    output.square().sum().backward()
    assert output[:, :, 0].isnan().all()
    assert output[:, :, 1:].isfinite().all()
    assert bias.grad is not None
    assert bias.grad[:, :, 1:].isfinite().all()


@pytest.mark.quick("reference", "blocked", "native")
@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.turns(2)
def test_a_value_that_is_no_number_shows_in_every_row_that_sees_its_key(normalizer: str, number: float, backend: str):
    """Also where its weight is exactly 0, as sparse normalizers give it; statistics do not read values."""
    query, key, value = 4 * torch.randn(1, 4, 40, 16), torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 8)
    options: dict[str, Any] = {"normalizer": NORMALIZERS[normalizer], "is_causal": True, "enable_gqa": True}
    want = attended(backend, query, key, value, **options)
    value[0, 1, 30, 5] = number
    found = attended(backend, query, key, value, **options)
    changed = ~found.output.isfinite()
    assert changed[:, 2:, 30:, 5].all()
    changed[:, 2:, :, 5] = False
    assert not changed.any()
    for name in ("entropy", "max_weight"):
        torch.testing.assert_close(found.stats[name], want.stats[name], rtol=0, atol=0, equal_nan=True)
