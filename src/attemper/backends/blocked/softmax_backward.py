"""The backward pass: scores recomputed tile by tile, the gradient of every smooth statistic in the same sweep."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attemper.backends.blocked.scores import (
    VANISHED,
    block_scores,
    distance,
    dropout,
    first_keys,
    gini_rank,
    mass,
    query_tile,
)
from attemper.backends.blocked.softmax_forward import surely_finite
from attemper.backends.blocked.tiles import Tile, key_blocks, region, sum_to, tiles
from attemper.backends.contract import Gradients, Problem, Upstream


def backward(problem: Problem, output: Tensor, state: Tensor, upstream: Upstream, needs: tuple[bool, ...]) -> Gradients:
    """Gradients for ``problem.differentiable``, those that ``needs`` marks."""
    grads = Gradients(
        *(
            # Those that many tiles add to are summed in the compute type and rounded once, by the caller.
            tensor.new_zeros(tensor.shape, dtype=tensor.dtype if place < 3 else problem.compute_dtype)
            if needed and tensor is not None
            else None
            for place, (needed, tensor) in enumerate(zip(needs, problem.differentiable, strict=True))
        )
    )
    above = silence_empty_rows(problem, state, upstream)
    dot = (above.output.to(problem.compute_dtype) * output).sum(-1)
    careful = not surely_finite(problem)
    held: Held | None = None
    for index, (tile, key, value) in enumerate(tiles(problem)):
        if held is None or held.place != (tile.batches, tile.groups):
            if held is not None:
                held.write(grads)
            held = Held((tile.batches, tile.groups), key, value if grads.value is not None else None)
        rows = _RowTerms(problem, tile, state, above, dot)
        query, multiplier = query_tile(problem, tile)
        query_grad = _sweep(problem, rows, query * multiplier, key, value, careful, index, grads, held)
        _write_rows(grads, rows, query_grad, query, multiplier)
    if held is not None:
        held.write(grads)
    return grads


def silence_empty_rows(problem: Problem, state: Tensor, upstream: Upstream) -> Upstream:
    """Every gradient of a row that sees nothing is exactly 0, whatever comes from above (inf times 0 would be NaN)."""
    empty = state[problem.fields.index("n")] == 0
    return Upstream(
        upstream.output.masked_fill(empty[..., None], 0.0), upstream.state.masked_fill(empty, 0.0), upstream.key_mass
    )


class Held:
    """Key and value gradients of the chunk that is being swept, in the compute type; rounded once when written."""

    def __init__(self, place: tuple[slice, slice], key: Tensor, value: Tensor | None) -> None:
        self.place = place
        self.key = torch.zeros_like(key)
        self.value = None if value is None else torch.zeros_like(value)

    def write(self, grads: Gradients) -> None:
        for target, total in ((grads.key, self.key), (grads.value, self.value)):
            if target is not None and total is not None:
                target[self.place] = total.view(target[self.place].shape).to(target.dtype)


class _RowTerms:
    """State and upstream gradients of a tile's rows, flat [n, R * rows, 1], and the terms that are constant along
    a row.
    """

    def __init__(self, problem: Problem, tile: Tile, state: Tensor, above: Upstream, dot: Tensor) -> None:
        self.tile, self.problem = tile, problem
        place = tile.place
        self.state = {letter: self._flat(state[i][place]) for i, letter in enumerate(problem.fields)}
        self.grad = {letter: self._flat(above.state[i][place]) for i, letter in enumerate(problem.fields)}
        self.output = above.output[place].to(problem.compute_dtype).reshape(*tile.flat, -1)
        self.key_mass = above.key_mass[tile.batches, tile.heads] if problem.key_mass else above.key_mass
        self.dot = self._flat(dot[place])
        maximum = self.state["m"]
        self.base = maximum.masked_fill(maximum == -math.inf, 0.0)
        self.mass = None
        if problem.sink is not None:
            lse = maximum.to(problem.sum_dtype) + self.state["z"].to(problem.sum_dtype)
            self.mass = mass(problem, tile, lse[..., 0]).to(maximum.dtype)[..., None]
        self.constant = self._constant()

    def _flat(self, values: Tensor) -> Tensor:
        return values.reshape(*self.tile.flat, 1)

    def _constant(self) -> Tensor:
        state, grad = self.state, self.grad
        constant = grad["z"] - (self.dot if self.mass is None else self.mass * self.dot)
        for letter in "vft":
            if letter in grad:
                constant = constant - grad[letter] * state[letter]
        if "a" in grad:
            constant = constant - grad["a"]
        if "c" in grad:
            constant = constant - 2 * grad["c"] * state["c"]
        return constant

    def at_maximum(self) -> Tensor:
        """What falls on the row's maximum alone: 0 if only shift-free quantities such as entropy are differentiated."""
        return self.grad["m"] - self.grad["z"] + self.grad.get("a", 0.0) + self.grad.get("u", 0.0)

    def without_weights(self, d: Tensor) -> Tensor | None:
        """What falls on every visible key alike, whatever its weight; None if nothing does."""
        if "y" not in self.grad:
            return None
        count = self.state["n"].clamp(min=1.0)
        slope = (2 * self.grad["y"] * (d + self.state["u"]) - self.grad["u"]) / count
        return slope.masked_fill_(d == -math.inf, 0.0)


def _sweep(
    problem: Problem, rows: _RowTerms, query: Tensor, key: Tensor, value: Tensor | None, careful: bool, index: int,
    grads: Gradients, held: Held,
) -> Tensor:  # fmt: skip
    """Adds a tile to the gradients of keys, values and mask; returns the gradient of the scaled query."""
    query_grad = torch.zeros_like(query)
    winner = _winner(problem, rows, query, key, careful)
    for low, high in key_blocks(problem, rows.tile):
        scores = block_scores(problem, rows.tile, query, key, low, high, careful)
        d = scores.values.sub_(rows.base)
        plain = rows.without_weights(d)
        # Masked keys, and scores so far below that their square would overflow: their weight is 0 either way.
        d.clamp_(min=VANISHED)
        weights = torch.exp(d - rows.state["z"])
        slope = rows.constant.expand_as(d).clone()
        if value is not None:
            slope += _value_slope(problem, rows, weights, value, low, high, index, held)
        _add_statistics(problem, rows, slope, d, weights, low, high)
        slope *= weights
        if plain is not None:
            slope += plain
        if winner is not None:
            inside = (winner >= low) & (winner < high)
            share = torch.where(inside, rows.at_maximum(), 0.0)
            slope.scatter_add_(-1, (winner - low).clamp(0, high - low - 1), share)
        if grads.mask is not None:
            grid = rows.tile.grid(slope).flatten(1, 2)
            place = region(grads.mask, (*rows.tile.place, slice(low, high)))
            grads.mask[place] += sum_to(grid, grads.mask.shape)
        if scores.slope is not None:
            slope *= scores.slope
        query_grad.baddbmm_(slope, key[:, low:high])
        if grads.key is not None:
            held.key[:, low:high].baddbmm_(slope.transpose(1, 2), query)
    return query_grad


def _winner(problem: Problem, rows: _RowTerms, query: Tensor, key: Tensor, careful: bool) -> Tensor | None:
    """Where the maximum of each row stands, [n, R * rows, 1], the lowest index among ties; None if no gradient
    falls there.
    """
    if not problem.maximum_gradient or (query.device.type == "cpu" and not rows.at_maximum().any()):
        return None
    best = query.new_full(rows.tile.flat, -math.inf)
    winner = torch.zeros(rows.tile.flat, dtype=torch.int64, device=query.device)
    for low, high in key_blocks(problem, rows.tile):
        top, place = block_scores(problem, rows.tile, query, key, low, high, careful).values.max(-1)
        winner = torch.where(top > best, place + low, winner)
        best = torch.maximum(best, top)
    return winner[..., None]


def _value_slope(
    problem: Problem, rows: _RowTerms, weights: Tensor, value: Tensor, low: int, high: int, index: int, held: Held
) -> Tensor:
    """mass dP of a block; adds the block's part of the value gradient."""
    applied = weights if rows.mass is None else weights * rows.mass
    if held.value is not None:
        held.value[:, low:high].baddbmm_(dropout(problem, applied, index, low).transpose(1, 2), rows.output)
    slope = dropout(problem, torch.bmm(rows.output, value[:, low:high].transpose(1, 2)), index, low)
    return slope if rows.mass is None else slope.mul_(rows.mass)


def _add_statistics(
    problem: Problem, rows: _RowTerms, slope: Tensor, d: Tensor, weights: Tensor, low: int, high: int
) -> None:
    """Adds to ``slope`` what differs from key to key in the gradients of the statistics. ``d`` is overwritten."""
    grad, tile = rows.grad, rows.tile
    if "c" in grad:
        slope += 2 * grad["c"] * weights
    if "f" in grad:
        tile.grid(slope).add_(tile.grid(grad["f"]) * first_keys(problem, tile, low, high))
    if "t" in grad:
        tile.grid(slope).add_(tile.grid(grad["t"]) * distance(problem, tile, low, high))
    if problem.key_mass:
        upstream = rows.key_mass.to(slope.dtype).unflatten(1, (-1, problem.repeats)).unsqueeze(3)
        mean = (tile.grid(weights) * upstream).sum(-1, keepdim=True)
        tile.grid(slope).add_(upstream - mean)
    if "g" in grad:
        slope += gini_slope(weights, rows.state["n"], grad["g"])
    if "a" in grad:
        # -g_a X + g_v (X^2 + 2 X) = X * line, with X = d + a
        x = d.add_(rows.state["a"])
        line = -grad["a"] if "v" not in grad else x * grad["v"] + (2 * grad["v"] - grad["a"])
        slope.addcmul_(x, line.expand_as(x))


def gini_slope(weights: Tensor, count: Tensor, grad: Tensor) -> Tensor:
    order = weights.argsort(dim=-1, stable=True)
    rank = torch.zeros_like(weights).scatter_(-1, order, gini_rank(count, weights.shape[-1]).expand_as(weights))
    return grad * (rank - (rank * weights).sum(-1, keepdim=True))


def _write_rows(grads: Gradients, rows: _RowTerms, query_grad: Tensor, query: Tensor, multiplier: Tensor) -> None:
    """Row gradients: of the query, of its multiplier (q . dq without it), of the sink logit (-(1 - mass) D)."""
    tile = rows.tile
    if grads.query is not None:
        grads.query[tile.place] = (query_grad * multiplier).view(*tile.shape, -1).to(grads.query.dtype)
    if grads.multiplier is not None:
        gradient = (query_grad * query).sum(-1).view(tile.shape)
        grads.multiplier[region(grads.multiplier, tile.place)] += sum_to(gradient, grads.multiplier.shape)
    if grads.sink is not None and rows.mass is not None:
        grads.sink[tile.heads] += ((rows.mass - 1) * rows.dot).view(tile.shape).sum((0, 2))
