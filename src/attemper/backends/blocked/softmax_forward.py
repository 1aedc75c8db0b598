"""The forward pass: tiles of rows, blocks of keys, one law of merging."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attemper.backends.blocked.scores import (
    VANISHED,
    WEIGHED,
    block_scores,
    dropout,
    gini_rank,
    key_factors,
    mass,
    query_tile,
    surely_finite,
)
from attemper.backends.blocked.tiles import Tile, add_key_mass, empty_results, key_blocks, tiles
from attemper.backends.contract import Problem
from attemper.statistics import Column


def forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Output [B, H, Q, E], state [F, B, H, Q], key_mass [B, H, K]; what was not asked has size 0."""
    output, state, key_mass = empty_results(problem)
    careful = not surely_finite(problem)
    for index, (tile, key, value) in enumerate(tiles(problem)):
        row = _sweep(problem, tile, key, value, careful, index)
        state[(slice(None), *tile.place)] = row.state(problem, careful).view(-1, *tile.shape)
        if output.shape[3]:
            output[tile.place] = row.result(problem, tile, careful).view(*tile.shape, output.shape[3])
        if problem.key_mass:
            valid = ((row.count > 0) & ~row.bad)[..., None]
            add_key_mass(key_mass, problem, tile, torch.where(valid, row.weights(), 0.0))
    return output, state, key_mass


@dataclass
class _Rows:
    """Running sums of the rows of a tile, flat [n, R * rows]; the empty row is the identity of merging."""

    maximum: Tensor
    total: Tensor
    first_moment: Tensor
    second_moment: Tensor
    squares: Tensor
    plain_first: Tensor
    """sum d over visible keys, without weights."""
    plain_second: Tensor
    """sum d^2."""
    count: Tensor
    bad: Tensor
    weighed: dict[Column, Tensor]
    """sum e u of the columns that are sums of p u."""
    output: Tensor
    last: Tensor
    """Weights of the last block, relative to the maximum."""

    @classmethod
    def empty(cls, problem: Problem, query: Tensor, width: int) -> _Rows:
        flat = query.shape[:2]
        sums = query.new_zeros((6, *flat), dtype=problem.sum_dtype)
        count = torch.zeros(flat, dtype=torch.int64, device=query.device)
        return cls(
            maximum=query.new_full(flat, -math.inf),
            total=sums[0],
            first_moment=sums[1],
            second_moment=sums[2],
            squares=sums[3],
            plain_first=sums[4],
            plain_second=sums[5],
            count=count,
            bad=count != 0,
            weighed={column: torch.zeros_like(sums[0]) for column in WEIGHED if column in problem.columns},
            output=query.new_zeros((*flat, width)),
            last=query.new_zeros((*flat, 0)),
        )

    def raise_maximum(self, block: Tensor, rescale: bool, plain: bool) -> Tensor:
        """Takes in a block's maximum and moves every sum to it; returns the finite base to subtract from scores.

        ``plain``: whether there are sums without weights, which move by more than ``VANISHED``, too.
        """
        merged = torch.maximum(self.maximum, block)
        base = merged.masked_fill(merged == -math.inf, 0.0)
        if rescale:
            # An empty row has maximum -inf: its sums are 0, and a finite step keeps 0 * step at 0.
            step = (self.maximum - base).to(self.total.dtype).clamp_(min=VANISHED)
            shrink = step.exp()
            self.second_moment += step * (2 * self.first_moment + step * self.total)
            self.first_moment += step * self.total
            for sums in (self.total, self.first_moment, self.second_moment, *self.weighed.values()):
                sums *= shrink
            self.squares *= shrink * shrink
            if plain:
                far = (self.maximum - base).to(self.total.dtype).masked_fill_(self.count == 0, 0.0)
                self.plain_second += far * (2 * self.plain_first + far * self.count)
                self.plain_first += far * self.count
            self.output *= shrink.to(self.output.dtype)[..., None]
        self.maximum = merged
        return base

    def inverse_total(self) -> Tensor:
        return torch.where(self.total > 0, self.total, 1.0).reciprocal()

    def weights(self) -> Tensor:
        """Normalised weights of a tile that was swept in one block."""
        return self.last * self.inverse_total().to(self.last.dtype)[..., None]

    def log_total(self) -> Tensor:
        return torch.where(self.count > 0, self.total, 1.0).log()

    def result(self, problem: Problem, tile: Tile, careful: bool) -> Tensor:
        share = self.inverse_total()
        if problem.sink is not None:
            share = share * mass(problem, tile, self.maximum.to(share.dtype) + self.log_total())
        if careful:  # where every visible score is -inf, no weights are defined
            share = share.masked_fill(self.bad & (self.maximum == -math.inf), math.nan)
        return self.output * share.to(self.output.dtype)[..., None]

    def state(self, problem: Problem, careful: bool) -> Tensor:
        """The columns asked for, [columns, n, R * rows]; NaN (but the count) where a visible score is not finite."""
        inverse = self.inverse_total()
        mean = self.first_moment * inverse
        share = self.count.clamp(min=1).to(inverse.dtype).reciprocal()
        plain_mean = self.plain_first * share
        parts = {
            Column.MAXIMUM: self.maximum.to(inverse.dtype),
            Column.LOG_SUM: self.log_total(),
            Column.VISIBLE_KEYS: self.count.to(inverse.dtype),
            Column.MEAN_DEPTH: mean.neg(),
            Column.VARIANCE: (self.second_moment * inverse - mean * mean).clamp_(min=0.0),
            Column.SQUARED_WEIGHTS: self.squares * inverse * inverse,
            Column.PLAIN_DEPTH: plain_mean.neg(),
            # The largest score is at d = 0: at most a factor n cancels.
            Column.PLAIN_VARIANCE: (self.plain_second * share - plain_mean * plain_mean).clamp_(min=0.0),
        }
        parts |= {column: sums * inverse for column, sums in self.weighed.items()}
        if Column.GINI in problem.columns:
            weights = self.weights().to(inverse.dtype)
            rank = gini_rank(self.count[..., None].to(inverse.dtype), weights.shape[-1])
            parts[Column.GINI] = (weights.sort(-1).values * rank).sum(-1)
        if careful:
            parts = {
                k: part if k == Column.VISIBLE_KEYS else part.masked_fill(self.bad, math.nan)
                for k, part in parts.items()
            }
        return torch.stack([parts[column] for column in problem.columns]).to(problem.compute_dtype)


def _sweep(problem: Problem, tile: Tile, key: Tensor, value: Tensor | None, careful: bool, index: int) -> _Rows:
    query, multiplier = query_tile(problem, tile)
    query = query * multiplier
    row = _Rows.empty(problem, query, 0 if value is None else value.shape[2])
    for number, (low, high) in enumerate(key_blocks(problem, tile)):
        scores = block_scores(problem, tile, query, key, low, high, careful)
        if scores.bad is not None:
            row.bad |= scores.bad
        maximum = scores.values.amax(-1)
        base = row.raise_maximum(maximum, rescale=number > 0, plain=Column.PLAIN_VARIANCE in problem.columns)
        row.count += scores.count(tile)
        d = scores.values.sub_(base[..., None])
        if Column.PLAIN_VARIANCE in problem.columns:
            visible = d.masked_fill(d == -math.inf, 0.0).to(row.total.dtype)
            row.plain_first += visible.sum(-1)
            row.plain_second += visible.square_().sum(-1)
        if scores.visible is not None:
            d.clamp_(min=VANISHED)
        row.last = e = torch.exp(d)
        if value is not None:
            row.output.baddbmm_(dropout(problem, e, index, low), value[:, low:high], beta=float(number > 0))
        _add_sums(problem, tile, row, d, e, low, high)
    return row


def _add_sums(problem: Problem, tile: Tile, row: _Rows, d: Tensor, e: Tensor, low: int, high: int) -> None:
    """Adds a block to the sums that the columns need. ``d`` is overwritten."""
    columns = problem.columns
    row.total += e.sum(-1, dtype=row.total.dtype)
    for column, u in key_factors(problem, tile, low, high).items():
        row.weighed[column] += (tile.grid(e)[..., : u.shape[-1]] * u).sum(-1).view(tile.flat)
    if Column.SQUARED_WEIGHTS in columns:
        row.squares += (e * e).sum(-1)
    if Column.MEAN_DEPTH in columns or Column.VARIANCE in columns:
        moment = e * d
        row.first_moment += moment.sum(-1)
        if Column.VARIANCE in columns:
            row.second_moment += moment.mul_(d).sum(-1)
