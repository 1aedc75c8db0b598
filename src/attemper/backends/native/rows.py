"""Attention by the maps that are found on whole rows (docs/design/0008), as ``source/row_attention.h`` has it."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from attemper.backends.contract import Gradients, Problem, Upstream
from attemper.backends.native.arguments import address, described, places, view, view_strides
from attemper.backends.native.library import run
from attemper.backends.native.normalize import KINDS
from attemper.statistics import Column

COLUMNS = (
    Column.MAXIMUM,
    Column.VISIBLE_KEYS,
    Column.THRESHOLD,
    Column.MASS,
    Column.SUPPORT,
    Column.LARGEST_WEIGHT,
    Column.MEAN_DEPTH,
    Column.ENTROPY,
    Column.VARIANCE,
    Column.SQUARED_WEIGHTS,
    Column.FIRST_TOKENS,
    Column.DISTANCE,
)
"""State columns in the order of ``source/row_attention.h``; gini takes a second pass."""
_MORE = struct.Struct(f"@qd{len(COLUMNS)}q")


def forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Output [B, H, Q, E], state [F, B, H, Q], and an empty key_mass, which takes a second pass."""
    batch, heads, rows, _ = problem.query.shape
    width = 0 if problem.value is None else problem.value.shape[3]
    output = problem.query.new_empty((batch, heads, rows, width))
    state = torch.empty((len(problem.columns), batch, heads, rows), dtype=torch.float32)
    call, held = described(problem, output, state)
    run("attemper_row_forward", call + _more(problem))
    del held
    return output, state, state.new_empty(0)


def backward(problem: Problem, output: Tensor, state: Tensor, upstream: Upstream, needs: tuple[bool, ...]) -> Gradients:
    """Gradients for ``problem.differentiable``, those that ``needs`` marks; float32, contiguous."""
    state, grad_state = state.contiguous(), upstream.state.to(torch.float32).contiguous()
    rows = problem.query.shape[:3]
    shapes = (*(None if tensor is None else tensor.shape for tensor in problem.differentiable[:4]), rows, None, rows)
    grads = [
        torch.zeros(shape, dtype=torch.float32) if needed and tensor is not None and shape is not None else None
        for tensor, shape, needed in zip(problem.differentiable, shapes, needs, strict=True)
    ]
    query, key, value, mask, multiplier, _, per_head = grads
    # In C++ the sink of softmax and what a rowwise normalizer has per head share a slot.
    addresses = [address(grad) for grad in (query, key, value, mask, multiplier, per_head)]
    mask_strides = (0, 0, 0, 0) if mask is None else view_strides(mask)
    slots = (*view(upstream.output), address(grad_state), *addresses[:4], *mask_strides, *addresses[4:])
    call, held = described(problem, output, state, (*slots, int(problem.maximum_gradient)))
    run("attemper_row_backward", call + _more(problem))
    del held
    if multiplier is not None:
        axes = [axis for axis, size in enumerate(problem.multiplier.shape) if size == 1]
        multiplier = multiplier.double().sum(axes, keepdim=True).float() if axes else multiplier
    if per_head is not None:
        per_head = per_head.double().sum((0, 2)).float()
    return Gradients(query, key, value, mask, multiplier, per_head=per_head)


def _more(problem: Problem) -> bytes:
    """What follows an ``Arguments`` in a ``RowCall``."""
    return _MORE.pack(KINDS.index(problem.normalizer), problem.number, *places(problem, COLUMNS))
