"""One block of scores: products, softcap, bias, masks, and what else forward and backward both need of a tile."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attemper.backends.blocked.tiles import Tile, row_bounds, row_positions
from attemper.backends.contract import UNBOUNDED, Problem
from attemper.statistics import Column

VANISHED = -1000.0
"""exp(VANISHED) is 0 in float32 and float64: a masked key's distance from the maximum, finite so that 0 times it is 0.
"""


@dataclass
class Scores:
    """Scores of a tile against a block of keys, flat [n, R * rows, keys], and what is known of them."""

    values: Tensor
    visible: Tensor | None
    """[b|1, g|1, R|1, rows|1, keys] bool, or None where every key is visible."""
    bad: Tensor | None
    """[n, R * rows] bool: a visible score is not finite; None where that cannot be."""
    softcap_gradient: Tensor | None
    """Of the softcap, or None."""

    def count(self, tile: Tile) -> Tensor | int:
        """Visible keys of each row in this block, [n, R * rows] or one number for all."""
        if self.visible is None:
            return self.values.shape[-1]
        count = self.visible.sum(-1)
        return count.expand(tile.grid(self.values).shape[:4]).reshape(tile.flat)


def query_tile(problem: Problem, tile: Tile) -> tuple[Tensor, Tensor]:
    """Rows of the tile [n, R * rows, D] in the compute type, and their multiplier [n, R * rows, 1]."""
    query = problem.query[tile.place].to(problem.compute_dtype)
    multiplier = problem.multiplier.expand(problem.query.shape[:3])[tile.place].to(query.dtype)
    return query.reshape(*tile.flat, query.shape[3]), multiplier.reshape(*tile.flat, 1)


def block_scores(
    problem: Problem, tile: Tile, query: Tensor, key: Tensor, low: int, high: int, careful: bool
) -> Scores:
    """Scores against keys low..high, masked ones at -inf. ``query`` already carries scale / T.

    A careful block keeps what stands at masked keys (NaN, inf) out of the row, and tells which rows have a visible
    score that is not finite. Where no score can overflow, adding -inf does the same at a fifth of the cost.
    """
    values = torch.bmm(query, key[:, low:high].transpose(1, 2))
    gradient = None
    if problem.softcap > 0:
        values.div_(problem.softcap).tanh_()
        gradient = 1 - values * values
        values.mul_(problem.softcap)
    bias = _bias(problem, tile, low, high, values.dtype)
    visible = None if bias is None else bias != -math.inf
    grid = tile.grid(values)
    if not careful:
        if bias is not None:
            grid.add_(bias)
        return Scores(values, visible, None, gradient)
    if bias is not None and visible is not None:
        hidden = ~visible
        grid.masked_fill_(hidden, 0.0).add_(bias.masked_fill(hidden, 0.0))
        bad = ~torch.isfinite(values).all(-1)
        grid.masked_fill_(hidden, -math.inf)
        return Scores(values, visible, bad, gradient)
    return Scores(values, None, ~torch.isfinite(values).all(-1), gradient)


def surely_finite(problem: Problem) -> bool:
    """Whether no score can overflow or be NaN, by a bound on |q||k|. Asked on the CPU only: elsewhere it would sync."""
    query, key = problem.query, problem.key
    if query.device.type != "cpu" or 0 in (*query.shape, *key.shape):
        return False
    bound = float(problem.multiplier.abs().max()) * query.shape[3]
    for tensor in (query, key):
        bound *= float(torch.linalg.vector_norm(tensor, math.inf))
    if problem.mask is not None and problem.mask.dtype != torch.bool:
        bound += abs(float(problem.mask.max()))
    return bound < torch.finfo(problem.compute_dtype).max / 4


def mass(problem: Problem, tile: Tile, lse: Tensor) -> Tensor:
    """Share of the weight that the sink leaves to the keys, sigmoid(lse - sink), [n, R * rows]; 0 on an empty row."""
    assert problem.sink is not None
    sink = problem.sink[tile.heads].to(lse.dtype)[None, :, None].expand(tile.shape)
    return torch.sigmoid(lse - sink.reshape(tile.flat))


def dropout(problem: Problem, values: Tensor, index: int, low: int) -> Tensor:
    """``values`` with a share ``dropout_p`` zeroed and the rest scaled up: the same places whenever a block is
    asked again.
    """
    if problem.dropout_p == 0:
        return values
    if problem.dropout_p == 1:
        return torch.zeros_like(values)
    assert problem.seed is not None
    seed = (int(problem.seed) + 1_000_003 * index + 7_919 * low) & (2**63 - 1)
    generator = torch.Generator(values.device).manual_seed(seed)
    kept = torch.empty_like(values).bernoulli_(1 - problem.dropout_p, generator=generator)
    return kept.mul_(values).div_(1 - problem.dropout_p)


def key_factors(problem: Problem, tile: Tile, low: int, high: int) -> dict[Column, Tensor]:
    """u of each column asked for that is a sum of p u, on a block: broadcastable to [b, g, R, rows, keys].

    The last dimension is that of the block, or shorter where u is 0 beyond it.
    """
    factors = {column: of(problem, tile, low, high) for column, of in _FACTORS.items() if column in problem.columns}
    return {column: u.to(problem.compute_dtype) for column, u in factors.items()}


def _first_tokens(problem: Problem, tile: Tile, low: int, high: int) -> Tensor:
    if problem.first_keys is not None:
        return _marks(problem.first_keys, tile, low, high)
    return torch.ones(max(0, min(high, problem.first_tokens) - low), device=problem.query.device)


def _distance(problem: Problem, tile: Tile, low: int, high: int) -> Tensor:
    keys = torch.arange(low, high, device=problem.query.device)
    return (row_positions(problem, tile)[:, None] - keys).abs_()


def _own_key(problem: Problem, tile: Tile, low: int, high: int) -> Tensor:
    return row_positions(problem, tile)[:, None] == torch.arange(low, high, device=problem.query.device)


def _span(problem: Problem, tile: Tile, low: int, high: int) -> Tensor:
    assert problem.span_keys is not None
    return _marks(problem.span_keys, tile, low, high)


def _marks(keys: Tensor, tile: Tile, low: int, high: int) -> Tensor:
    """Marks of keys, [B|1, K], on a block: [b|1, 1, 1, 1, keys]."""
    return keys[tile.batches if keys.shape[0] > 1 else slice(None), None, None, None, low:high]


_FACTORS = {
    Column.FIRST_TOKENS: _first_tokens,
    Column.DISTANCE: _distance,
    Column.OWN_KEY: _own_key,
    Column.SPAN: _span,
}
"""Column -> its u on a block of keys."""
WEIGHED = tuple(_FACTORS)
"""Columns that are sums of p u."""


def gini_rank(count: Tensor, keys: int) -> Tensor:
    """(2 i - n - 1) / n for the i-th smallest visible weight of rows [..., 1]; masked ones come first and
    weigh nothing.
    """
    places = torch.arange(1, keys + 1, device=count.device, dtype=count.dtype) - (keys - count)
    return (2 * places - count - 1) / count.clamp(min=1)


def _bias(problem: Problem, tile: Tile, low: int, high: int, dtype: torch.dtype) -> Tensor | None:
    """What is added to the scores, [b|1, g|1, R|1, rows|1, keys]: -inf where masked; None where nothing is added."""
    structure = _structure(problem, tile, low, high)
    bias = None
    if problem.mask is not None:
        block = tile.cut(problem.mask, slice(low, high))
        block = block.unsqueeze(2) if block.shape[1] == 1 else block.unflatten(1, (-1, problem.repeats))
        if block.dtype == torch.bool:
            bias = torch.zeros(block.shape, dtype=dtype, device=block.device).masked_fill_(~block, -math.inf)
        else:
            hidden = block <= torch.finfo(block.dtype).min / 2
            if torch.finfo(block.dtype).max > torch.finfo(dtype).max:
                # A float64 bias beyond float32 stays a bias: its key is visible, with no weight.
                block = block.clamp(min=torch.finfo(dtype).min)
            bias = block.to(dtype).masked_fill(hidden, -math.inf)
    if structure is None:
        # A key dimension of 1 stands for all keys of the block, and each of them counts.
        return bias if bias is None else bias.expand(*bias.shape[:4], high - low)
    if bias is None:
        bias = torch.zeros((), dtype=dtype, device=structure.device)
    return torch.where(structure, bias, -math.inf)


def _structure(problem: Problem, tile: Tile, low: int, high: int) -> Tensor | None:
    """Causal and window rules on a block, [1, 1, 1, rows, keys] bool; None where they hide nothing."""
    first, last = row_bounds(problem, tile.rows)
    if high - 1 <= first + problem.right and low >= last - problem.left:
        return None
    rows = row_positions(problem, tile)[:, None]
    keys = torch.arange(low, high, device=problem.query.device)
    visible = torch.ones((), dtype=torch.bool, device=keys.device)
    if problem.right < UNBOUNDED:
        visible = visible & (keys <= rows + problem.right)
    if problem.left < UNBOUNDED:
        visible = visible & (keys >= rows - problem.left)
    return visible[None, None, None]
