"""Grids and arguments of the softmax kernels: from a problem to its output, state, sums and gradients.

The backward pass computes what is constant along a row, then each gradient that is wanted by a kernel of its own.
Nothing waits for the device, no weight is kept, and no sum depends on the order in which programs run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attemper.backends.contract import Gradients, Problem, Upstream
from attemper.backends.triton import launch, tuning
from attemper.backends.triton.softmax.backward_bias import bias_gradient_kernel
from attemper.backends.triton.softmax.backward_key import key_gradient_kernel
from attemper.backends.triton.softmax.backward_query import query_gradient_kernel
from attemper.backends.triton.softmax.decode import carried_numbers, join_kernel, split_kernel
from attemper.backends.triton.softmax.forward import forward_kernel
from attemper.backends.triton.softmax.gradient import Rows, constants_kernel
from attemper.backends.triton.softmax.state import bits
from attemper.backends.triton.tuning import Config


def forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """``backends.triton.forward`` of softmax."""
    query = problem.query
    batch, heads, queries, _ = query.shape
    rows = queries if problem.rows is None else problem.rows.shape[0]
    output = query.new_empty((batch, heads, rows, launch.width(problem)))
    state = query.new_empty((len(problem.columns), batch, heads, rows), dtype=torch.float32)
    splits = tuning.splits(problem) if state.numel() > 0 and problem.rows is None else min(1, state.numel())
    if splits > 1:
        _decode(problem, tuning.decode(problem), output, state, splits)
    elif splits == 1:
        sweep(problem, output, state)
    return output, state, state.new_empty(0)


def winners(problem: Problem) -> Tensor:
    """Where the maximum of each row stands, [B, H, Q] int32: the lowest key among ties, 0 on a row without keys."""
    winner = problem.query.new_empty(problem.query.shape[:3], dtype=torch.int32)
    if winner.numel() > 0:
        sweep(problem, winner, winner, winner)
    return winner


def sweep(
    problem: Problem,
    output: Tensor,
    state: Tensor,
    winner: Tensor | None = None,
    flag: Tensor | None = None,
) -> None:
    """The forward kernel: writes ``output`` and ``state``, or ``winner`` alone, unless ``flag`` is down."""
    query, config = problem.query, tuning.forward(problem)
    structure = launch.structure(problem)
    batch, heads, rows = *query.shape[:2], structure.rows
    nothing = {"E": 0, "BLOCK_E": tuning.power_of_two(0)}
    forward_kernel[(batch * heads * -(-rows // config.rows),)](
        *launch.inputs(problem),
        query if problem.sink is None else problem.sink,
        output,
        state,
        state if winner is None else winner,
        state if flag is None else flag,
        *structure,
        *_numbers(problem),
        WINNER=winner is not None,
        FLAG=flag is not None,
        GATHER=problem.rows is not None,
        # Rows far apart see most of their blocks in part.
        EDGE_STAGES=1 if problem.mask is None and problem.rows is None else config.stages,
        **launch.constants(problem, config, bits(problem.columns), fused=True, **({} if winner is None else nothing)),
    )


def _numbers(problem: Problem) -> tuple[Any, ...]:
    return problem.query.shape[1], problem.repeats, problem.first_tokens, problem.softcap


def _decode(problem: Problem, config: Config, output: Tensor, state: Tensor, splits: int) -> None:
    query, key = problem.query, problem.key
    batch, heads, rows, _ = query.shape
    total, width = batch * heads * rows, output.shape[3]
    parts = query.new_empty((splits, carried_numbers(bits(problem.columns)), total), dtype=torch.float32)
    outputs = query.new_empty((splits, total, width), dtype=torch.float32)
    *tensors, mask, first = launch.inputs(problem)
    constants = launch.constants(problem, config, bits(problem.columns), fused=True)
    split_kernel[(batch * key.shape[1] * splits,)](
        *tensors,
        mask._replace(batch=0, head=0, row=0),
        first._replace(batch=0),
        parts,
        outputs,
        *mask[1:4],
        first.batch,
        *launch.structure(problem),
        key.shape[1],
        problem.repeats,
        splits,
        problem.first_tokens,
        problem.softcap,
        **constants,
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
        CALL=constants["CALL"],
        ROWS=16,
        enable_fp_fusion=False,
    )


def backward(problem: Problem, output: Tensor, state: Tensor, upstream: Upstream, needs: tuple[bool, ...]) -> Gradients:
    """Gradients for ``problem.differentiable``, those that ``needs`` marks."""
    tensors = problem.differentiable
    query, key, value, mask, multiplier, sink, _ = (
        needed and tensor is not None for needed, tensor in zip(needs, tensors, strict=True)
    )
    if 0 in problem.query.shape[:3] or problem.key.shape[2] == 0:
        return launch.nothing(tensors, needs)
    grads = Gradients()
    rows, sink_rows = _backward_rows(problem, output, state, upstream)
    if query or multiplier:
        grads.query, by_row = _query_gradient(problem, upstream, rows, query, multiplier)
        grads.multiplier = None if by_row is None else launch.sum_to(by_row, problem.multiplier.shape)
    if key or value:
        grads.key, grads.value = _key_gradients(problem, upstream, rows, key, value)
    if mask:
        grads.mask = _bias_gradient(problem, upstream, rows)
    if sink:
        grads.sink = sink_rows.sum((0, 2))
    return grads


def _backward_rows(problem: Problem, output: Tensor, state: Tensor, upstream: Upstream) -> tuple[Rows, Tensor]:
    """What the kernels know of each row, and each row's part of the sink's gradient, [B, H, Q]."""
    query, width, config = problem.query, launch.width(problem), tuning.row_numbers(problem)
    batch, heads, count, _ = query.shape
    constant = query.new_empty((batch, heads, count), dtype=torch.float32)
    # Without a value no weight goes anywhere, and the sink has no part in what is measured.
    sink_rows = torch.empty_like(constant) if width else torch.zeros_like(constant)
    rows = Rows(
        state=state.contiguous(),
        above=upstream.state.contiguous(),
        constant=constant,
        winner=winners(problem) if problem.maximum_gradient else constant,
        sink=query if problem.sink is None else problem.sink,
        plane=constant.numel(),
    )
    is_wide = launch.wide((output, upstream.output), config.rows)
    constants_kernel[(batch * heads * -(-count // config.rows),)](
        launch.view_of(query if width == 0 else output),
        launch.view_of(query if width == 0 else upstream.output),
        constant,
        sink_rows,
        rows,
        count,
        heads,
        **launch.constants(problem, config, bits(problem.columns), WIDE=is_wide),
    )
    return rows, sink_rows


def _constants(problem: Problem, upstream: Upstream, config: Config) -> dict[str, Any]:
    # Where weights are rounded to sixteen bits before a product, what a multiply-add rounds less is not seen.
    return launch.constants(problem, config, bits(problem.columns), upstream, fused=problem.query.dtype.itemsize == 2)


def _query_gradient(
    problem: Problem, upstream: Upstream, rows: Rows, query: bool, multiplier: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The query's gradient, and the multiplier's per row [B, H, Q]."""
    config = tuning.query_gradient(problem)
    batch, heads, count, _ = problem.query.shape
    gradient, by_row = launch.like(problem.query, query), launch.like(rows.constant, multiplier)
    query_gradient_kernel[(batch * heads * -(-count // config.rows),)](
        *launch.gradient_inputs(problem, upstream),
        problem.query if gradient is None else gradient,
        rows.constant if by_row is None else by_row,
        rows,
        *launch.structure(problem),
        *_numbers(problem),
        QUERY=query,
        MULTIPLIER=multiplier,
        **_constants(problem, upstream, config),
    )
    return gradient, by_row


def _key_gradients(
    problem: Problem, upstream: Upstream, rows: Rows, key: bool, value: bool
) -> tuple[Tensor | None, Tensor | None]:
    config = tuning.key_gradient(problem)
    batch, groups, count, _ = problem.key.shape
    key_grad, value_grad = launch.like(problem.key, key), launch.like(problem.value, value)
    heads, repeats, *rest = _numbers(problem)
    key_gradient_kernel[(batch * groups * -(-count // config.keys),)](
        *launch.gradient_inputs(problem, upstream),
        problem.key if key_grad is None else key_grad,
        problem.key if value_grad is None else value_grad,
        rows,
        *launch.structure(problem),
        heads,
        repeats,
        problem.query.shape[2].bit_length(),
        *rest,
        KEY=key,
        VALUE=value and launch.width(problem) > 0,
        **_constants(problem, upstream, config),
    )
    return key_grad, value_grad


def _bias_gradient(problem: Problem, upstream: Upstream, rows: Rows) -> Tensor:
    config = tuning.bias_gradient(problem)
    bias = launch.bias(problem, config)
    bias_gradient_kernel[(bias.programs,)](
        *launch.gradient_inputs(problem, upstream),
        bias.gradient,
        rows,
        launch.structure(problem),
        *_numbers(problem),
        *bias.sizes,
        ALL_ROWS=bias.all_rows,
        **_constants(problem, upstream, config),
    )
    return bias.gradient
