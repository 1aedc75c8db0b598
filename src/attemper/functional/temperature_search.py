r"""Bracketed Newton for the inverse temperature at which a mean entropy has a wanted value, without bias.

Two inequalities give a bracket without searching. With R the range of the scores and d the target's distance below
log n, Hoeffding's lemma on KL(p || uniform) says ``d <= beta^2 R^2 / 8``. With e the distance above log m (m tied
keys) and g the gap to the next score, a weight rho outside the tied keys costs at most
``rho (1 + log n + log 1/rho)``, and has ``rho <= (n - m) / m * exp(-beta g)``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

MOST = 60
"""Evaluations after which a row is given up. None has been seen to need more than 25."""

VANISHED = 50.0
"""exp(-50) of a weight is nothing beside a tolerance of 1e-7, whatever the number of keys."""

Found = tuple[Tensor, Tensor, Tensor, Tensor]
"""Temperature, entropy, whether reached, and evaluations, each [groups]."""


class Rows(NamedTuple):
    """Scores relative to each row's maximum, and what follows from them at once. [G, M, n] and [G, M]."""

    below: Tensor
    visible: Tensor
    valid: Tensor
    log_keys: Tensor
    log_ties: Tensor

    def of(self, groups: Tensor) -> Rows:
        return Rows(*(part[groups] for part in self))

    def mean(self, values: Tensor) -> Tensor:
        """Over the valid rows of each group, [G]; 0 where there are none."""
        return torch.where(self.valid, values, 0.0).sum(1) / self.valid.sum(1).clamp(min=1)

    def next_score(self) -> Tensor:
        """The largest score below each row's maximum, relative to it; -inf where all are tied. [G, M]."""
        return torch.where(self.visible & (self.below < 0), self.below, -math.inf).amax(-1)

    def most(self, values: Tensor) -> Tensor:
        return torch.where(self.valid, values, -math.inf).amax(1)


def rows_of(scores: Tensor) -> Rows:
    """``scores`` [G, M, n] float64, -inf where hidden."""
    visible = scores != -math.inf
    top = scores.amax(-1, keepdim=True)
    valid = visible.any(-1) & top[..., 0].isfinite() & ~scores.isnan().any(-1)
    below = torch.where(visible & valid[..., None], scores - torch.where(valid[..., None], top, 0.0), 0.0)
    ties = ((below == 0) & visible).sum(-1).clamp(min=1)
    return Rows(below, visible, valid, visible.sum(-1).clamp(min=1).double().log(), ties.double().log())


def entropy_at(rows: Rows, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Mean entropy and mean Var_p(beta y) of each group at its inverse temperature, [G]."""
    x = torch.where(rows.visible, rows.below * beta[:, None, None], -math.inf)
    e = x.exp()
    z = e.sum(-1)
    x = torch.where(e > 0, x, 0.0)
    mean = (e * x).sum(-1) / z.clamp(min=1.0)
    variance = (e * (x - mean[..., None]).square()).sum(-1) / z.clamp(min=1.0)
    return rows.mean(z.clamp(min=1.0).log() - mean), rows.mean(variance)


def bracketed(scores: Tensor, target: Tensor, tolerance: float) -> Found:
    """``scores`` [G, M, n] float64, ``target`` [G]: one temperature for the rows of each group."""
    rows = rows_of(scores)
    lowest, highest = rows.mean(rows.log_ties), rows.mean(rows.log_keys)
    answer = _limits(rows, lowest, highest, target, tolerance)
    inside = ((target > lowest + tolerance) & (target < highest - tolerance) & rows.valid.any(1)).nonzero()[:, 0]
    if inside.numel():
        some = rows.of(inside)
        solved = _solved(some, lowest[inside], highest[inside], target[inside], tolerance)
        for part, values in zip(answer, solved, strict=True):
            part[inside] = values
    return answer


def _limits(rows: Rows, lowest: Tensor, highest: Tensor, target: Tensor, tolerance: float) -> Found:
    """The answers for targets at or beyond the limits, without a search."""
    gap = rows.next_score()
    least = torch.where(rows.valid & gap.isfinite(), -gap, math.inf).amin(1)
    sharp = torch.where(least.isfinite(), least / VANISHED, 1.0)
    high = target >= (lowest + highest) / 2
    temperature = torch.where(high & least.isfinite(), math.inf, sharp)
    entropy = torch.where(high, highest, lowest)
    any_row = rows.valid.any(1)
    broken = ~any_row & (rows.visible.any(-1).any(1))
    entropy = torch.where(broken, math.nan, torch.where(any_row, entropy, 0.0))
    temperature = torch.where(any_row, temperature, 1.0)
    reached = any_row & ((entropy - target).abs() <= tolerance)
    return temperature, entropy, reached, torch.ones_like(reached, dtype=torch.int64)


def _bounds(rows: Rows, lowest: Tensor, highest: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log beta from, to, and a first guess: that of a normal distribution of scores, ``log n - H = beta^2 Var / 2``."""
    counts, ties = rows.log_keys.exp(), rows.log_ties.exp()
    deficit, excess = highest - target, target - lowest
    spread = rows.mean(rows.below.amin(-1).square())
    low = (8 * deficit / spread).sqrt()
    rho = excess[:, None] / (2 * (1 + torch.log1p(1 / excess[:, None]) + rows.log_keys))
    gap = -rows.next_score()
    others = (counts - ties).clamp(min=1)
    high = rows.most(torch.where(gap.isfinite(), ((others / (ties * rho)).log() / gap).clamp(min=0), 0.0))
    high = torch.maximum(high, low * 1.0001)
    mean = rows.below.sum(-1) / counts
    away = torch.where(rows.visible, rows.below - mean[..., None], 0.0)
    guess = (2 * deficit / rows.mean(away.square().sum(-1) / counts)).sqrt()
    return low.log(), high.log(), guess.log().clamp(low.log(), high.log())


def _solved(rows: Rows, lowest: Tensor, highest: Tensor, target: Tensor, tolerance: float) -> Found:
    low, high, place = _bounds(rows, lowest, highest, target)
    wanted = (highest - target).log() - (target - lowest).log()
    groups = torch.arange(len(target), device=target.device)
    # log beta from, to and at; width of the bracket and distance in phi two steps ago; entropy.
    state = torch.stack((low, high, place, high - low, torch.full_like(low, math.inf), torch.zeros_like(low)))
    left = rows
    evaluations = torch.zeros_like(groups)
    for step in range(MOST):
        at = state[:, groups]
        entropy, variance = entropy_at(left, at[2].exp())
        evaluations[groups] += 1
        state[5, groups] = entropy
        going = (entropy - target[groups]).abs() > tolerance
        if not bool(going.any()):
            break
        if not bool(going.all()):
            kept = going.nonzero()[:, 0]
            groups, left, at, entropy, variance = (
                groups[kept],
                left.of(kept),
                at[:, kept],
                entropy[kept],
                variance[kept],
            )
        flat = entropy > target[groups]
        low, high = torch.where(flat, at[2], at[0]), torch.where(flat, at[1], at[2])
        above = (highest[groups] - entropy).clamp(min=1e-300)
        beyond = (entropy - lowest[groups]).clamp(min=1e-300)
        need = wanted[groups] - above.log() + beyond.log()
        place = at[2] + _newton(need, variance * (1 / above + 1 / beyond))
        halve = ~((place > low) & (place < high))
        if step % 2 == 0:  # Newton's steps must earn their keep: in two of them half of the way, or of the bracket.
            halve |= (high - low > at[3] / 2) & (need.abs() > at[4] / 2)
            at[3], at[4] = high - low, need.abs()
        state[:5, groups] = torch.stack((low, high, torch.where(halve, (low + high) / 2, place), at[3], at[4]))
    reached = (state[5] - target).abs() <= tolerance
    return (-state[2]).exp(), state[5], reached, evaluations


def _newton(need: Tensor, slope: Tensor) -> Tensor:
    """The step in log beta that moves phi by ``need``, phi = 2 u + c e^u + const with the slope it has here.

    Where the slope is below 2 (scores in far clusters), phi is taken as linear.
    """
    bend = (slope - 2).clamp(min=0.0)
    rising = torch.minimum(need / 2, torch.log1p(need.clamp(min=0.0) / bend.clamp(min=1e-30)))
    step = torch.where(need > 0, rising, need / slope)
    for _ in range(6):
        step = step - (2 * step + bend * torch.expm1(step) - need) / (2 + bend * step.exp())
    return torch.where(slope > 2, step, need / slope)
