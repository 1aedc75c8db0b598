"""The inverse temperature at which a mean entropy has a wanted value where a bias lets it rise and fall."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attemper.functional.temperature_search import VANISHED, Found, Rows, rows_of

GRID = 129
"""Temperatures at which the entropy is computed before anything else."""

HALVINGS = 60

NARROWINGS = 30
"""Steps towards an extreme of the entropy between two places of the grid."""


def crossed(scores: Tensor, bias: Tensor, target: Tensor, tolerance: float) -> Found:
    """``scores`` and ``bias`` [G, M, n] float64, ``target`` [G]: one temperature for the rows of each group.

    The entropy is computed on a grid of log T that reaches from where only the largest score counts to where only the
    bias does; of its crossings of the target that nearest to T = 1 is halved down.
    """
    rows = rows_of(torch.where(bias == -math.inf, -math.inf, scores))
    rows = rows._replace(valid=rows.valid & ~_strange(bias, rows.visible))
    bias = torch.where(rows.visible, bias, 0.0)
    places = _grid(rows, bias)
    levels = torch.stack([_entropy(rows, bias, place.exp()) for place in places])
    places, levels = _with_extreme(rows, bias, target, places, levels)
    off = levels - target
    crosses = (off[:-1] > 0) != (off[1:] > 0)
    far = torch.where(crosses, (places[:-1] + places[1:]).abs() / 2, math.inf)
    chosen = torch.arange(len(crosses), device=off.device)[:, None] == far.argmin(0)
    low, high = (torch.where(chosen, part, 0.0).sum(0) for part in (places[:-1], places[1:]))
    falls = torch.where(chosen, off[:-1] > 0, False).any(0)
    nearest = places.gather(0, off.abs().argmin(0)[None])[0]
    any_row = rows.valid.any(1)
    place, steps = _halved(rows, bias, target, (low, high, falls), tolerance)
    place = torch.where(crosses.any(0), place, nearest)
    entropy = _entropy(rows, bias, place.exp())
    broken = ~any_row & rows.visible.any(-1).any(1)
    entropy = torch.where(broken, math.nan, entropy)
    reached = any_row & ((entropy - target).abs() <= tolerance)
    return torch.where(any_row, (-place).exp(), 1.0), entropy, reached, steps + len(places) + 2 * NARROWINGS


def _with_extreme(rows: Rows, bias: Tensor, target: Tensor, places: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """The grid and one place more: the extreme beside the level nearest to the target, where two crossings may hide."""
    best = (levels - target).abs().argmin(0)
    low, high = (places.gather(0, (best + step).clamp(0, GRID - 1)[None])[0] for step in (-1, 1))
    for _ in range(NARROWINGS):
        thirds = (2 * low + high) / 3, (low + 2 * high) / 3
        left, right = ((_entropy(rows, bias, place.exp()) - target).abs() for place in thirds)
        low, high = torch.where(left > right, thirds[0], low), torch.where(left > right, high, thirds[1])
    extreme = (low + high) / 2
    joined = torch.cat((places, extreme[None]))
    order = joined.argsort(0)
    return joined.gather(0, order), torch.cat((levels, _entropy(rows, bias, extreme.exp())[None])).gather(0, order)


def _strange(bias: Tensor, visible: Tensor) -> Tensor:
    return (visible & (bias.isnan() | (bias == math.inf))).any(-1)


def _grid(rows: Rows, bias: Tensor) -> Tensor:
    """[GRID, G] of log beta, ascending; 0 (T = 1) lies inside."""
    width = bias.amax(-1) - bias.amin(-1)
    gap = -rows.next_score()
    sharp = rows.most(torch.where(gap.isfinite(), (VANISHED + width) / gap, 1.0)).clamp(min=2.0)
    spread = rows.most(-rows.below.amin(-1))
    flat = torch.where(spread > 0, 1e-8 / spread, 0.5).clamp(max=0.5)
    along = torch.linspace(0, 1, GRID, dtype=bias.dtype, device=bias.device)[:, None]
    return flat.log() + along * (sharp.log() - flat.log())


def _entropy(rows: Rows, bias: Tensor, beta: Tensor) -> Tensor:
    s = torch.where(rows.visible, rows.below * beta[:, None, None] + bias, -math.inf)
    top = s.amax(-1, keepdim=True)
    s = s - torch.where(top.isfinite(), top, 0.0)
    e = s.exp()
    z = e.sum(-1).clamp(min=1.0)
    mean = (e * torch.where(e > 0, s, 0.0)).sum(-1) / z
    return rows.mean(z.log() - mean)


def _halved(
    rows: Rows, bias: Tensor, target: Tensor, bracket: tuple[Tensor, Tensor, Tensor], tolerance: float
) -> tuple[Tensor, Tensor]:
    """The place of the crossing, and the evaluations that it took."""
    low, high, falls = bracket
    steps = torch.zeros_like(target, dtype=torch.int64)
    place = (low + high) / 2
    for _ in range(HALVINGS):
        off = _entropy(rows, bias, place.exp()) - target
        going = off.abs() > tolerance / 2
        steps += going
        if not bool(going.any()):
            break
        left = (off > 0) == falls
        low, high = torch.where(left & going, place, low), torch.where(~left & going, place, high)
        place = torch.where(going, (low + high) / 2, place)
    return place, steps
