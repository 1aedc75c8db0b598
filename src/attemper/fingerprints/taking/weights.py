"""Sketches of the weights of an attention, by which one is told to be another's, transposed, or as it was drawn, and
the grid on which they stand: to how many bits they were rounded, in whatever type they are kept.
"""

from __future__ import annotations

import re
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor, nn

from attemper.fingerprints.encoding import round_rows
from attemper.fingerprints.site import SIDE, projection
from attemper.fingerprints.taking.site import WIDE
from attemper.sites.names import class_name
from attemper.sites.sharded import is_dtensor

_AREA = re.compile(r"^(?:.*\.)?\d+\.[^.]+")
"""What stands directly in a block, a number in a list: all of an attention, its output projection too."""


def weights_of(model: nn.Module, name: str, shape: tuple[int, int, int], dtype: str) -> dict[str, np.ndarray]:
    """``SiteFingerprint.weights`` of a site of that shape (heads, heads of keys, size), whose run has that type. A
    weight of queries, keys and values, or of several squares, is as many weights.
    """
    heads, groups, size = shape
    area = _AREA.match(name)
    path = area[0] if area else name
    module = None
    for own in (path, path.partition("#")[0]):  # a call of a module that runs several times has the weights of all
        with suppress(AttributeError):
            module = model.get_submodule(own)
            break
    if module is None:
        return {}  # a tap, whose name is no module's
    found = {}
    for path, part in module.named_modules():
        for last, weight in part.named_parameters(recurse=False):
            if weight.dim() != 2 or not weight.is_floating_point() or weight.is_meta or is_dtensor(weight):
                continue
            kept = weight.detach().T if class_name(part) == "Conv1D" else weight.detach()
            rows, columns = kept.shape
            squares = rows // columns if rows > columns > 1 and rows % columns == 0 else 1
            fused = rows == (heads + 2 * groups) * size
            parts = kept.split([heads * size, groups * size, groups * size] if fused else [rows // squares] * squares)
            for number, square in enumerate(parts):
                which = f" {number + 1} of {len(parts)}" if len(parts) > 1 else ""
                sketch = _sketch(square.float(), size)
                key = f"{path}.{last}".lstrip(".") + f"{which} {list(square.shape)}"
                found[key] = sketch if dtype in WIDE else round_rows(sketch)
    return found


def _sketch(weight: Tensor, size: int) -> np.ndarray:
    """[1 + blocks, 1 + SIDE^2] of a weight [out, in]."""
    rows, columns = weight.shape
    blocks = rows // size if rows % size == 0 else 1
    own, each, read = (torch.from_numpy(projection(n)[:, :SIDE]).to(weight) for n in (rows, rows // blocks, columns))
    read, norms = weight @ read, weight.reshape(blocks, -1).norm(dim=1)
    numbers = torch.cat(((own.T @ read)[None], each.T @ read.view(blocks, -1, SIDE))).flatten(1)
    return torch.cat((torch.cat((norms.norm()[None], norms))[:, None], numbers), 1).cpu().numpy()


_VECTORS, _SAMPLE = 8, 4096
"""Rows, and columns, of a matrix that are read, and weights of all of it."""
_GROUPS = (128, 64, 32)
"""Weights that share a step, along a row or a column, where not all of it do."""
_OFF = 0.06
"""Root mean square of how far weights on a grid are from it, in steps; of others it is 0.29."""
_TOLD = 20
"""Steps up to which a weight that is kept in 16 bits tells its step."""
_TYPES = {torch.float8_e4m3fn: (8, 2.0**-4), torch.bfloat16: (16, 2.0**-9), torch.float16: (16, 2.0**-12)}
"""Bits of types without a step, and their largest relative error."""


def grid_of(block: nn.Module) -> tuple[int, float] | None:
    """Bits of the coarsest grid on which a matrix of a block stands, and the relative error of rounding to it; None
    where none does.
    """
    matrices = (part.detach() for part in block.parameters() if part.dim() > 1 and part.is_floating_point())
    found = [grid for part in matrices if not part.is_meta and (grid := _grid(part.flatten(0, -2))) is not None]
    return max(found, key=lambda grid: grid[1], default=None)


def _grid(matrix: Tensor) -> tuple[int, float] | None:
    if matrix.dtype.itemsize == 1:
        return 8, _TYPES[torch.float8_e4m3fn][1] / 3**0.5
    parts = [part[:: max(len(part) // _VECTORS, 1)][:_VECTORS] for part in (matrix, matrix.T)]
    flat = matrix.flatten()
    few = flat[:: max(len(flat) // _SAMPLE, 1)][:_SAMPLE]
    parts.append(torch.cat((few, flat.amin()[None], flat.amax()[None]))[None])
    if parts[0].unique().numel() < 3:
        return None  # zeros, or ones and zeros, as they begin
    for part in (part.cpu().double() for part in parts):
        for size in (part.shape[1], *_GROUPS):
            if part.shape[1] % size or size < min(_GROUPS):
                continue
            vectors = part.reshape(-1, size)
            if (bits := _bits(vectors)) is not None:
                step = (vectors.amax(1) - vectors.amin(1)) / (2**bits - 1)
                return bits, float((step.square().mean() / vectors.square().mean() / 12).sqrt())
        for kind, (bits, error) in _TYPES.items():
            units = (1.0, part.abs().amax(1, keepdim=True) / 448) if bits == 8 else (1.0,)
            if 8 * matrix.dtype.itemsize > bits and any(_is_of(part / unit, kind) for unit in units):
                return bits, error / 3**0.5
    return None


def _is_of(vectors: Tensor, kind: torch.dtype) -> bool:
    """Whether the type has these numbers, but for what 16 bits round of them."""
    there = vectors.float().to(kind).double()
    off = 2.0**-9 * (vectors.abs() > 0.1) if kind.itemsize == 1 else 0.0
    return bool(((there - vectors).abs() <= off * vectors.abs()).all())


def _bits(vectors: Tensor) -> int | None:
    """Bits of the grid of vectors [N, size], each with its own step."""
    steps = max(int(vector.unique().numel()) for vector in vectors)
    if 2 < steps <= min(16, vectors.shape[1] // 2):
        return (steps - 1).bit_length()
    most, wide = vectors.abs().amax(1, keepdim=True), (vectors.amax(1) - vectors.amin(1))[:, None]
    for bits in (5, 6, 7, 8):
        levels = 2 ** (bits - 1) - 1
        for unit in (most / levels, most / (levels + 1), wide / (2**bits - 1)):
            places = vectors / unit.clamp(min=1e-300)
            off = (places - places.round())[(places.abs() < _TOLD) & (places.abs() > 0.5)]
            if off.numel() > 64 and float(off.square().mean().sqrt()) < _OFF:
                return bits
    return None
