"""A positive number from any parameter: exp inside bounds, with gradients that can always lead back."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attemper.call import transforms
from attemper.call.operator import LIBRARY, operator
from attemper.call.transforms import exports_to_onnx


def bounded_exponential(raw: Tensor, low: float, high: float) -> Tensor:
    r""":math:`\min(\max(e^{raw}, low), high)`, with a gradient that leads back from beyond a bound.

    Beyond a bound the gradient is 0 in the direction that leads further out, and that of exp at the bound in the other.
    So a parameter that overshot comes back; under a plain clamp it would stay outside for ever. A gradient that is not
    finite counts as 0: after an infinite step no later step could bring the parameter back.

    Args:
        raw: floating, any value; NaN is treated as 0, which gives 1 where that is within the bounds.
        low: above 0.
        high: above ``low``.

    Returns:
        In the shape and type of ``raw``, finite, within the bounds.
    """
    if exports_to_onnx():
        return _inside(raw, math.log(low), math.log(high)).exp()  # no gradient is asked for there
    return _exponential(raw, math.log(low), math.log(high))


@operator("bounded_exponential(Tensor raw, float low, float high) -> Tensor", lambda raw, *_: torch.empty_like(raw))
def _clamp_exp(raw: Tensor, low: float, high: float) -> Tensor:
    return _inside(raw, low, high).exp()


def _remember(ctx: Any, inputs: tuple[Tensor, float, float], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.bounds = inputs[1:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (raw,) = ctx.saved_tensors
    low, high = ctx.bounds
    grad = torch.where(grad.isfinite(), grad, 0.0) * _inside(raw, low, high).exp()
    # Descent moves against the gradient: at the upper bound a negative one would lead further out.
    outward = ((raw >= high) & (grad < 0)) | ((raw <= low) & (grad > 0))
    return torch.where(outward, 0.0, grad), None, None


torch.library.register_autograd("attemper::bounded_exponential", _backward, setup_context=_remember, lib=LIBRARY)


def _tangent(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
    """That of the numbers: 0 beyond a bound."""
    (raw,) = ctx.saved_tensors
    low, high = ctx.bounds
    return tangent * torch.where((raw >= low) & (raw <= high), _inside(raw, low, high).exp(), 0.0)


def _vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, Any]:
    return _exponential(*args), in_dims[0]


_nestable = transforms.nestable(_clamp_exp, _remember, _backward, _tangent, _vmap)


def _exponential(raw: Tensor, low: float, high: float) -> Tensor:
    if transforms.active():
        return _nestable(raw, low, high)
    transforms.refuse_in_graph("A learned number")
    return torch.ops.attemper.bounded_exponential(raw, low, high)


def _inside(raw: Tensor, low: float, high: float) -> Tensor:
    return torch.where(raw.isnan(), 0.0, raw).clamp(low, high)
