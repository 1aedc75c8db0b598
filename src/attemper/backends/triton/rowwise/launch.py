"""Grids and arguments of the row kernels: from a problem with a normalizer to its results and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attemper.backends.contract import Gradients, Problem, Upstream
from attemper.backends.triton import launch, tuning
from attemper.backends.triton.rowwise.backward_bias import row_bias_kernel
from attemper.backends.triton.rowwise.backward_key import row_key_kernel
from attemper.backends.triton.rowwise.backward_query import row_query_kernel
from attemper.backends.triton.rowwise.forward import row_forward_kernel
from attemper.backends.triton.rowwise.gradient import NUMBERS, PLACES, Rows
from attemper.backends.triton.rowwise.maps import CODES
from attemper.backends.triton.rowwise.state import letters, relative
from attemper.backends.triton.softmax.backward import _inputs, _nothing, _summed_to, _width
from attemper.backends.triton.tuning import Config


def forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """``backends.triton.forward`` of a map that is found on whole rows."""
    query, value = problem.query, problem.value
    structure = launch.structure(problem)
    batch, heads, count = *query.shape[:2], structure.rows
    width = 0 if value is None else value.shape[3]
    output = query.new_empty((batch, heads, count, width))
    state = query.new_empty((len(problem.fields), batch, heads, count), dtype=torch.float32)
    if batch * heads * count == 0:
        return output, state, state.new_empty(0)
    config = tuning.rows(problem)
    programs = batch * heads * -(-count // config.rows)
    listed, places = _lists(problem, config, programs)
    row_forward_kernel[(programs,)](
        launch.strided(query),
        launch.strided(problem.key),
        launch.strided(query if value is None else value),
        launch.multiplier_of(problem),
        launch.mask_of(problem)[0],
        launch.first_of(problem),
        query if problem.per_head is None else problem.per_head,
        output,
        state,
        listed,
        *structure,
        heads,
        problem.repeats,
        problem.first_tokens,
        problem.softcap,
        problem.number,
        places,
        GATHER=problem.rows is not None,
        E=width,
        BLOCK_E=tuning.power_of_two(width),
        **_constants(problem, config),
    )
    return output, state, state.new_empty(0)


def backward(problem: Problem, state: Tensor, upstream: Upstream, needs: tuple[bool, ...]) -> Gradients:
    """Gradients for ``problem.differentiable``, those that ``needs`` marks."""
    tensors = problem.differentiable
    query, key, value, mask, multiplier, _, per_head = (
        needed and tensor is not None for needed, tensor in zip(needs, tensors, strict=True)
    )
    if 0 in problem.query.shape[:3] or problem.key.shape[2] == 0:
        return _nothing(tensors, needs)
    grads = Gradients()
    call = _Backward(problem, state, upstream)
    grads.query, by_row, of_head = call.of_rows(query, multiplier, per_head)
    grads.multiplier = None if by_row is None else _summed_to(by_row, problem.multiplier.shape)
    grads.per_head = None if of_head is None else of_head.sum((0, 2))
    if key or value:
        grads.key, grads.value = call.of_keys(key, value)
    if mask:
        grads.mask = call.of_bias()
    return grads


class _Backward:
    """One backward pass: what its kernels share. ``of_rows`` comes first, and leaves what the others read."""

    def __init__(self, problem: Problem, state: Tensor, upstream: Upstream) -> None:
        batch, heads, count, _ = problem.query.shape
        self.problem, self.config = problem, tuning.rows(problem)
        self.blocks = -(-count // self.config.rows)
        self.programs = batch * heads * self.blocks
        self.listed, self.places = _lists(problem, self.config, self.programs)
        self.marks = torch.zeros(self.listed.shape, dtype=torch.uint8, device=problem.query.device)
        planes = (batch, heads, count)
        self.rows = Rows(
            state=state.contiguous(),
            above=upstream.state.contiguous(),
            numbers=state.new_empty((NUMBERS, *planes)),
            places=torch.empty((PLACES, *planes), dtype=torch.int32, device=state.device),
            plane=batch * heads * count,
        )
        per_head = problem.query if problem.per_head is None else problem.per_head
        self.inputs = (*_inputs(problem, upstream), per_head)
        self.numbers = (problem.first_tokens, problem.softcap, problem.number, self.places)
        block = max(self.config.rows, self.config.keys)
        constants = _constants(problem, self.config)
        self.constants = constants | {
            "MAXIMUM": problem.maximum_gradient,
            "E": _width(problem),
            "BLOCK_E": tuning.power_of_two(_width(problem)),
            "WIDE": constants["WIDE"] or launch.wide((upstream.output,), block),
        }

    def of_rows(
        self, query: bool, multiplier: bool, per_head: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The query's gradient; the multiplier's and that of what is given per head, of each row [B, H, Q]."""
        problem, numbers = self.problem, self.rows.numbers
        gradient = torch.empty_like(problem.query, memory_format=torch.contiguous_format) if query else None
        by_row = torch.empty_like(numbers[0]) if multiplier else None
        of_head = torch.empty_like(numbers[0]) if per_head else None
        row_query_kernel[(self.programs,)](
            *self.inputs,
            problem.query if gradient is None else gradient,
            numbers if by_row is None else by_row,
            numbers if of_head is None else of_head,
            self.rows,
            self.listed,
            self.marks,
            *launch.structure(problem),
            problem.query.shape[1],
            problem.repeats,
            *self.numbers,
            QUERY=query,
            MULTIPLIER=multiplier,
            PER_HEAD=per_head,
            **self.constants,
        )
        return gradient, by_row, of_head

    def of_keys(self, key: bool, value: bool) -> tuple[Tensor | None, Tensor | None]:
        problem = self.problem
        batch, groups, count, _ = problem.key.shape
        key_grad = torch.empty_like(problem.key, memory_format=torch.contiguous_format) if key else None
        value_grad = None
        if value and problem.value is not None:
            value_grad = torch.empty_like(problem.value, memory_format=torch.contiguous_format)
        row_key_kernel[(batch * groups * -(-count // self.config.keys),)](
            *self.inputs,
            problem.key if key_grad is None else key_grad,
            problem.key if value_grad is None else value_grad,
            self.rows,
            self.marks,
            *launch.structure(problem),
            problem.query.shape[1],
            problem.repeats,
            problem.query.shape[2].bit_length(),
            *self.numbers,
            KEY=key,
            VALUE=value and _width(problem) > 0,
            **self.constants,
        )
        return key_grad, value_grad

    def of_bias(self) -> Tensor:
        """[shape of the mask] float32; a dimension that was broadcast is summed inside the kernel."""
        problem = self.problem
        assert problem.mask is not None
        batch, heads, count, _ = problem.query.shape
        mask_batch, mask_heads, mask_rows, keys = problem.mask.shape
        all_rows = mask_rows == 1 and count > 1
        gradient = problem.query.new_empty((mask_batch, mask_heads, mask_rows, keys), dtype=torch.float32)
        blocks = 1 if all_rows else self.blocks
        row_bias_kernel[(mask_batch * mask_heads * blocks * -(-keys // self.config.keys),)](
            *self.inputs,
            gradient,
            self.rows,
            self.marks,
            *launch.structure(problem),
            heads,
            problem.repeats,
            *self.numbers,
            mask_heads,
            mask_rows,
            batch // mask_batch,
            heads // mask_heads,
            self.blocks if all_rows else 1,
            ALL_ROWS=all_rows,
            **self.constants,
        )
        return gradient


def _lists(problem: Problem, config: Config, programs: int) -> tuple[Tensor, int]:
    """Room for the lists of blocks, and how much of it each program has."""
    # What is listed last may stand behind the last block that counts.
    places = -(-problem.key.shape[2] // config.keys) + 1
    return torch.empty((programs, places), dtype=torch.int32, device=problem.query.device), places


def _constants(problem: Problem, config: Config) -> dict[str, Any]:
    return (
        tuning.all_registers()
        | launch.constants(problem, config)
        | {
            "MAP": CODES[problem.normalizer],
            "RELATIVE": relative(problem.fields),
            "LETTERS": letters(problem.fields),
        }
    )
