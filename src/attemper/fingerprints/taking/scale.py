"""The scale of an attention whose engine did not save it, fitted to what it did save: final scores, or outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attemper.backends import reference
from attemper.backends.contract import Problem
from attemper.call.sampling import pick

ROUNDING = 1e-4
"""A fit counts if what it leaves is so small beside what it is fitted to."""
_ROWS = 32
"""Rows of a sequence that a fit reads."""
_STEPS = 40


def fit_scores(
    raw: Tensor, scores: Tensor, softcap: float | None, scale: float | None, usual: float
) -> tuple[Tensor, Tensor]:
    """Final scores as scale times q.k and what is added to it.

    Args:
        raw, scores: q.k and the final scores, [B, H, Q, K] float64. Hidden ones are -inf, or as low as masks make them.
        scale: None: it is fitted, for each row by itself where that explains all.
        usual: the scale that is taken where no fit explains the scores.

    Returns:
        The scale of each row, [B, H, Q], and the mask: bool where nothing is added, else numbers, -inf where hidden.
    """
    seen = scores > -1e30
    x, final = torch.where(seen, raw, 0.0), torch.where(seen, scores, 0.0)
    y = final if not softcap else softcap * torch.atanh((final / softcap).clamp(-1 + 1e-12, 1 - 1e-12))
    of_rows = _scale_of_rows(x, y) if scale is None else torch.full(x.shape[:3], scale, dtype=torch.float64)
    if of_rows is None:
        fitted = None if softcap else _scale_beside(x, y, seen)
        of_rows = torch.full(x.shape[:3], usual if fitted is None else fitted, dtype=torch.float64)
    product = of_rows[..., None] * x
    added = final - (product if not softcap else softcap * torch.tanh(product / softcap))
    if float(torch.where(seen, added, 0.0).abs().max()) <= ROUNDING * float(final.abs().max()):
        return of_rows, seen
    return of_rows, torch.where(seen, added, -torch.inf)


def _scale_of_rows(x: Tensor, y: Tensor) -> Tensor | None:
    """Scale of each row, [B, H, Q], where it explains all; rows whose products are all 0 have that of the others."""
    scale = _least_squares(y, [x], torch.ones_like(x), rows=True)[..., 0]
    known = torch.isfinite(scale) & (scale > 0)
    scale = torch.where(known, scale, 0.0)
    if float(((y - scale[..., None] * x) ** 2).sum()) > ROUNDING**2 * float((y * y).sum()) or not bool(known.any()):
        return None
    middle = scale[known].median()
    if float((scale[known] / middle - 1).abs().median()) < ROUNDING:
        return torch.full_like(scale, float(_least_squares(y, [x], torch.ones_like(x))))
    return torch.where(known, scale, middle)


def _scale_beside(x: Tensor, y: Tensor, seen: Tensor) -> float | None:
    """One scale of all rows, beside numbers that are added to few scores or grow with distance; None where that does
    not explain most scores.

    Least absolute differences, by weighted least squares; a row's own number is taken off.
    """
    rows = torch.linspace(0, x.shape[2] - 1, min(_ROWS, x.shape[2])).round().long().unique()
    x, y, seen = (part[0][:, rows] for part in (x, y, seen))
    places = (rows[:, None] - torch.arange(x.shape[2])).abs().double().expand_as(x)
    weight, size = seen.double(), float(y[seen].std())
    scale, rest = 0.0, y
    for _ in range(_STEPS):
        one, two, far = (_less_mean(part, weight) for part in (x, y, places))
        scale, slope = _least_squares(two, [one, far], weight).tolist()
        if not math.isfinite(scale + slope):
            return None
        rest = (two - scale * one - slope * far).abs()
        weight = seen / (rest + 1e-9 * size)
    fits = float(rest[seen].median()) <= ROUNDING * size and scale > 0
    return scale if fits else None


def _least_squares(y: Tensor, columns: Sequence[Tensor], weight: Tensor, *, rows: bool = False) -> Tensor:
    """The numbers c, [columns], or [..., columns] of each of the ``rows``, that make the sum of weight (y - sum c x)^2
    least; not finite where the columns do not tell them.
    """
    axes = (-1,) if rows else tuple(range(y.dim()))

    def inner(one: Tensor, other: Tensor) -> Tensor:
        return (weight * one * other).sum(axes)

    products = torch.stack([torch.stack([inner(one, other) for other in columns], -1) for one in columns], -2)
    right = torch.stack([inner(one, y) for one in columns], -1)
    found, failed = torch.linalg.solve_ex(products, right[..., None])
    return torch.where(failed[..., None] == 0, found[..., 0], torch.nan)


def _less_mean(values: Tensor, weight: Tensor) -> Tensor:
    return values - (weight * values).sum(-1, keepdim=True) / weight.sum(-1, keepdim=True).clamp(min=1e-300)


def fit_output(problem: Problem, value: Tensor, output: Tensor) -> float | None:
    """By how much to multiply the scale of a call so that its weights give its outputs; None where nothing does.

    Args:
        problem: of one sequence.
        value: [G, K, E].
        output: [H, Q, E].
    """
    rows = torch.linspace(0, output.shape[1] - 1, min(_ROWS, output.shape[1])).round().long().unique()
    picked, wanted = pick(problem, rows), output[:, rows].double()
    value = value.double().repeat_interleave(output.shape[0] // value.shape[0], 0)
    plain, size = picked.multiplier.double(), float((wanted**2).sum())

    def rest_of(power: float) -> float:
        picked.multiplier = plain * 2.0**power
        return float(((reference.weights(picked)[0] @ value - wanted) ** 2).sum()) / max(size, 1e-300)

    powers = torch.linspace(-4, 4, 33).tolist()
    place = min(range(len(powers)), key=lambda number: rest_of(powers[number]))
    power = _least(rest_of, powers[max(place - 1, 0)], powers[min(place + 1, len(powers) - 1)])
    return 2.0**power if rest_of(power) <= ROUNDING**2 else None


def _least(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function with one minimum between two numbers has it, by golden sections."""
    part = (math.sqrt(5) - 1) / 2
    for _ in range(_STEPS):
        first, second = high - part * (high - low), low + part * (high - low)
        if function(first) < function(second):
            high = second
        else:
            low = first
    return (low + high) / 2
