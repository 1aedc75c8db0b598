"""Hostile inputs, table "Temperature and schedules", as far as attention and measures go; sinks on empty rows."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attemper import InputError
from attemper import functional as F
from attemper.statistics import NAMES
from tests.support.calls import attended, had

pytestmark = [pytest.mark.each, pytest.mark.hostile, pytest.mark.usefixtures("poisoned_empty")]

H, Q, K, D = 3, 4, 6, 8
AT: dict[str, Any] = {"spans": [(1, 3)], "causal_alignment": "bottom-right"}
"""What self_weight and span_mass want of such a call."""


def tensors() -> list[Tensor]:
    return [torch.randn(1, H, n, D, requires_grad=True) for n in (Q, K, K)]


BAD = [0, 0.0, -0.0, -0.5, -math.inf, math.nan]


@pytest.mark.parametrize("temperature", BAD, ids=str)
def test_a_temperature_that_is_not_above_zero_is_refused(temperature: float):
    query, key, value = tensors()
    offsets, documents, scores = torch.tensor([0, 2, 5]), torch.randn(5, 2, 4), torch.randn(3)
    calls: dict[str, tuple[Any, ...]] = {
        "attention": (query, key, value), "attention_statistics": (query, key), "dense_weights": (query, key),
        "varlen_attention": (documents, documents, documents, offsets, offsets),
    }  # fmt: skip
    measures = ("entropy", "logit_variance", "softmax", "statistics", "softmax_jacobian")
    for name, arguments in (calls | dict.fromkeys(measures, (scores,))).items():
        with pytest.raises(InputError, match=rf"{name}\(temperature=...\) must be above 0, got .*below 1 sharpens"):
            getattr(F, name)(*arguments, temperature=temperature)


EXTREMES = [1e-30, 1e38, math.inf]


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("how", ["number", "tensor", "tensor per head"])
@pytest.mark.parametrize("temperature", EXTREMES, ids=str)
@pytest.mark.quick("reference", "blocked", "native")
def test_extreme_temperatures_give_one_hot_and_uniform_rows_and_finite_gradients(
    temperature: float, how: str, masked: bool, backend: str
):
    leaves = tensors()
    mask = torch.arange(K) != 2 if masked else None
    n = K - masked
    divisor: float | Tensor = temperature
    if how != "number":
        divisor = torch.full((1, 1, 1) if how == "tensor" else (H, 1), temperature, requires_grad=True)
        leaves.append(divisor)
    # Scores of 1e30 have a variance of 1e60, beyond float32: inf, as is told.
    names = [name for name in NAMES if not (name == "score_variance" and temperature < 1)]
    output, stats = attended(backend, *leaves[:3], mask, temperature=divisor, stats=had(backend, names), **AT)
    for name in stats:
        assert torch.isfinite(stats[name]).all(), name
    if temperature < 1:
        assert (stats.entropy == 0).all()
        assert (stats.max_weight == 1).all()
        scores = (leaves[0] @ leaves[1].mT).masked_fill(
            torch.zeros(K, dtype=torch.bool) if mask is None else ~mask, -math.inf
        )
        winner = scores.argmax(-1, keepdim=True).expand(-1, -1, -1, D)
        torch.testing.assert_close(output, leaves[2].gather(2, winner), rtol=0, atol=0)
    else:
        torch.testing.assert_close(stats.entropy, torch.full_like(stats.entropy, math.log(n)), rtol=3e-7, atol=0)
        torch.testing.assert_close(stats.max_weight, torch.full_like(stats.max_weight, 1 / n), rtol=3e-7, atol=0)
        keep = slice(None) if mask is None else mask
        torch.testing.assert_close(
            output, leaves[2][:, :, keep].mean(2, keepdim=True).expand_as(output), rtol=1e-5, atol=1e-6
        )
    for name in ("output", *(name for name in stats if stats[name].requires_grad)):
        result = output if name == "output" else stats[name]
        grads = torch.autograd.grad(result.sum(), leaves, retain_graph=True, allow_unused=True)
        for grad, place in zip(grads, ("query", "key", "value", "temperature"), strict=False):
            if (name, place) in (("lse", "temperature"), ("max_logit", "temperature"), ("mean_logit", "temperature")):
                continue  # -score / T^2 at T = 1e-30 is beyond float32 whoever computes it
            if temperature < 1 and place in ("query", "key") and name in ("lse", "max_logit", "mean_logit"):
                continue
            assert grad is None or torch.isfinite(grad).all(), f"d{name}/d{place}"


@pytest.mark.parametrize("temperature", EXTREMES, ids=str)
def test_extreme_temperatures_leave_every_measure_finite(temperature: float):
    scores = torch.tensor([[3.0, 1.0, -math.inf, 3.0], [2.0, 1.0, 0.0, -1.0]], requires_grad=True)
    entropy = F.entropy(scores, temperature=temperature)
    ties = torch.tensor([2, 1] if temperature < 1 else [3, 4])
    torch.testing.assert_close(entropy, ties.float().log(), rtol=3e-7, atol=0)
    for name, value in F.statistics(scores, temperature=temperature)._asdict().items():
        assert torch.isfinite(value).all(), name
        if value.requires_grad and name not in ("lse", "max_logit", "mean_logit"):
            (grad,) = torch.autograd.grad(value.sum(), scores, retain_graph=True)
            assert torch.isfinite(grad).all(), f"d{name}"


@pytest.mark.parametrize("temperature", [1e-30, 1e-20, 1e38, math.inf], ids=str)
def test_the_gradient_of_an_extreme_temperature_tensor_is_finite_in_the_measures(temperature: float):
    divisor = torch.tensor(temperature, requires_grad=True)
    scores = torch.tensor([3.0, 1.0, -math.inf, 2.0])
    (grad,) = torch.autograd.grad(F.entropy(scores, temperature=divisor), divisor)
    assert torch.isfinite(grad)


def test_two_keys_tied_for_the_maximum_share_it_at_low_temperature(backend: str):
    key = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.5, 0.5]])[None, None]
    _, stats = attended(backend, torch.tensor([[[[1.0, 0.0]]]]), key, key, temperature=1e-6)
    torch.testing.assert_close(stats.entropy.item(), math.log(2), rtol=2e-7, atol=0)
    assert stats.effective_tokens.item() == 2
