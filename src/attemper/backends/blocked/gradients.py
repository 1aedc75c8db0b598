"""What both backward passes share: room for the gradients, and how those of a tile are written or added to it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attemper.backends.blocked.scores import gini_rank
from attemper.backends.blocked.tiles import Tile, region, sum_to, tiles
from attemper.backends.contract import Gradients, Problem, Upstream
from attemper.statistics import Column


def empty_gradients(problem: Problem, needs: tuple[bool, ...]) -> Gradients:
    """Zeros for ``problem.differentiable``, those that ``needs`` marks.

    Those that many tiles add to are summed in the compute type and rounded once, by the caller.
    """
    return Gradients(
        *(
            tensor.new_zeros(tensor.shape, dtype=tensor.dtype if place < 3 else problem.compute_dtype)
            if needed and tensor is not None
            else None
            for place, (needed, tensor) in enumerate(zip(needs, problem.differentiable, strict=True))
        )
    )


def without_empty_rows(problem: Problem, state: Tensor, upstream: Upstream) -> Upstream:
    """Every gradient of a row that sees nothing is exactly 0, whatever comes from above (inf times 0 would be NaN)."""
    empty = state[problem.columns.index(Column.VISIBLE_KEYS)] == 0
    return Upstream(
        upstream.output.masked_fill(empty[..., None], 0.0), upstream.state.masked_fill(empty, 0.0), upstream.key_mass
    )


class KeyGradients:
    """Key and value gradients of the chunk that is being swept, in the compute type; rounded once when written."""

    def __init__(self, place: tuple[slice, slice], key: Tensor, value: Tensor | None) -> None:
        self.place = place
        self.key = torch.zeros_like(key)
        self.value = None if value is None else torch.zeros_like(value)

    def write(self, grads: Gradients) -> None:
        for target, total in ((grads.key, self.key), (grads.value, self.value)):
            if target is not None and total is not None:
                target[self.place] = total.view(target[self.place].shape).to(target.dtype)


def tiles_with_gradients(
    problem: Problem, grads: Gradients
) -> Iterator[tuple[int, Tile, Tensor, Tensor | None, KeyGradients]]:
    """Each tile with its number, keys and values, and room for their gradients; what is complete is written."""
    chunk: KeyGradients | None = None
    for index, (tile, key, value) in enumerate(tiles(problem)):
        if chunk is None or chunk.place != (tile.batches, tile.groups):
            if chunk is not None:
                chunk.write(grads)
            chunk = KeyGradients((tile.batches, tile.groups), key, value if grads.value is not None else None)
        yield index, tile, key, value, chunk
    if chunk is not None:
        chunk.write(grads)


def add_mask_gradient(grads: Gradients, tile: Tile, gradient: Tensor, low: int, high: int) -> None:
    """Adds the gradient of scores [n, R * rows, keys] of the keys low..high to that of the mask, where it is wanted."""
    if grads.mask is not None:
        grid = tile.grid(gradient).flatten(1, 2)
        place = region(grads.mask, (*tile.place, slice(low, high)))
        grads.mask[place] += sum_to(grid, grads.mask.shape)


def write_row_gradients(grads: Gradients, tile: Tile, query_grad: Tensor, query: Tensor, multiplier: Tensor) -> None:
    """The gradient of the query, from that of the scaled query, and of its multiplier (q . dq without it)."""
    if grads.query is not None:
        grads.query[tile.place] = (query_grad * multiplier).view(*tile.shape, -1).to(grads.query.dtype)
    if grads.multiplier is not None:
        gradient = (query_grad * query).sum(-1).view(tile.shape)
        grads.multiplier[region(grads.multiplier, tile.place)] += sum_to(gradient, grads.multiplier.shape)


def gini_gradient(weights: Tensor, count: Tensor, grad: Tensor) -> Tensor:
    """The gradient of weights [n, rows, keys] that their gini coefficient brings."""
    order = weights.argsort(dim=-1, stable=True)
    rank = torch.zeros_like(weights).scatter_(-1, order, gini_rank(count, weights.shape[-1]).expand_as(weights))
    return grad * (rank - (rank * weights).sum(-1, keepdim=True))
