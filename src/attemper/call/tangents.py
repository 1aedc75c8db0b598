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
from attemper.backends.blocked.scores import dropout
from attemper.backends.blocked.tiles import Tile, key_blocks, row_positions, tiles
from attemper.backends.contract import DIFFERENTIABLE, Problem
from attemper.backends.reference import softmax
from attemper.call import operator, row_operator
from attemper.call.packing import documents
from attemper.call.partial_call import part_of


class _Results(NamedTuple):
    """Of a tile: [b, h, rows, E], [F, b, h, rows], and [b, h, K] or None."""

    output: Tensor
    state: Tensor
    key_mass: Tensor | None


def results(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Output, state and key_mass as of the operator; nothing is written in place, so any transform may look on."""
    parts = [_of_document(part.problem) for part in documents(problem)]
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
    part = part_of(problem, tile.batches, tile.heads, tile.rows)
    part = part.with_fields(positions=row_positions(problem, tile), bottom_right=False)
    s, visible = reference.scores(part)
    w = p = _row_weights(part, s) if part.rowwise else softmax.weights(s, visible)
    if part.sink is not None:
        w = p * softmax.share(s, visible, part.sink)[..., None]
    found = reference.rows_of(part, s, visible, p)
    known = found.columns()
    state = torch.stack([known[column]() for column in part.columns]).to(part.compute_dtype)
    key_mass = found.key_mass().to(part.compute_dtype) if part.key_mass else None
    output = part.query.new_zeros((*w.shape[:3], 0))
    if part.value is not None:
        output = reference.weigh(w if kept is None else w * kept, part.value, 0.0).to(part.query.dtype)
    return _Results(output, state, key_mass)


def _row_weights(part: Problem, s: Tensor) -> Tensor:
    """The rowwise weights [b, h, rows, K]; their operator has a tangent of its own."""
    each = None if part.per_head is None else part.per_head.double()[None, :, None].expand(s.shape[:-1])
    if part.normalizer != "sigmoid":
        return row_operator.row_weights(s, part.normalizer, part.number, each)
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
