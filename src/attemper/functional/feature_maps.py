"""Feature maps of linear attention: what stands for a query or a key so that their product is never negative."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attemper.checks import did_you_mean
from attemper.errors import InputError

FeatureMap = str | Callable[[Tensor], Tensor]
"""A name of ``NAMES``, or a function from [B, heads, tokens, D] to [B, heads, tokens, F] of numbers of 0 or more."""

NAMES = ("elu", "relu", "exp")


def checked_map(where: str, feature_map: FeatureMap) -> FeatureMap:
    """``feature_map`` if it is one of the names or can be called.

    Raises:
        InputError: it is neither.
    """
    if callable(feature_map):
        return feature_map
    if feature_map not in NAMES:
        names = ", ".join(map(repr, NAMES))
        raise InputError(
            f"{where}(feature_map=...) must be one of {names}, or a function from [B, heads, tokens, D] to "
            f"[B, heads, tokens, F] that gives no negative number; got {feature_map!r}."
            f"{did_you_mean(feature_map, NAMES)}"
        )
    return feature_map


def elu_plus_one(x: Tensor) -> Tensor:
    """``elu(x) + 1``: x + 1 above 0, e^x below, with every digit of the latter (``F.elu(x) + 1`` rounds it to 6e-8)."""
    return x.clamp(max=0).exp() + x.relu()


def given_features(where: str, feature_map: Callable[[Tensor], Tensor], tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """What the caller's function makes of ``tensor``, in ``dtype``. It is given the tensor as it came.

    Raises:
        InputError: it gave no floating tensor [B, heads, tokens, F], or a negative feature (where it can be looked at,
            as :func:`refuse_signed` says).
    """
    found = feature_map(tensor)
    expected = tuple(tensor.shape[:3])
    if not isinstance(found, Tensor) or found.dim() != 4 or tuple(found.shape[:3]) != expected:
        came = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise InputError(
            f"{where}(feature_map=...) must give a tensor [{', '.join(map(str, expected))}, features] for "
            f"{list(tensor.shape)}, got {came}."
        )
    if not found.dtype.is_floating_point:
        raise InputError(f"{where}(feature_map=...) must give floating numbers, got {found.dtype}.")
    return refuse_signed(where, found.to(dtype))


def refuse_signed(where: str, found: Tensor) -> Tensor:
    """``found``, if no feature is negative; NaN in place of those that are, where they cannot be looked at.

    Raises:
        InputError: a feature is negative.
    """
    negative = found < 0
    if readable(found) and bool(negative.any()):
        raise InputError(
            f"{where}(feature_map=...) gave negative features (the lowest is {float(found.min()):.3g}): weights would "
            "be negative, and their sum can be 0 or change its sign. Use a map that gives 0 or more, such as "
            f"softplus, or a softmax over the features; built in: {', '.join(map(repr, NAMES))}."
        )
    return found.masked_fill(negative, torch.nan)


def readable(tensor: Tensor) -> bool:
    """Whether to look at a number costs nothing: it does not wait for a device, nor break a graph."""
    transformed = torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]
    return tensor.device.type == "cpu" and not (transformed or torch.compiler.is_compiling())
