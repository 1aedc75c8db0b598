"""Sketches of the weights of an attention, by which one is told to be another's, transposed, or as it was drawn."""

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
