"""Scores along one dimension, relative to their maximum: what measures, maps and solvers share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attemper.call.formulas import VANISHED, at_most, divided, log_count
from attemper.checks import positive_number, refuse_nested
from attemper.errors import InputError

ADVICE = "Temperature divides the scores: below 1 sharpens, above 1 flattens."


def floating(where: str, name: str, tensor: Tensor) -> Tensor:
    """``tensor`` in float32 at least."""
    refuse_nested(where, {name: tensor})
    if not isinstance(tensor, Tensor) or not tensor.dtype.is_floating_point:
        came = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise InputError(f"{where}({name}) must be a floating tensor, got {came}.")
    if tensor.dim() == 0:
        raise InputError(f"{where}({name}) must have a dimension of keys, got a tensor without dimensions.")
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def with_keys_last(where: str, tensor: Tensor, dim: int) -> Tensor:
    """``tensor`` with the dimension of the keys at the end."""
    count = tensor.dim()
    if isinstance(dim, bool) or not isinstance(dim, int) or not -count <= dim < count:
        raise InputError(
            f"{where}(dim=...) must be an int from {-count} to {count - 1} for a tensor {list(tensor.shape)}, got "
            f"{dim!r}. It is the dimension of the keys."
        )
    return tensor.movedim(dim, -1)


def of_each_row(where: str, temperature: Tensor, x: Tensor) -> Tensor:
    """``temperature`` in the type of ``x``, whose keys are last: one for each row, [..., 1]."""
    try:
        return temperature.to(x.dtype).expand(x.shape[:-1])[..., None]
    except RuntimeError as error:
        raise InputError(
            f"{where}(temperature) must be broadcastable to {list(x.shape[:-1])}, the scores without their keys, got "
            f"{list(temperature.shape)}. {ADVICE}"
        ) from error


class ScoreRow:
    """Scores along the last dimension, relative to their maximum: everything that the measures share."""

    def __init__(self, x: Tensor, temperature: Tensor | float) -> None:
        visible = x != -math.inf
        # Hidden scores are taken out before anything touches them: inf / T would leave 0 * inf in the gradient of T.
        s = torch.where(visible, x, 0.0)
        self.count = visible.sum(-1)
        self.seen = self.count > 0
        largest = _maximum(torch.where(visible, s, -math.inf), s)
        self.maximum = _over(largest[..., None], temperature).squeeze(-1)
        # The maximum is part of the graph, though it cancels in entropy and variance: the gradient of the largest score
        # is then minus the sum of the others, exact where float32 would keep no digit of it (a row such as [20, 0, 0]).
        # Scores of 1e5 that differ by 1 keep every digit if what is divided is their distance. Where that is so large
        # that exp is 0 it no longer counts, and neither its quotient nor its square must overflow.
        distance = torch.where(visible, s - largest[..., None], 0.0)
        self.d = _over(_within(distance, temperature), temperature)
        e = torch.where(visible, torch.exp(self.d), 0.0)
        total = torch.where(self.seen, e.sum(-1), 1.0)
        self.weights = e / total[..., None]
        self.log_total = total.log()
        self.mean = (self.weights * self.d).sum(-1)

    @classmethod
    def of(cls, where: str, scores: Tensor, dim: int, temperature: float | Tensor) -> ScoreRow:
        x = with_keys_last(where, floating(where, "scores", scores), dim)
        if isinstance(temperature, Tensor):
            return cls(x, of_each_row(where, temperature, x))
        return cls(x, positive_number(f"{where}(temperature=...)", temperature, ADVICE, infinite=True))

    @property
    def entropy(self) -> Tensor:
        """Both terms are >= 0: no cancellation, however sharp the row."""
        return at_most(self.log_total - self.mean, log_count(self.count.to(self.d.dtype)))

    @property
    def variance(self) -> Tensor:
        return (self.weights * (self.d - self.mean[..., None]) ** 2).sum(-1)


def _within(distance: Tensor, temperature: Tensor | float) -> Tensor:
    """``distance`` <= 0, at least VANISHED temperatures and the lowest number."""
    lowest = torch.finfo(distance.dtype).min
    if isinstance(temperature, Tensor):
        return torch.maximum(distance, (VANISHED * temperature.detach()).clamp(min=lowest))
    return distance.clamp(min=max(VANISHED * temperature, lowest))


def _over(x: Tensor, temperature: Tensor | float) -> Tensor:
    return divided(x, temperature) if isinstance(temperature, Tensor) else x / temperature


def _maximum(hidden: Tensor, s: Tensor) -> Tensor:
    """The largest visible score; among ties the gradient goes to the lowest index. 0 where nothing is visible."""
    if hidden.shape[-1] == 0:
        return s.new_zeros(s.shape[:-1])
    return s.gather(-1, hidden.argmax(-1, keepdim=True)).squeeze(-1)
