"""Weights that stand on a grid: to how many bits they were rounded, in whatever type they are kept."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

_VECTORS = 8
"""Rows, and columns, of a matrix that are read."""
_GROUPS = (None, 128, 64, 32)
"""Weights that share a step, along a row or a column."""
_OFF = 0.06
"""Root mean square of how far weights on a grid are from it, in steps: of others it is 0.29."""
_TOLD = 20
"""Steps up to which a weight that is kept in 16 bits tells its step."""
_SAMPLE = 4096
_UNIFORM = 12**-0.5
_FLOAT8 = 8, 2.0**-4 / 3**0.5
_FLOAT16 = {torch.bfloat16: (16, 2.0**-9 / 3**0.5), torch.float16: (16, 2.0**-12 / 3**0.5)}
"""Bits and relative errors of types that have no step."""


def grid_of(block: nn.Module) -> tuple[int, float] | None:
    """Bits of the coarsest grid on which a matrix of a block stands, and the relative error of rounding to it; None
    where none does.
    """
    matrices = (part.detach() for part in block.parameters() if part.dim() > 1 and part.is_floating_point())
    found = [grid for part in matrices if not part.is_meta and (grid := _grid(part.flatten(0, -2))) is not None]
    return max(found, key=lambda grid: grid[1], default=None)


def _grid(matrix: Tensor) -> tuple[int, float] | None:
    sample = matrix[:_VECTORS]
    if sample.unique().numel() < 3:
        return None  # zeros, or ones and zeros, as they begin
    for vectors in _vectors(matrix):
        for group in _GROUPS:
            size = vectors.shape[1] if group is None else group
            if vectors.shape[1] % size or size < min(_GROUPS[1:]):
                continue
            parts = vectors.reshape(-1, size)
            if (bits := _bits(parts)) is not None:
                step = (parts.amax(1) - parts.amin(1)) / (2**bits - 1)
                return bits, float(_UNIFORM * step.square().mean().sqrt() / parts.square().mean().sqrt())
        if any(_is_float8(vectors / unit) for unit in (1.0, vectors.abs().amax(1, keepdim=True) / 448)):
            return _FLOAT8
    types = _FLOAT16 if sample.dtype.itemsize > 2 else {}
    return next((grid for kind, grid in types.items() if torch.equal(sample, sample.to(kind).to(sample.dtype))), None)


def _vectors(matrix: Tensor) -> Iterator[Tensor]:
    """Some rows, some columns, and some of all as one vector."""
    for part in (matrix, matrix.T):
        yield part[:: max(len(part) // _VECTORS, 1)][:_VECTORS].cpu().double()
    flat = matrix.flatten()
    yield (
        torch.cat((flat[:: max(len(flat) // _SAMPLE, 1)][:_SAMPLE], flat.amin()[None], flat.amax()[None]))[None]
        .cpu()
        .double()
    )


def _is_float8(vectors: Tensor) -> bool:
    there = vectors.float().to(torch.float8_e4m3fn).double()
    return bool(((there - vectors).abs() <= 2.0**-9 * vectors.abs() * (vectors.abs() > 0.1)).all())


def _bits(vectors: Tensor) -> int | None:
    """Bits of the grid of vectors [N, size], each with its own step."""
    steps = [int(vector.unique().numel()) for vector in vectors]
    if 2 < max(steps) <= 16 and vectors.shape[1] >= 2 * max(steps):
        return max(max(steps) - 1, 1).bit_length()
    most, wide = vectors.abs().amax(1, keepdim=True), (vectors.amax(1) - vectors.amin(1))[:, None]
    for bits in (5, 6, 7, 8):
        levels = 2 ** (bits - 1) - 1
        for unit in (most / levels, most / (levels + 1), wide / (2**bits - 1)):
            places = vectors / unit.clamp(min=1e-300)
            told = places.abs() < _TOLD
            off = (places - places.round())[told & (places.abs() > 0.5)]
            if off.numel() > 64 and float(off.square().mean().sqrt()) < _OFF:
                return bits
    return None
