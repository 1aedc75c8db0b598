"""Attention by normalizers that need all keys of a row (docs/design/0008): a tile holds all keys that its rows can see.

Forward, per tile: scores, weights, then statistics and the product with values. Backward computes scores and weights of
a tile anew; with g the gradient of a weight, W = sum w and p = w / W::

    g = dO.v + g_w + (b - sum p b) / W
    b = -g_h (log p + 1) + 2 g_c p - g_a d + g_v (s - mu)^2 + g_f 1[first] + g_t distance + g_g rank + g_p 1[argmax]
    ds = normalizer'(g) + p (2 g_v (s - mu) - g_a) + 1[argmax] (g_m + g_a)

``backends/normalizers`` has the weights and normalizer', the gradient of scores from that of weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

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
    Scores,
    block_scores,
    dropout,
    gini_rank,
    key_factors,
    query_tile,
    surely_finite,
)
from attemper.backends.blocked.tiles import Tile, add_key_mass, empty_results, tiles
from attemper.backends.contract import Gradients, Problem, Upstream
from attemper.backends.normalizers import NORMALIZERS
from attemper.statistics import Column


def forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Output [B, H, Q, E], state [F, B, H, Q], key_mass [B, H, K]; what was not asked has size 0."""
    output, state, key_mass = empty_results(problem)
    careful = not surely_finite(problem)
    for index, (tile, key, value) in enumerate(tiles(problem)):
        low, high = tile.keys
        if low == high:
            continue
        row = _Rows.of(problem, tile, *query_tile(problem, tile), key, careful)
        state[(slice(None), *tile.place)] = row.state().view(-1, *tile.shape)
        if value is not None:
            applied = dropout(problem, row.weights, index, low)
            result = torch.bmm(applied, value[:, low:high])
            output[tile.place] = result.view(*tile.shape, output.shape[3]).to(output.dtype)
        if problem.key_mass:
            valid = (row.count > 0) & ~row.bad
            add_key_mass(key_mass, problem, tile, torch.where(valid[..., None], row.shares(), 0.0))
    return output, state, key_mass


def backward(problem: Problem, output: Tensor, state: Tensor, upstream: Upstream, needs: tuple[bool, ...]) -> Gradients:
    """Gradients for ``problem.differentiable``, those that ``needs`` marks."""
    del output
    grads = empty_gradients(problem, needs)
    above = without_empty_rows(problem, state, upstream)
    careful = not surely_finite(problem)
    for index, tile, key, value, chunk in tiles_with_gradients(problem, grads):
        if tile.keys[0] < tile.keys[1]:
            query, multiplier = query_tile(problem, tile)
            rows = _Rows.of(problem, tile, query, multiplier, key, careful)
            gradient = _score_gradient(rows, _weight_gradient(rows, value, index, above, chunk), above, grads)
            if grads.key is not None:
                low, high = tile.keys
                by_key = gradient.to(query.dtype).transpose(1, 2)
                chunk.key[:, low:high].baddbmm_(by_key, query * multiplier)
            if grads.query is not None or grads.multiplier is not None:
                query_grad = torch.bmm(gradient, key[:, slice(*tile.keys)].to(gradient.dtype))
                write_row_gradients(grads, tile, query_grad, query, multiplier)
    return grads


@dataclass
class _Rows:
    """The rows of a tile against their keys, flat [n, R * rows, keys] or [n, R * rows]."""

    problem: Problem
    tile: Tile
    scores: Scores
    maximum: Tensor
    d: Tensor
    """Scores relative to the maximum; -inf where hidden."""
    weights: Tensor
    count: Tensor
    bad: Tensor

    @classmethod
    def of(cls, problem: Problem, tile: Tile, query: Tensor, multiplier: Tensor, key: Tensor, careful: bool) -> _Rows:
        scores = block_scores(problem, tile, query * multiplier, key, *tile.keys, careful)
        maximum = scores.values.amax(-1, keepdim=True)
        d = scores.values - maximum.masked_fill(maximum == -math.inf, 0.0)
        w = _weights(problem, scores.values, _per_head(problem, tile))
        count = torch.as_tensor(scores.count(tile), device=d.device).expand(tile.flat)
        bad = torch.zeros_like(count, dtype=torch.bool) if scores.bad is None else scores.bad
        if careful:
            w = w.masked_fill(bad[..., None], math.nan)
        return cls(problem, tile, scores, maximum[..., 0], d, w, count, bad)

    def total(self) -> Tensor:
        """W, [n, R * rows], in the type of sums."""
        return self.weights.sum(-1, dtype=self.problem.sum_dtype)

    def shares(self) -> Tensor:
        """p = w / W; 0 where no key has weight."""
        total = self.total().to(self.d.dtype)[..., None]
        return self.weights / torch.where(total == 0, 1.0, total)

    def deviations(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """d where a key has weight (0 elsewhere), and d - sum p d."""
        inside = torch.where(p != 0, self.d, 0.0)
        mean = (p * inside).sum(-1, dtype=self.problem.sum_dtype).to(p.dtype)
        return inside, inside - mean[..., None]

    def plain_deviations(self) -> Tensor:
        """Scores less their mean over visible keys, without weights; 0 where hidden."""
        hidden = self.d == -math.inf
        d = self.d.masked_fill(hidden, 0.0).to(self.problem.sum_dtype)
        return (d - (d.sum(-1) / self.count.clamp(min=1))[..., None]).masked_fill_(hidden, 0.0)

    def score_variance(self) -> Tensor:
        return self.plain_deviations().square_().sum(-1) / self.count.clamp(min=1)

    def _sum_with(self, p: Tensor, u: Tensor) -> Tensor:
        tile = self.tile
        return (tile.grid(p)[..., : u.shape[-1]] * u).sum(-1, dtype=self.problem.sum_dtype).view(tile.flat)

    def state(self) -> Tensor:
        """The columns asked for, [columns, n, R * rows]; NaN (but the count) where a visible score is not finite."""
        problem, tile, p = self.problem, self.tile, self.shares()
        wide = problem.sum_dtype
        inside, deviation = self.deviations(p)
        low, high = tile.keys
        parts = {
            Column.MAXIMUM: lambda: self.maximum,
            Column.VISIBLE_KEYS: lambda: self.count,
            # Nothing is left for backward: it finds the same weights again.
            Column.THRESHOLD: lambda: torch.zeros_like(self.maximum),
            Column.MASS: self.total,
            Column.SUPPORT: lambda: (p > 0).sum(-1),
            Column.LARGEST_WEIGHT: lambda: p.amax(-1),
            Column.MEAN_DEPTH: lambda: -(p * inside).sum(-1, dtype=wide),
            Column.ENTROPY: lambda: 0.0 - (p * torch.where(p > 0, p, 1.0).log()).sum(-1, dtype=wide),
            Column.VARIANCE: lambda: (p * deviation * deviation).sum(-1, dtype=wide),
            Column.SQUARED_WEIGHTS: lambda: (p * p).sum(-1, dtype=wide),
            Column.PLAIN_VARIANCE: self.score_variance,
            Column.GINI: lambda: (p.sort(-1).values * gini_rank(self.count[..., None].to(p.dtype), p.shape[-1])).sum(
                -1
            ),
        }
        for column, u in key_factors(problem, tile, low, high).items():
            parts[column] = partial(self._sum_with, p, u)
        found_parts = []
        for column in problem.columns:
            part = parts[column]().to(problem.compute_dtype)
            if column not in (Column.MAXIMUM, Column.VISIBLE_KEYS):
                part = part.masked_fill(self.count == 0, 0.0)
            found_parts.append(part if column == Column.VISIBLE_KEYS else part.masked_fill(self.bad, math.nan))
        return torch.stack(found_parts)


def _weights(problem: Problem, scores: Tensor, per_head: Tensor | None) -> Tensor:
    """Of scores [n, R * rows, keys], -inf where hidden."""
    each = None if per_head is None else per_head.reshape(-1)
    return NORMALIZERS[problem.normalizer].weights(scores.flatten(0, 1), problem.number, each).view(scores.shape)


def _per_head(problem: Problem, tile: Tile) -> Tensor | None:
    """What is given per head, for each row of the tile, [n, R * rows]."""
    if problem.per_head is None:
        return None
    values = problem.per_head[tile.heads].to(problem.compute_dtype)[None, :, None].expand(tile.shape)
    return values.reshape(tile.flat)


def _upstream(rows: _Rows, above: Upstream) -> dict[Column, Tensor]:
    """The gradients of the state of a tile's rows by column, [n, R * rows, 1]."""
    tile = rows.tile
    columns = enumerate(rows.problem.columns)
    return {column: above.state[i][tile.place].reshape(*tile.flat, 1) for i, column in columns}


def _weight_gradient(rows: _Rows, value: Tensor | None, index: int, above: Upstream, chunk: KeyGradients) -> Tensor:
    """g, the gradient of weights; adds the tile's part of the value gradient."""
    problem, tile = rows.problem, rows.tile
    low, high = tile.keys
    g = _statistics_gradient(problem, rows, _upstream(rows, above), above)
    if value is None:
        return g
    upstream = above.output[tile.place].to(problem.compute_dtype).reshape(*tile.flat, -1)
    if chunk.value is not None:
        chunk.value[:, low:high].baddbmm_(dropout(problem, rows.weights, index, low).transpose(1, 2), upstream)
    return g + dropout(problem, torch.bmm(upstream, value[:, low:high].transpose(1, 2)), index, low)


def _score_gradient(rows: _Rows, g: Tensor, above: Upstream, grads: Gradients) -> Tensor:
    """The gradient of the products q.k; adds the tile's part of those of the mask and of what is given per head."""
    problem, tile = rows.problem, rows.tile
    normalizer, per_head = NORMALIZERS[problem.normalizer], _per_head(problem, tile)
    weights, upstream = rows.weights, g
    if normalizer.wide is not None and normalizer.wide(weights, per_head):
        weights, upstream = weights.to(problem.sum_dtype), g.to(problem.sum_dtype)
    gradient = normalizer.gradient(weights, upstream, 0.0, per_head)
    if grads.per_head is not None and per_head is not None and normalizer.per_head_gradient is not None:
        each = normalizer.per_head_gradient(rows.weights, g, gradient, per_head)
        grads.per_head[tile.heads] += torch.where(rows.count > 0, each, 0.0).view(tile.shape).sum((0, 2))
    gradient = _with_direct(problem, rows, gradient, _upstream(rows, above))
    add_mask_gradient(grads, tile, gradient, *tile.keys)
    softcap = rows.scores.softcap_gradient
    return gradient if softcap is None else gradient * softcap


def _statistics_gradient(problem: Problem, rows: _Rows, grad: dict[Column, Tensor], above: Upstream) -> Tensor:
    """The gradient of weights that the statistics bring, g_w + (b - sum p b) / W."""
    p, tile = rows.shares(), rows.tile
    inside, deviation = rows.deviations(p)
    low, high = tile.keys
    b = torch.zeros_like(p)
    if Column.ENTROPY in grad:
        b -= grad[Column.ENTROPY] * torch.where(p > 0, p, 1.0).log()
    if Column.SQUARED_WEIGHTS in grad:
        b += 2 * grad[Column.SQUARED_WEIGHTS] * p
    if Column.MEAN_DEPTH in grad:
        b -= grad[Column.MEAN_DEPTH] * inside
    if Column.VARIANCE in grad:
        b += grad[Column.VARIANCE] * deviation * deviation
    for column, u in key_factors(problem, tile, low, high).items():
        tile.grid(b)[..., : u.shape[-1]].add_(tile.grid(grad[column]) * u)
    if Column.GINI in grad:
        b += gini_gradient(p, rows.count[..., None].to(p.dtype), grad[Column.GINI])
    if problem.key_mass:
        upstream = above.key_mass[tile.batches, tile.heads].to(b.dtype)
        tile.grid(b).add_(upstream.unflatten(1, (-1, problem.repeats)).unsqueeze(3)[..., low:high])
    if Column.LARGEST_WEIGHT in grad and problem.maximum_gradient:
        b.scatter_add_(-1, rows.scores.values.argmax(-1, keepdim=True), grad[Column.LARGEST_WEIGHT])
    total = rows.total().to(b.dtype)[..., None]
    g = torch.where(total == 0, 0.0, (b - (p * b).sum(-1, keepdim=True)) / torch.where(total == 0, 1.0, total))
    return g + grad[Column.MASS] if Column.MASS in grad else g


def _with_direct(problem: Problem, rows: _Rows, gradient: Tensor, grad: dict[Column, Tensor]) -> Tensor:
    """Adds what statistics owe to the scores themselves: means, variances and maximum."""
    if Column.MEAN_DEPTH in grad or Column.VARIANCE in grad:
        p = rows.shares()
        if Column.MEAN_DEPTH in grad:
            gradient = gradient - grad[Column.MEAN_DEPTH] * p
        if Column.VARIANCE in grad:
            gradient = gradient + 2 * grad[Column.VARIANCE] * p * rows.deviations(p)[1]
    if Column.PLAIN_VARIANCE in grad:
        share = rows.plain_deviations() / rows.count.clamp(min=1)[..., None]
        gradient = gradient + 2 * grad[Column.PLAIN_VARIANCE] * share.to(gradient.dtype)
    if problem.maximum_gradient or Column.MEAN_DEPTH in grad:
        at_maximum = grad[Column.MAXIMUM] + grad.get(Column.MEAN_DEPTH, 0.0)
        gradient = gradient.scatter_add(-1, rows.scores.values.argmax(-1, keepdim=True), at_maximum.to(gradient.dtype))
    return gradient
