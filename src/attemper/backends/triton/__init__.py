"""Attention with exact statistics in Triton: NVIDIA and AMD through one source. docs/design/0005-triton.md.

The same problem in and the same state out as ``backends/blocked``, in float16, bfloat16 and float32 with head sizes up
to 256, without dropout and what needs whole rows (gini, key_mass). Maps other than softmax have kernels of their own, by
``row_launch``. Importing this imports Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attemper.backends.contract import Gradients, Problem, Upstream, letters_of
from attemper.backends.triton import launch, tuning
from attemper.backends.triton.rowwise import launch as row_launch
from attemper.backends.triton.softmax.backward import backward as gradients
from attemper.backends.triton.softmax.decode import CARRIED, join_kernel, split_kernel
from attemper.backends.triton.softmax.forward import forward_kernel
from attemper.backends.triton.softmax.state import letters
from attemper.backends.triton.sums import SUMMED, add, positions_kernel
from attemper.backends.triton.tuning import Config

__all__ = ["SUMMED", "accumulate", "backward", "forward", "positions", "winners"]


def forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Output [B, H, Q, E], state [F, B, H, Q] and an empty tensor (key_mass is for others), as ``blocked.forward``.

    Of ``problem.rows`` [R] on the device alone, where there are any: the kernel gathers them as it loads them.
    """
    if problem.rowwise:
        return row_launch.forward(problem)
    query = problem.query
    batch, heads, queries, _ = query.shape
    rows = queries if problem.rows is None else problem.rows.shape[0]
    width = 0 if problem.value is None else problem.value.shape[3]
    output = query.new_empty((batch, heads, rows, width))
    state = query.new_empty((len(problem.fields), batch, heads, rows), dtype=torch.float32)
    if problem.rows is not None:
        if state.numel() > 0:
            _run(problem, tuning.forward(problem), output, state, winner=None)
        return output, state, state.new_empty(0)
    splits = tuning.splits(problem) if state.numel() > 0 else 0
    if splits > 1:
        _decode(problem, tuning.decode(problem), output, state, splits)
    elif splits == 1:
        _run(problem, tuning.forward(problem), output, state, winner=None)
    return output, state, state.new_empty(0)


def backward(problem: Problem, output: Tensor, state: Tensor, upstream: Upstream, needs: tuple[bool, ...]) -> Gradients:
    """Gradients for ``problem.differentiable``, those that ``needs`` marks: ``blocked.backward``'s."""
    if problem.rowwise:
        return row_launch.backward(problem, state, upstream, needs)
    winner = winners(problem) if problem.maximum_gradient else None
    return gradients(problem, output, state, upstream, needs, winner)


def winners(problem: Problem) -> Tensor:
    """Where the maximum of each row stands, [B, H, Q] int32: the lowest key among ties, 0 on a row without keys."""
    winner = problem.query.new_empty(problem.query.shape[:3], dtype=torch.int32)
    if winner.numel() > 0:
        _run(problem, tuning.forward(problem), winner, winner, winner)
    return winner


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
    _run(problem, tuning.forward(problem), state, state, None, flag)
    counted = None if included is None else launch.strided(included.view(torch.uint8)[:, None, None])
    add(state, counted, problem.sink, flag, sums, problem.first_tokens, letters(letters_of(SUMMED)))


def positions(start: Tensor, rows: int, queries: int, flag: Tensor) -> Tensor:
    """``rows`` of ``queries`` rows, [rows] int32, evenly strided from ``start`` ([1] float64 on the device, in [0, 1)).

    As all kernels here it does nothing where ``flag`` is down: then what it returns means nothing.
    """
    chosen = torch.empty(rows, dtype=torch.int32, device=start.device)
    positions_kernel[(-(-rows // 128),)](start, chosen, flag, rows, queries, BLOCK=128)
    return chosen


def _decode(problem: Problem, config: Config, output: Tensor, state: Tensor, splits: int) -> None:
    query, value = problem.query, problem.value
    batch, heads, rows, _ = query.shape
    total, width = batch * heads * rows, output.shape[3]
    parts = query.new_empty((splits, CARRIED, total), dtype=torch.float32)
    outputs = query.new_empty((splits, total, width), dtype=torch.float32)
    (mask, _, _), first = launch.mask_of(problem), launch.first_of(problem)
    shared = {"E": width, "BLOCK_E": tuning.power_of_two(width)}
    split_kernel[(batch * problem.key.shape[1] * splits,)](
        launch.strided(query),
        launch.strided(problem.key),
        launch.strided(query if value is None else value),
        launch.multiplier_of(problem),
        mask._replace(batch=0, head=0, row=0),
        first._replace(batch=0),
        parts,
        outputs,
        *mask[1:4],
        first.batch,
        *launch.structure(problem),
        problem.key.shape[1],
        problem.repeats,
        splits,
        problem.first_tokens,
        problem.softcap,
        **shared,
        **launch.constants(problem, config),
    )
    sink = parts if problem.sink is None else problem.sink
    join_kernel[(-(-total // 16),)](
        parts,
        outputs,
        sink,
        output,
        state,
        total,
        heads,
        rows,
        splits,
        LETTERS=letters(problem.fields),
        SINK=problem.sink is not None,
        BLOCK_M=16,
        enable_fp_fusion=False,
        **shared,
    )


def _run(
    problem: Problem,
    config: Config,
    output: Tensor,
    state: Tensor,
    winner: Tensor | None,
    flag: Tensor | None = None,
) -> None:
    query, value = problem.query, problem.value if winner is None else None
    structure = launch.structure(problem)
    batch, heads, rows = *query.shape[:2], structure.rows
    width = 0 if value is None else value.shape[3]
    mask, _, _ = launch.mask_of(problem)
    forward_kernel[(batch * heads * -(-rows // config.rows),)](
        launch.strided(query),
        launch.strided(problem.key),
        launch.strided(query if value is None else value),
        launch.multiplier_of(problem),
        mask,
        launch.first_of(problem),
        query if problem.sink is None else problem.sink,
        output,
        state,
        state if winner is None else winner,
        state if flag is None else flag,
        *structure,
        heads,
        problem.repeats,
        problem.first_tokens,
        problem.softcap,
        SINK=problem.sink is not None,
        WINNER=winner is not None,
        FLAG=flag is not None,
        GATHER=problem.rows is not None,
        E=width,
        BLOCK_E=tuning.power_of_two(width),
        EDGE_STAGES=1 if problem.mask is None else config.stages,
        **launch.constants(problem, config),
    )
