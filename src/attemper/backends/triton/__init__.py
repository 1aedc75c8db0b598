"""Attention with exact statistics in Triton: NVIDIA and AMD through one source. docs/design/0005-triton.md.

The same problem in and the same state out as ``backends/blocked``, in float16, bfloat16 and float32 with head sizes up
to 256, without dropout and what needs all keys of a row at once (gini, key_mass). Normalizers other than softmax have kernels
of their own, in ``rowwise``. Importing this imports Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attemper.backends.contract import Gradients, Problem, Upstream
from attemper.backends.triton import launch
from attemper.backends.triton.rowwise import launch as rowwise
from attemper.backends.triton.softmax import launch as softmax
from attemper.backends.triton.softmax.launch import winners
from attemper.backends.triton.softmax.state import bits
from attemper.backends.triton.sums import SUMMED, add, positions_kernel

__all__ = ["SUMMED", "accumulate", "backward", "forward", "positions", "winners"]


def forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Output [B, H, Q, E], state [F, B, H, Q] and an empty tensor (key_mass is for others), as ``blocked.forward``.

    Of ``problem.rows`` [R] on the device alone, where there are any: the kernel gathers them as it loads them.
    """
    kernels = rowwise if problem.rowwise else softmax
    return kernels.forward(problem)


def backward(problem: Problem, output: Tensor, state: Tensor, upstream: Upstream, needs: tuple[bool, ...]) -> Gradients:
    """Gradients for ``problem.differentiable``, those that ``needs`` marks: ``blocked.backward``'s."""
    if problem.rowwise:
        return rowwise.backward(problem, state, upstream, needs)
    return softmax.backward(problem, output, state, upstream, needs)


def accumulate(
    problem: Problem, flag: Tensor, sums: Tensor, included: Tensor | None = None, state: Tensor | None = None
) -> None:
    """Adds the statistics of a call to ``sums`` (``sums.empty_sums``), unless ``flag`` is down; nothing waits.

    Args:
        problem: queries and keys, with the state columns ``SUMMED`` and no value; of its ``rows`` alone, if it has any.
        flag: [1] int on the device; 0 is down.
        included: [B, Q] bool, or [B, R] of the measured rows: which count (real tokens); None for all.
        state: [F, B, H, R] float32 for the state of the measured rows; None where nobody wants it.
    """
    batch, heads, queries, _ = problem.query.shape
    measured = queries if problem.rows is None else problem.rows.shape[0]
    if 0 in (batch, heads, measured):
        return
    if state is None:
        state = problem.query.new_empty((len(SUMMED), batch, heads, measured), dtype=torch.float32)
    softmax.sweep(problem, state, state, flag=flag)
    counted = None if included is None else launch.view_of(included.view(torch.uint8)[:, None, None])
    add(state, counted, problem.sink, flag, sums, problem.first_tokens, bits(SUMMED))


def positions(start: Tensor, rows: int, queries: int, flag: Tensor) -> Tensor:
    """``rows`` of ``queries`` rows, [rows] int32, evenly strided from ``start`` ([1] float64 on the device, in [0, 1)).

    As all kernels here it does nothing where ``flag`` is down: then what it returns means nothing.
    """
    chosen = torch.empty(rows, dtype=torch.int32, device=start.device)
    positions_kernel[(-(-rows // 128),)](start, chosen, flag, rows, queries, BLOCK=128, enable_fp_fusion=False)
    return chosen
