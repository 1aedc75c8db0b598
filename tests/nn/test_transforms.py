"""Modules inside transforms of functions: tangents of their parameters, and gradients of each sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from attemper import nn
from attemper.nn.bounds import bounded_exponential
from tests.test_transforms import EXACT, assert_near, tangent_of

# PyTorch's own, when it loads its rules for forward mode.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "learned temperature, learned alpha": lambda: {
        "temperature": nn.LearnedTemperature(2), "normalizer": nn.Entmax(1.4, learned=True),
    },
    "temperature of the input, sink": lambda: {
        "temperature": nn.ConditionalTemperature(8, 2), "normalizer": nn.Sink(2),
    },
    "length, scale": lambda: {"temperature": nn.LengthTemperature(4), "normalizer": nn.ScalableSoftmax()},
}  # fmt: skip


@pytest.mark.parametrize("parts", PARTS)
def test_attention_modules_have_tangents_and_gradients_per_sample(parts: str):
    module = nn.MultiheadAttention(8, 2, batch_first=True, **PARTS[parts]()).double()
    names, values = zip(*((name, value.detach()) for name, value in module.named_parameters()), strict=True)
    x = torch.randn(2, 5, 8, dtype=torch.float64)

    def of(x: Tensor, *values: Tensor) -> tuple[Tensor]:
        given = dict(zip(names, values, strict=True))
        return (torch.func.functional_call(module, given, (x, x, x))[0],)

    def loss(x: Tensor, *values: Tensor) -> Tensor:
        return of(x[None], *values)[0].square().sum()

    at, along = (x, *values), tuple(torch.randn_like(each) for each in (x, *values))
    # What is learned may be float32 inside, too coarse for differences: the gradient, which plain autograd vouches for
    # below, is the transpose.
    (output,), (tangent,) = torch.func.jvp(of, at, along)[:2]
    above = torch.randn_like(output)
    pulled = torch.func.vjp(of, *at)[1]((above,))
    want = sum((gradient * way).sum() for gradient, way in zip(pulled, along, strict=True))
    assert_near([(tangent * above).sum()], [want], 1e-6)
    numbers = tuple(range(1, len(at)))
    per_sample = torch.func.vmap(torch.func.grad(loss, numbers), (0, *[None] * len(values)))(*at)
    loops = [torch.func.grad(loss, numbers)(each, *values) for each in x]
    assert_near(per_sample, [torch.stack(parts) for parts in zip(*loops, strict=True)], EXACT)
    for each, loop in zip(x, loops, strict=True):
        module.zero_grad()
        module(each[None], each[None], each[None])[0].square().sum().backward()
        assert_near(loop, [dict(module.named_parameters())[name].grad for name in names], EXACT)


def test_the_bounded_exponential_has_the_tangent_of_its_values():
    raw = torch.tensor([-9.0, 0.3, 9.0, torch.nan], dtype=torch.float64)
    tangent = torch.func.jvp(lambda x: bounded_exponential(x, 0.1, 10.0), (raw,), (torch.ones_like(raw),))[1]
    assert torch.equal(tangent, torch.tensor([0.0, raw[1].exp(), 0.0, 0.0], dtype=torch.float64))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(raw, torch.ones_like(raw))
        assert torch.equal(tangent_of(bounded_exponential(dual, 0.1, 10.0)), tangent)
    curve = torch.func.jacfwd(torch.func.jacfwd(lambda x: bounded_exponential(x, 0.1, 10.0)))(raw[1])
    assert_near([curve], [raw[1].exp()], 1e-12)


def test_the_gradient_of_the_bounded_exponential_leads_back_in_transforms_too():
    raw = torch.tensor([-9.0, 0.3, 9.0])
    leaf = raw.clone().requires_grad_()
    bounded_exponential(leaf, 0.1, 10.0).sum().backward()
    found = torch.func.vmap(torch.func.grad(lambda x: bounded_exponential(x, 0.1, 10.0)))(raw)
    assert leaf.grad is not None
    assert torch.equal(found, leaf.grad)
