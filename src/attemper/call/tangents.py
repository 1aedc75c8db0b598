"""The attention operator in plain PyTorch, by the formulas of the reference, in float64 and in tiles of rows.

Forward-mode differentiation runs it for its tangents: one more pass over the scores, for every backend. It can be
differentiated again, in both modes. The tiles are those of ``backends/blocked``, whose dropout is drawn tile by tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from attemper.backends import reference
from attemper.backends.blocked.scores import dropout, key_factors
from attemper.backends.blocked.tiles import Tile, key_blocks, row_positions, tiles
from attemper.backends.contract import DIFFERENTIABLE, UNBOUNDED, Problem
from attemper.backends.reference import softmax
from attemper.backends.reference.state import Rows
from attemper.call import operator, row_operator


class _Results(NamedTuple):
    """Of a tile: [b, h, rows, E], [F, b, h, rows], and [b, h, K] or None."""

    output: Tensor
    state: Tensor
    key_mass: Tensor | None


def results(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Output, state and key_mass as of the operator; nothing is written in place, so any transform may look on."""
    parts = [_of_document(part.problem) for part in operator.documents(problem)]
    output, state = torch.cat([part.output for part in parts], 2), torch.cat([part.state for part in parts], 3)
    masses = [part.key_mass for part in parts if part.key_mass is not None]
    return output, state, torch.cat(masses, 2) if masses else state.new_zeros(0)


def gradients(problem: Problem, above: tuple[Tensor, ...], needs: Sequence[bool]) -> list[Tensor]:
    """What the backward operator returns, by the same formulas; size 0 where no gradient is needed."""
    names = [
        name for name, need in zip(DIFFERENTIABLE, needs, strict=True) if need and getattr(problem, name) is not None
    ]

    def of(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return results(replace(problem, **dict(zip(names, tensors, strict=True))))

    pulled = torch.func.vjp(of, *(getattr(problem, name) for name in names))[1]
    found = dict(zip(names, pulled(above), strict=True))
    nothing = problem.query.new_empty(0)
    return [found.get(name, nothing) for name in DIFFERENTIABLE]


def _of_document(problem: Problem) -> _Results:
    """One document, or all of a call that is not packed. Tiles come batch by batch, then heads, then rows."""
    # Whole rows at once, except where dropout was drawn for other tiles.
    layout = problem if problem.dropout_p > 0 else replace(problem, key_mass=True)
    found: dict[int, dict[int, list[_Results]]] = {}
    for index, (tile, _, _) in enumerate(tiles(layout)):
        kept = _dropout_factors(layout, tile, index) if problem.dropout_p > 0 else None
        heads = found.setdefault(tile.batches.start, {}).setdefault(tile.heads.start, [])
        heads.append(_of_tile(problem, tile, kept))
    if not found:
        return _empty(problem)
    return _join([_join([_join(rows, 2) for rows in heads.values()], 1) for heads in found.values()], 0)


def _join(parts: list[_Results], axis: int) -> _Results:
    """Parts along batches (0), heads (1) or rows (2), over which key_mass is a sum."""
    masses = [part.key_mass for part in parts if part.key_mass is not None]
    mass = None
    if masses:
        mass = torch.stack(masses).sum(0) if axis == 2 else torch.cat(masses, axis)
    output, state = (
        torch.cat([part.output for part in parts], axis),
        torch.cat([part.state for part in parts], axis + 1),
    )
    return _Results(output, state, mass)


def _empty(problem: Problem) -> _Results:
    """Where there is no row, or no key head: nothing moves."""
    output, state, key_mass = operator.empty_results(problem)
    return _Results(
        torch.zeros_like(output), torch.zeros_like(state), torch.zeros_like(key_mass) if problem.key_mass else None
    )


def _of_tile(problem: Problem, tile: Tile, kept: Tensor | None) -> _Results:
    s, visible = _scores(problem, tile)
    factors = key_factors(problem, tile, 0, problem.key.shape[2])
    of_heads = {column: u[:, 0] if u.dim() == 5 else u for column, u in factors.items()}  # one for all heads
    smallest = None
    if problem.rowwise:
        w = p = _row_weights(problem, tile, s)
        smallest = torch.finfo(problem.compute_dtype).tiny
    else:
        p = softmax.weights(s, visible)
        sink = None if problem.sink is None else problem.sink[tile.heads]
        w = p * softmax.share(s, visible, sink)[..., None]
    found = Rows(s, visible, p, factors=of_heads, smallest=smallest)
    known = found.columns()
    state = torch.stack([known[column]() for column in problem.columns]).to(problem.compute_dtype)
    key_mass = found.key_mass().to(problem.compute_dtype) if problem.key_mass else None
    return _Results(_output(problem, tile, w if kept is None else w * kept), state, key_mass)


def _output(problem: Problem, tile: Tile, w: Tensor) -> Tensor:
    if problem.value is None:
        return problem.query.new_zeros((*w.shape[:3], 0))
    return reference.weigh(w, problem.value[tile.batches, tile.groups], 0.0).to(problem.query.dtype)


def _scores(problem: Problem, tile: Tile) -> tuple[Tensor, Tensor]:
    """Scores [b, h, rows, K] in float64, -inf where hidden, and which keys are visible."""
    shape = (*tile.shape, problem.key.shape[2])
    mask = None if problem.mask is None else tile.cut(problem.mask, slice(None))
    left, right = (float("inf") if side >= UNBOUNDED else side for side in (problem.left, problem.right))
    visible = softmax.visible_keys(shape, mask, left, right, row_positions(problem, tile), None)
    bias = None if mask is None or mask.dtype == torch.bool else mask.expand(shape)
    query, key = problem.query[tile.place], problem.key[tile.batches, tile.groups]
    multiplier = tile.cut(problem.multiplier)
    return softmax.scores(query, key, multiplier, bias, visible, problem.softcap or None), visible


def _row_weights(problem: Problem, tile: Tile, s: Tensor) -> Tensor:
    """The rowwise weights [b, h, rows, K]; their operator has a tangent of its own."""
    each = None
    if problem.per_head is not None:
        each = problem.per_head[tile.heads].double()[None, :, None].expand(s.shape[:-1])
    if problem.normalizer != "sigmoid":
        return row_operator.row_weights(s, problem.normalizer, problem.number, each)
    assert each is not None
    visible = s != -torch.inf
    weights = torch.sigmoid(torch.where(visible, s, 0.0) + each[..., None])
    return torch.where(visible, weights, 0.0)


def _dropout_factors(layout: Problem, tile: Tile, index: int) -> Tensor:
    """What dropout multiplied the weights of a tile by: [b, h, rows, K]; 1 beyond the keys that its rows can see."""
    batches, heads, rows = tile.shape
    keys, (low, high) = layout.key.shape[2], tile.keys
    blocks = [tile.keys] if layout.rowwise else list(key_blocks(layout, tile))
    ones = torch.ones((*tile.flat, keys), dtype=layout.compute_dtype, device=layout.query.device)
    inside = [dropout(layout, ones[..., start:stop].contiguous(), index, start) for start, stop in blocks]
    whole = torch.cat([ones[..., :low], *inside, ones[..., high:]], -1)
    return whole.view(batches, heads, rows, keys).double()
