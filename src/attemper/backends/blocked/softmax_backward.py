"""The backward pass: scores recomputed tile by tile, the gradient of every smooth statistic in the same sweep."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attemper.backends.blocked.gradients import (
    KeyGradients,
    add_mask_gradient,
    empty_gradients,
    gini_gradient,
    tiles_with_gradients,
    without_empty_rows,
    write_row_gradients,
)
from attemper.backends.blocked.scores import (
    VANISHED,
    WEIGHED,
    Scores,
    block_scores,
    dropout,
    key_factors,
    mass,
    query_tile,
    surely_finite,
)
from attemper.backends.blocked.tiles import Tile, key_blocks
from attemper.backends.contract import Gradients, Problem, Upstream
from attemper.statistics import Column


def backward(problem: Problem, output: Tensor, state: Tensor, upstream: Upstream, needs: tuple[bool, ...]) -> Gradients:
    """Gradients for ``problem.differentiable``, those that ``needs`` marks."""
    grads = empty_gradients(problem, needs)
    above = without_empty_rows(problem, state, upstream)
    dot = (above.output.to(problem.compute_dtype) * output).sum(-1)
    careful = not surely_finite(problem)
    for index, tile, key, value, chunk in tiles_with_gradients(problem, grads):
        rows = _RowTerms(problem, tile, state, above, dot)
        query, multiplier = query_tile(problem, tile)
        block = _Block(problem, rows, query * multiplier, key, value, careful, index)
        write_row_gradients(grads, tile, _sweep(block, grads, chunk), query, multiplier)
        if grads.sink is not None and rows.mass is not None:
            # -(1 - mass) D
            grads.sink[tile.heads] += ((rows.mass - 1) * rows.dot).view(tile.shape).sum((0, 2))
    return grads


class _RowTerms:
    """State and upstream gradients of a tile's rows, flat [n, R * rows, 1], and the terms that are constant along
    a row.
    """

    def __init__(self, problem: Problem, tile: Tile, state: Tensor, above: Upstream, dot: Tensor) -> None:
        self.tile, self.problem = tile, problem
        place = tile.place
        self.state = {column: self._flat(state[i][place]) for i, column in enumerate(problem.columns)}
        self.grad = {column: self._flat(above.state[i][place]) for i, column in enumerate(problem.columns)}
        self.output = above.output[place].to(problem.compute_dtype).reshape(*tile.flat, -1)
        self.key_mass = above.key_mass[tile.batches, tile.heads] if problem.key_mass else above.key_mass
        self.dot = self._flat(dot[place])
        maximum = self.state[Column.MAXIMUM]
        self.base = maximum.masked_fill(maximum == -math.inf, 0.0)
        self.mass = None
        if problem.sink is not None:
            lse = maximum.to(problem.sum_dtype) + self.state[Column.LOG_SUM].to(problem.sum_dtype)
            self.mass = mass(problem, tile, lse[..., 0]).to(maximum.dtype)[..., None]
        self.constant = self._constant()

    def _flat(self, values: Tensor) -> Tensor:
        return values.reshape(*self.tile.flat, 1)

    def _constant(self) -> Tensor:
        state, grad = self.state, self.grad
        constant = grad[Column.LOG_SUM] - (self.dot if self.mass is None else self.mass * self.dot)
        for column in (Column.VARIANCE, *WEIGHED):
            if column in grad:
                constant = constant - grad[column] * state[column]
        if Column.MEAN_DEPTH in grad:
            constant = constant - grad[Column.MEAN_DEPTH]
        if Column.SQUARED_WEIGHTS in grad:
            constant = constant - 2 * grad[Column.SQUARED_WEIGHTS] * state[Column.SQUARED_WEIGHTS]
        return constant

    def at_maximum(self) -> Tensor:
        """What falls on the row's maximum alone: 0 if only shift-free quantities such as entropy are differentiated."""
        return (
            self.grad[Column.MAXIMUM]
            - self.grad[Column.LOG_SUM]
            + self.grad.get(Column.MEAN_DEPTH, 0.0)
            + self.grad.get(Column.PLAIN_DEPTH, 0.0)
        )

    def without_weights(self, d: Tensor) -> Tensor | None:
        """What falls on every visible key alike, whatever its weight; None if nothing does."""
        if Column.PLAIN_VARIANCE not in self.grad:
            return None
        count = self.state[Column.VISIBLE_KEYS].clamp(min=1.0)
        gradient = (
            2 * self.grad[Column.PLAIN_VARIANCE] * (d + self.state[Column.PLAIN_DEPTH]) - self.grad[Column.PLAIN_DEPTH]
        ) / count
        return gradient.masked_fill_(d == -math.inf, 0.0)


@dataclass(frozen=True)
class _Block:
    """What a tile is swept with."""

    problem: Problem
    rows: _RowTerms
    query: Tensor
    """Scaled."""
    key: Tensor
    value: Tensor | None
    careful: bool
    index: int
    """The number of the tile, for dropout."""

    def scores(self, low: int, high: int) -> Scores:
        return block_scores(self.problem, self.rows.tile, self.query, self.key, low, high, self.careful)


def _sweep(block: _Block, grads: Gradients, chunk: KeyGradients) -> Tensor:
    """Adds a tile to the gradients of keys, values and mask; returns the gradient of the scaled query."""
    problem, rows, query, key = block.problem, block.rows, block.query, block.key
    query_grad = torch.zeros_like(query)
    winner = _winner(block)
    for low, high in key_blocks(problem, rows.tile):
        scores = block.scores(low, high)
        d = scores.values.sub_(rows.base)
        plain = rows.without_weights(d)
        # Masked keys, and scores so far below that their square would overflow: their weight is 0 either way.
        d.clamp_(min=VANISHED)
        weights = torch.exp(d - rows.state[Column.LOG_SUM])
        gradient = rows.constant.expand_as(d).clone()
        if block.value is not None:
            gradient += _value_gradient(block, weights, block.value, low, high, chunk)
        _add_statistics(problem, rows, gradient, d, weights, low, high)
        gradient *= weights
        if plain is not None:
            gradient += plain
        if winner is not None:
            inside = (winner >= low) & (winner < high)
            share = torch.where(inside, rows.at_maximum(), 0.0)
            gradient.scatter_add_(-1, (winner - low).clamp(0, high - low - 1), share)
        add_mask_gradient(grads, rows.tile, gradient, low, high)
        if scores.softcap_gradient is not None:
            gradient *= scores.softcap_gradient
        query_grad.baddbmm_(gradient, key[:, low:high])
        if grads.key is not None:
            chunk.key[:, low:high].baddbmm_(gradient.transpose(1, 2), query)
    return query_grad


def _winner(block: _Block) -> Tensor | None:
    """Where the maximum of each row stands, [n, R * rows, 1], the lowest index among ties; None if no gradient
    falls there.
    """
    problem, rows, query = block.problem, block.rows, block.query
    if not problem.maximum_gradient or (query.device.type == "cpu" and not rows.at_maximum().any()):
        return None
    best = query.new_full(rows.tile.flat, -math.inf)
    winner = torch.zeros(rows.tile.flat, dtype=torch.int64, device=query.device)
    for low, high in key_blocks(problem, rows.tile):
        top, place = block.scores(low, high).values.max(-1)
        winner = torch.where(top > best, place + low, winner)
        best = torch.maximum(best, top)
    return winner[..., None]


def _value_gradient(block: _Block, weights: Tensor, value: Tensor, low: int, high: int, chunk: KeyGradients) -> Tensor:
    """mass dP of a block; adds the block's part of the value gradient."""
    problem, rows, index = block.problem, block.rows, block.index
    applied = weights if rows.mass is None else weights * rows.mass
    if chunk.value is not None:
        chunk.value[:, low:high].baddbmm_(dropout(problem, applied, index, low).transpose(1, 2), rows.output)
    gradient = dropout(problem, torch.bmm(rows.output, value[:, low:high].transpose(1, 2)), index, low)
    return gradient if rows.mass is None else gradient.mul_(rows.mass)


def _add_statistics(
    problem: Problem, rows: _RowTerms, gradient: Tensor, d: Tensor, weights: Tensor, low: int, high: int
) -> None:
    """Adds to ``gradient`` what differs from key to key in the gradients of the statistics. ``d`` is overwritten."""
    grad, tile = rows.grad, rows.tile
    if Column.SQUARED_WEIGHTS in grad:
        gradient += 2 * grad[Column.SQUARED_WEIGHTS] * weights
    for column, u in key_factors(problem, tile, low, high).items():
        tile.grid(gradient)[..., : u.shape[-1]].add_(tile.grid(grad[column]) * u)
    if problem.key_mass:
        upstream = rows.key_mass.to(gradient.dtype).unflatten(1, (-1, problem.repeats)).unsqueeze(3)
        mean = (tile.grid(weights) * upstream).sum(-1, keepdim=True)
        tile.grid(gradient).add_(upstream - mean)
    if Column.GINI in grad:
        gradient += gini_gradient(weights, rows.state[Column.VISIBLE_KEYS], grad[Column.GINI])
    if Column.MEAN_DEPTH in grad:
        # -g_a X + g_v (X^2 + 2 X) = X * line, with X = d + a
        x = d.add_(rows.state[Column.MEAN_DEPTH])
        a, v = grad[Column.MEAN_DEPTH], grad.get(Column.VARIANCE)
        line = -a if v is None else x * v + (2 * v - a)
        gradient.addcmul_(x, line.expand_as(x))
