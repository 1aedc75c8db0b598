"""A positive number from any parameter: exp inside bounds, with gradients that can always lead back."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attemper.functional.onnx import exports_to_onnx


def bounded_exponential(raw: Tensor, low: float, high: float) -> Tensor:
    r""":math:`\min(\max(e^{raw}, low), high)`, whose parameter cannot be lost.

    Beyond a bound the gradient is 0 in the direction that leads further out and exp's at the bound in the other, so an
    optimizer that overshot comes back, where a plain clamp would hold it for ever. A gradient that is not finite counts
    as 0: an infinite step would take the parameter where no later step could fetch it.

    Args:
        raw: floating, any value; NaN is treated as 0, which gives 1 where that is within the bounds.
        low: above 0.
        high: above ``low``.

    Returns:
        In the shape and type of ``raw``, finite, within the bounds.
    """
    if exports_to_onnx():
        return _inside(raw, math.log(low), math.log(high)).exp()  # no gradient is asked for there
    return _bounded(raw, math.log(low), math.log(high))


@torch.library.custom_op("attemper::bounded_exponential", mutates_args=())
def _bounded(raw: Tensor, low: float, high: float) -> Tensor:
    return _inside(raw, low, high).exp()


@_bounded.register_fake
def _(raw: Tensor, low: float, high: float) -> Tensor:
    return torch.empty_like(raw)


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


_bounded.register_autograd(_backward, setup_context=_remember)


def _inside(raw: Tensor, low: float, high: float) -> Tensor:
    return torch.where(raw.isnan(), 0.0, raw).clamp(low, high)
