"""The backward pass: what is constant along a row, then the gradients that are wanted, each by a kernel of its own.

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
from attemper.backends.triton.softmax.gradient import Rows, constants_kernel
from attemper.backends.triton.tuning import Config


def backward(
    problem: Problem, output: Tensor, state: Tensor, upstream: Upstream, needs: tuple[bool, ...], winner: Tensor | None
) -> Gradients:
    """Gradients for ``problem.differentiable``, those that ``needs`` marks.

    ``winner``: where each row's maximum stands, [B, H, Q] int32, or None where no gradient falls on it alone.
    """
    tensors = problem.differentiable
    query, key, value, mask, multiplier, sink, _ = (
        needed and tensor is not None for needed, tensor in zip(needs, tensors, strict=True)
    )
    grads = Gradients()
    if 0 in problem.query.shape[:3] or problem.key.shape[2] == 0:
        return _nothing(tensors, needs)
    rows, sink_rows = _row_numbers(problem, output, state, upstream, winner)
    if query or multiplier:
        grads.query, by_row = _query_gradient(problem, upstream, rows, query, multiplier)
        grads.multiplier = None if by_row is None else _summed_to(by_row, problem.multiplier.shape)
    if key or value:
        grads.key, grads.value = _key_gradients(problem, upstream, rows, key, value)
    if mask:
        grads.mask = _bias_gradient(problem, upstream, rows)
    if sink:
        grads.sink = sink_rows.sum((0, 2))
    return grads


def _nothing(tensors: tuple[Tensor | None, ...], needs: tuple[bool, ...]) -> Gradients:
    """Gradients of a call without rows or without keys."""
    return Gradients(
        *(
            torch.zeros_like(tensor) if needed and tensor is not None else None
            for tensor, needed in zip(tensors, needs, strict=True)
        )
    )


def _row_numbers(
    problem: Problem, output: Tensor, state: Tensor, upstream: Upstream, winner: Tensor | None
) -> tuple[Rows, Tensor]:
    """What the kernels know of each row, and each row's part of the sink's gradient, [B, H, Q]."""
    query = problem.query
    batch, heads, count, _ = query.shape
    constant = query.new_empty((batch, heads, count), dtype=torch.float32)
    width = _width(problem)
    # Without a value no weight goes anywhere, and the sink has no part in what is measured.
    sink_rows = torch.empty_like(constant) if width else torch.zeros_like(constant)
    rows = Rows(
        state=state.contiguous(),
        above=upstream.state.contiguous(),
        constant=constant,
        winner=constant if winner is None else winner,
        sink=query if problem.sink is None else problem.sink,
        plane=constant.numel(),
    )
    config = tuning.row_numbers(problem)
    common = launch.constants(problem, config)
    constants_kernel[(batch * heads * -(-count // config.rows),)](
        launch.strided(query if width == 0 else output),
        launch.strided(query if width == 0 else upstream.output),
        constant,
        sink_rows,
        rows,
        *launch.structure(problem),
        heads,
        LETTERS=common["LETTERS"],
        SINK=problem.sink is not None,
        E=width,
        BLOCK_E=tuning.power_of_two(width),
        BLOCK_M=config.rows,
        WIDE=launch.wide((output, upstream.output), config.rows),
        num_warps=config.warps,
    )
    return rows, sink_rows


def _width(problem: Problem) -> int:
    return 0 if problem.value is None else problem.value.shape[3]


def _inputs(problem: Problem, upstream: Upstream) -> tuple[Any, ...]:
    """What every gradient kernel reads: query, key, value, dO, multiplier, mask, first tokens."""
    empty = problem.value is None or _width(problem) == 0
    return (
        launch.strided(problem.query),
        launch.strided(problem.key),
        launch.strided(problem.query if empty else problem.value),
        launch.strided(problem.query if empty else upstream.output),
        launch.multiplier_of(problem),
        launch.mask_of(problem)[0],
        launch.first_of(problem),
    )


def _constants(problem: Problem, upstream: Upstream, config: Config, winner: bool) -> dict[str, Any]:
    width, block = _width(problem), max(config.rows, config.keys)
    common = launch.constants(problem, config)
    return common | {
        "SINK": problem.sink is not None,
        "MAXIMUM": winner,
        "E": width,
        "BLOCK_E": tuning.power_of_two(width),
        "WIDE": common["WIDE"] or launch.wide((upstream.output,), block),
    }


def _query_gradient(
    problem: Problem, upstream: Upstream, rows: Rows, query: bool, multiplier: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The query's gradient, and the multiplier's per row [B, H, Q]."""
    config = tuning.query_gradient(problem)
    batch, heads, count, _ = problem.query.shape
    gradient = torch.empty_like(problem.query, memory_format=torch.contiguous_format) if query else None
    by_row = torch.empty_like(rows.constant) if multiplier else None
    query_gradient_kernel[(batch * heads * -(-count // config.rows),)](
        *_inputs(problem, upstream),
        problem.query if gradient is None else gradient,
        rows.constant if by_row is None else by_row,
        rows,
        *launch.structure(problem),
        heads,
        problem.repeats,
        problem.first_tokens,
        problem.softcap,
        QUERY=query,
        MULTIPLIER=multiplier,
        **_constants(problem, upstream, config, _has_winner(rows)),
    )
    return gradient, by_row


def _has_winner(rows: Rows) -> bool:
    return rows.winner is not rows.constant


def _key_gradients(
    problem: Problem, upstream: Upstream, rows: Rows, key: bool, value: bool
) -> tuple[Tensor | None, Tensor | None]:
    config = tuning.key_gradient(problem)
    batch, groups, count, _ = problem.key.shape
    key_grad = torch.empty_like(problem.key, memory_format=torch.contiguous_format) if key else None
    value_grad = None
    if value and problem.value is not None:
        value_grad = torch.empty_like(problem.value, memory_format=torch.contiguous_format)
    key_gradient_kernel[(batch * groups * -(-count // config.keys),)](
        *_inputs(problem, upstream),
        problem.key if key_grad is None else key_grad,
        problem.key if value_grad is None else value_grad,
        rows,
        *launch.structure(problem),
        problem.query.shape[1],
        problem.repeats,
        problem.query.shape[2].bit_length(),
        problem.first_tokens,
        problem.softcap,
        KEY=key,
        VALUE=value and _width(problem) > 0,
        **_constants(problem, upstream, config, _has_winner(rows)),
    )
    return key_grad, value_grad


def _bias_gradient(problem: Problem, upstream: Upstream, rows: Rows) -> Tensor:
    """[shape of the mask] float32; a dimension that was broadcast is summed inside the kernel."""
    assert problem.mask is not None
    config = tuning.bias_gradient(problem)
    batch, heads, count, _ = problem.query.shape
    mask_batch, mask_heads, mask_rows, keys = problem.mask.shape
    all_rows = mask_rows == 1 and count > 1
    row_blocks = -(-count // config.rows)
    gradient = problem.query.new_empty((mask_batch, mask_heads, mask_rows, keys), dtype=torch.float32)
    programs = mask_batch * mask_heads * (1 if all_rows else row_blocks) * -(-keys // config.keys)
    bias_gradient_kernel[(programs,)](
        *_inputs(problem, upstream),
        gradient,
        rows,
        launch.structure(problem),
        heads,
        problem.repeats,
        problem.first_tokens,
        problem.softcap,
        mask_heads,
        mask_rows,
        batch // mask_batch,
        heads // mask_heads,
        row_blocks if all_rows else 1,
        ALL_ROWS=all_rows,
        **_constants(problem, upstream, config, _has_winner(rows)),
    )
    return gradient


def _summed_to(values: Tensor, shape: torch.Size) -> Tensor:
    """``values`` summed over the dimensions in which ``shape`` is 1."""
    axes = [axis for axis, (full, size) in enumerate(zip(values.shape, shape, strict=True)) if size == 1 < full]
    return values.sum(axes, keepdim=True) if axes else values
