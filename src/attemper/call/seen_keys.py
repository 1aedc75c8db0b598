"""Which keys some rows of a call see, key by key."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attemper.backends.contract import UNBOUNDED, Problem
from attemper.backends.reference import positions, softmax
from attemper.call.sampling import pick

_HIDING = -5e3
"""A number that is added to a score, beside the largest of the row, from which on it leaves no weight: engines take
-1e4 and less.
"""


def unless_hidden(mask: Tensor | None, visible: Tensor) -> Tensor:
    """Visible keys [..., R, K] without those that a finite number hides: one engine's -1e4 is another's -inf."""
    if mask is None or mask.dtype == torch.bool:
        return visible
    added = mask.double().masked_fill(~visible, -torch.inf)
    low = added <= added.amax(-1, keepdim=True) + _HIDING
    # What is added by distance gets there in small steps.
    step = added.masked_fill(low, torch.inf).amin(-1, True) - added.masked_fill(~low, -torch.inf).amax(-1, True)
    return visible & ~(low & (step > -_HIDING / 2))


def rows_that_see(problem: Problem, rows: Tensor) -> Tensor:
    """[B or 1, H or 1, R, K] bool: the keys that ``rows`` [R] of a call see, from its mask, windows and documents."""
    picked = pick(problem, rows.to(problem.query.device))
    batch, heads = (1, 1) if picked.mask is None else picked.mask.shape[:2]
    left, right = (math.inf if side >= UNBOUNDED else side for side in (picked.left, picked.right))
    shape = (batch, heads, len(rows), problem.key.shape[2])
    places, documents = positions(picked)
    return unless_hidden(picked.mask, softmax.visible_keys(shape, picked.mask, left, right, places, documents))
