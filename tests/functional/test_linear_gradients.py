"""Derivatives of linear attention: first and second, through the state, and what they keep in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from attemper.functional import linear_attention
from tests.functional.linear_oracle import MAPS, given, levels_where_asked, quadratic  # noqa: F401

pytestmark = pytest.mark.each


def leaves(
    tokens: int, dtype: torch.dtype = torch.float64, heads: int = 2, groups: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    sizes = ((heads, 2), (groups, 2), (groups, 2))
    q, k, v = (torch.randn(1, h, tokens, size, dtype=dtype, requires_grad=True) for h, size in sizes)
    return q, k, v


def doubled(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(tensor.detach().double().requires_grad_() for tensor in (q, k, v))  # type: ignore[return-value]


def in_two_parts(name: str, mask: Tensor, causal: bool) -> Callable[..., Tensor]:
    """The output of two calls, the second with the first one's state, so that every path of a gradient is taken."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options: dict[str, Any] = {
            "feature_map": given(name), "is_causal": causal, "enable_gqa": True, "chunk_size": 2,
        }  # fmt: skip
        first = linear_attention(*(part[:, :, :2] for part in (q, k, v)), mask=mask[:, :2], **options)
        rest = (part[:, :, 2:] for part in (q, k, v))
        return torch.cat(
            (first.output, linear_attention(*rest, mask=mask[:, 2:], state=first.state, **options).output), 2
        )

    return function


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.quick("False", "exp by levels-True")
def test_first_and_second_derivatives(name: str, causal: bool, derivatives_agree: Callable[..., bool]):
    function = in_two_parts(name, torch.tensor([[True, False, True, True, True]]), causal)
    inputs = leaves(5)
    assert derivatives_agree(function, inputs)


def magnitudes(q: Tensor, k: Tensor, v: Tensor, upstream: Tensor, name: str, causal: bool) -> tuple[Tensor, ...]:
    """What each gradient is a sum of, in absolute numbers: ``|g| w (|v_j| + |o_i|) / Z``.

    Features and their derivatives are positive. A gradient is rounded relative to these, not to itself: with one key a
    gradient is 0, of terms that cancel.
    """
    phi_q, phi_k = MAPS[name](q), MAPS[name](k)
    weights = phi_q @ phi_k.mT
    weights = weights.tril() if causal else weights
    total = weights.sum(-1, keepdim=True).detach()
    total = total.masked_fill(total == 0, torch.inf)
    output = (weights @ v / total).detach().abs()
    terms = (weights @ v.abs() + weights.sum(-1, keepdim=True) * output) / total * upstream.abs()
    return tuple(grad.abs() for grad in torch.autograd.grad(terms.sum(), (q, k, v)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_gradients_in_float32_are_those_of_the_quadratic_form(name: str, causal: bool):
    tokens = 70
    inputs = leaves(tokens, torch.float32, heads=2, groups=2)
    upstream = torch.randn(1, 2, tokens, 2)
    got = torch.autograd.grad(
        linear_attention(*inputs, feature_map=given(name), is_causal=causal, chunk_size=16).output, inputs, upstream
    )
    doubles = doubled(*inputs)
    want = torch.autograd.grad(quadratic(*doubles, name, causal=causal), doubles, upstream.double())
    # No sum is longer than the tokens, and no term is rounded more than some twenty times on its way.
    roundings = (tokens + 20) * torch.finfo(torch.float32).eps / 2
    for mine, truth, size in zip(got, want, magnitudes(*doubles, upstream.double(), name, causal), strict=True):
        assert ((mine.double() - truth).abs() <= roundings * size).all()
        assert (mine != 0).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["elu", "relu", "exp"])
def test_gradients_come_in_the_type_of_the_inputs(name: str, dtype: torch.dtype):
    inputs = leaves(40, dtype)
    grads = torch.autograd.grad(
        linear_attention(*inputs, feature_map=name, is_causal=True, enable_gqa=True).output.float().sum(), inputs
    )
    doubles = doubled(*inputs)
    want = torch.autograd.grad(quadratic(*doubles, name, causal=True).sum(), doubles)
    for mine, truth in zip(grads, want, strict=True):
        assert mine.dtype == dtype
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(mine.double(), truth, rtol=unit, atol=4 * unit)


def kept_bytes(name: str, tokens: int) -> int:
    """What the forward pass keeps for the backward pass."""
    held: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    inputs = leaves(tokens, torch.float32)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = linear_attention(*inputs, feature_map=name, is_causal=True, enable_gqa=True, chunk_size=16).output
    assert output.requires_grad
    return sum(held.values())


@pytest.mark.parametrize("name", ["elu", "relu", "exp"])
def test_what_is_kept_for_the_backward_pass_grows_as_the_tokens(name: str):
    assert kept_bytes(name, 2048) < 2.1 * kept_bytes(name, 1024)
