"""The temperature of a call: with the scale it is one multiplier per query row, the only form that kernels know."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attemper.checks import FLOAT_MOST, positive_number
from attemper.errors import InputError

TEMPERATURE_ADVICE = (
    "Temperature divides the scores: below 1 sharpens, above 1 flattens. For one-hot attention use a small "
    "temperature such as 0.01; float('inf') gives uniform attention."
)
_SMALLEST = 1e-30
"""Temperatures below this may overflow the multiplier."""


def row_multiplier(where: str, query: Tensor, scale: float | None, temperature: float | Tensor) -> Tensor:
    """scale / T, [B|1, H|1, Q|1], float32 at least: what every backend multiplies scores of a row by."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    if scale is None:
        scale = 1.0 / math.sqrt(max(query.shape[3], 1))
    elif isinstance(scale, bool) or not isinstance(scale, (int, float, torch.SymFloat)) or not abs(scale) <= FLOAT_MOST:
        raise InputError(
            f"{where}(scale=...) must be a finite number or None for 1/sqrt(head size), got {scale!r:.30}."
        )
    if isinstance(temperature, Tensor):
        return divide_by_temperature(scale, _of_rows(where, temperature, query).to(dtype))
    number = positive_number(f"{where}(temperature=...)", temperature, TEMPERATURE_ADVICE, infinite=True)
    multiplier = scale / number
    if number < _SMALLEST and abs(multiplier) > torch.finfo(dtype).max:
        raise InputError(
            f"{where}(temperature=...) is {number}: scale / temperature overflows {dtype}. Use 1e-30 or more."
        )
    return torch.full((1, 1, 1), multiplier, dtype=dtype, device=query.device)


def _of_rows(where: str, temperature: Tensor, query: Tensor) -> Tensor:
    """A temperature as [B|1, H|1, Q|1]."""
    shape = query.shape[:3]
    if not temperature.dtype.is_floating_point:
        raise InputError(f"{where}(temperature=...) must be a floating tensor, got {temperature.dtype}.")
    if temperature.dim() == 1:
        raise InputError(
            f"{where}(temperature=...) has one dimension, {list(temperature.shape)}: it would act on queries, not "
            "on heads. For one temperature per head pass temperature[:, None] ([H, 1]); per query, "
            "temperature[None, None, :]."
        )
    fits = temperature.dim() <= 3 and all(
        size in (1, full) for size, full in zip(temperature.shape[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise InputError(
            f"{where}(temperature=...) must broadcast to [batch, heads, queries] = {list(shape)}, got "
            f"{list(temperature.shape)}."
        )
    return temperature.reshape((1,) * (3 - temperature.dim()) + tuple(temperature.shape))


def divide_by_temperature(x: Tensor | float, temperature: Tensor) -> Tensor:
    """x / T, with the gradient of T taken as -(dx . x / T) / T: x / T^2 would overflow at a T of 1e-20. inf gives 0."""
    fixed = temperature.detach()
    infinite = torch.isinf(fixed)
    ratio = torch.where(infinite, 1.0, fixed) / torch.where(infinite, 1.0, temperature)
    return x / fixed * ratio
