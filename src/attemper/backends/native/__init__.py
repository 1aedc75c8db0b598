"""The native CPU kernels: C++ over tiles, the state of the blocked kernels, in float32.

Sums across blocks are float64. ``source/*.h`` hold the formulas and loop orders; ``library.py`` picks the build for the
processor; ``arguments.py`` hands over addresses and strides. No tensor is copied but small ones; the interpreter's lock
is released. Threads follow ``torch.get_num_threads()`` and never show in a result: every sum has an order that depends
on shapes alone. Softmax and the rowwise normalizers (docs/design/0008) have functions of their own with like arguments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attemper.backends import blocked
from attemper.backends.contract import Gradients, Problem, Upstream
from attemper.backends.native.arguments import address, broadcast_strides, describe, view
from attemper.backends.native.library import file_name, run, why_unusable
from attemper.backends.native.repeated_call import Again, empty_results
from attemper.backends.native.rows import statistics, sums

__all__ = ["Again", "backward", "file_name", "forward", "statistics", "sums", "why_unusable"]


def forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Output [B, H, Q, E], state [F, B, H, Q], and an empty key_mass, which takes a second pass."""
    output, state = empty_results(problem)
    call, held = describe(problem, output, state)
    run("attemper_rowwise_forward" if problem.rowwise else "attemper_forward", call)
    del held
    if problem.rowwise and problem.value is not None and not bool(problem.value.isfinite().all()):
        # These kernels leave out weights of exactly 0, and 0 times NaN is NaN (docs/maths.md).
        output = blocked.forward(problem)[0]
    return output, state, state.new_empty(0)


def backward(problem: Problem, output: Tensor, state: Tensor, upstream: Upstream, needs: tuple[bool, ...]) -> Gradients:
    """Gradients for ``problem.differentiable``, those that ``needs`` marks; float32, contiguous."""
    state, grad_state = state.contiguous(), upstream.state.to(torch.float32).contiguous()
    rows = problem.query.shape[:3]
    shapes = (*(None if tensor is None else tensor.shape for tensor in problem.differentiable[:4]), rows, rows, rows)
    query, key, value, mask, multiplier, sink, per_head = (
        torch.zeros(shape, dtype=torch.float32) if needed and tensor is not None and shape is not None else None
        for tensor, shape, needed in zip(problem.differentiable, shapes, needs, strict=True)
    )
    places = [address(grad) for grad in (query, key, value, mask)]
    mask_strides = (0, 0, 0, 0) if mask is None else broadcast_strides(mask)
    rows_places = (address(multiplier), address(sink), int(problem.maximum_gradient))
    slots = (*view(upstream.output), address(grad_state), *places, *mask_strides, *rows_places)
    call, held = describe(problem, output, state, slots, per_head)
    run("attemper_rowwise_backward" if problem.rowwise else "attemper_backward", call)
    del held
    if multiplier is not None:
        axes = [axis for axis, size in enumerate(problem.multiplier.shape) if size == 1]
        multiplier = multiplier.double().sum(axes, keepdim=True).float() if axes else multiplier
    sink, per_head = (None if one is None else one.double().sum((0, 2)).float() for one in (sink, per_head))
    return Gradients(query, key, value, mask, multiplier, sink, per_head)
