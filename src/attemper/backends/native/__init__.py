"""The native CPU kernels: C++ over tiles, the state of the blocked kernels, in float32.

Sums across blocks are float64. ``source/*.h`` hold the formulas and loop orders; ``library.py`` picks the build for the
processor; ``arguments.py`` hands over addresses and strides. No tensor is copied but small ones; the interpreter's lock
is released. Threads follow ``torch.get_num_threads()`` and never show in a result: every sum has an order that depends
on shapes alone. Maps other than softmax, which are found on whole rows, are in ``rows.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attemper.backends.contract import Gradients, Problem, Upstream
from attemper.backends.native import rows as row_maps
from attemper.backends.native.arguments import address, described, view, view_strides
from attemper.backends.native.library import run, why_unusable
from attemper.backends.native.statistics import statistics
from attemper.backends.native.sums import sums

__all__ = ["backward", "forward", "statistics", "sums", "why_unusable"]


def forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Output [B, H, Q, E], state [F, B, H, Q], and an empty key_mass, which takes a second pass.

    The output lies as [B, Q, H, E] in memory, as that of PyTorch's SDPA does: what joins heads next copies nothing.
    """
    if problem.rowwise:
        return row_maps.forward(problem)
    batch, heads, rows, _ = problem.query.shape
    width = 0 if problem.value is None else problem.value.shape[3]
    output = problem.query.new_empty((batch, rows, heads, width)).transpose(1, 2)
    state = torch.empty((len(problem.columns), batch, heads, rows), dtype=torch.float32)
    call, held = described(problem, output, state)
    run("attemper_forward", call)
    del held
    return output, state, state.new_empty(0)


def backward(problem: Problem, output: Tensor, state: Tensor, upstream: Upstream, needs: tuple[bool, ...]) -> Gradients:
    """Gradients for ``problem.differentiable``, those that ``needs`` marks; float32, contiguous."""
    if problem.rowwise:
        return row_maps.backward(problem, output, state, upstream, needs)
    state, grad_state = state.contiguous(), upstream.state.to(torch.float32).contiguous()
    rows = problem.query.shape[:3]
    shapes = (*(None if tensor is None else tensor.shape for tensor in problem.differentiable[:4]), rows, rows, None)
    grads = [
        torch.zeros(shape, dtype=torch.float32) if needed and tensor is not None and shape is not None else None
        for tensor, shape, needed in zip(problem.differentiable, shapes, needs, strict=True)
    ]
    query, key, value, mask, multiplier, sink, _ = grads
    places = [address(grad) for grad in grads[:6]]
    mask_strides = (0, 0, 0, 0) if mask is None else view_strides(mask)
    slots = (*view(upstream.output), address(grad_state), *places[:4], *mask_strides, *places[4:])
    call, held = described(problem, output, state, (*slots, int(problem.maximum_gradient)))
    run("attemper_backward", call)
    del held
    if multiplier is not None:
        multiplier = _summed(multiplier, problem.multiplier.shape)
    if sink is not None:
        sink = sink.double().sum((0, 2)).float()
    return Gradients(query, key, value, mask, multiplier, sink)


def _summed(values: Tensor, shape: torch.Size) -> Tensor:
    """Summed, in float64, over the dimensions in which ``shape`` is 1."""
    axes = [axis for axis, size in enumerate(shape) if size == 1]
    return values.double().sum(axes, keepdim=True).float() if axes else values
