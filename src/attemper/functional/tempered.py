"""What every map from scores to weights does first: keys last, relative to the row's maximum, over temperature."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attemper.call.formulas import divided
from attemper.checks import positive_number
from attemper.errors import InputError
from attemper.functional.score_rows import ADVICE, floating, of_each_row, with_keys_last


def keys_last(where: str, scores: Tensor, dim: int) -> Tensor:
    """``scores`` in float32 at least, the dimension of the keys at the end."""
    return with_keys_last(where, floating(where, "scores", scores), dim)


def over_temperature(where: str, x: Tensor, temperature: float | Tensor) -> Tensor:
    """``x / temperature`` for finite ``x`` [..., n]: inf / T would leave 0 * inf in the gradient of T."""
    if isinstance(temperature, Tensor):
        return divided(x, of_each_row(where, temperature, x))
    divisor = positive_number(f"{where}(temperature=...)", temperature, ADVICE, infinite=True)
    return x if divisor == 1 else x / divisor


def tempered(where: str, x: Tensor, temperature: float | Tensor, *, shifted: bool = False) -> Tensor:
    """``x / temperature`` for ``x`` [..., n], -inf where hidden, up to a constant of each row.

    ``shifted``: relative to the row's maximum for certain. Else, at a temperature of 1, it is ``x``: the kernels of the
    maps subtract the maximum themselves.
    """
    one = not isinstance(temperature, Tensor) and temperature == 1 and not isinstance(temperature, bool)
    if one and not shifted:
        return x
    visible = x != -math.inf
    # Before the division, while the difference is exact: no offset of the scores costs digits. A row's own constant
    # changes no weight, so it needs no gradient.
    top = x.detach().amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(())
    below = torch.where(visible, x - torch.where(top == -math.inf, 0.0, top), 0.0)
    return torch.where(visible, over_temperature(where, below, temperature), -math.inf)


def per_row(where: str, name: str, value: float | Tensor, x: Tensor, advice: str) -> float | Tensor:
    """A number, or a tensor in the type of ``x`` [..., n] with one for each row, [...]."""
    if isinstance(value, Tensor):
        try:
            return value.to(x.dtype).expand(x.shape[:-1])
        except RuntimeError as error:
            raise InputError(
                f"{where}({name}) must be broadcastable to {list(x.shape[:-1])}, the scores without their keys, got "
                f"{list(value.shape)}. {advice}"
            ) from error
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{where}({name}) must be a number or a tensor, got {type(value).__name__}. {advice}")
    if math.isnan(value):
        raise InputError(f"{where}({name}) must be a number, got nan. {advice}")
    return float(value)


def with_broken_rows(x: Tensor, weights: Tensor) -> Tensor:
    """``weights``, but NaN in the rows of ``x`` with a visible NaN or +inf."""
    if not x.shape[-1]:
        return weights
    return torch.where(x.detach().amax(-1, keepdim=True) < math.inf, weights, math.nan)
