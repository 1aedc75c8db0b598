"""Grids and arguments of the rowwise kernels: from a problem with a normalizer to its results and gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from attemper.backends.contract import Gradients, Problem, Upstream
from attemper.backends.triton import launch, tuning
from attemper.backends.triton.rowwise.backward_bias import rowwise_bias_kernel
from attemper.backends.triton.rowwise.backward_key import rowwise_key_kernel
from attemper.backends.triton.rowwise.backward_query import rowwise_query_kernel
from attemper.backends.triton.rowwise.forward import rowwise_forward_kernel
from attemper.backends.triton.rowwise.gradient import NUMBERS, PLACES, Rows
from attemper.backends.triton.rowwise.normalizers import CODES
from attemper.backends.triton.rowwise.state import bits, relative


def forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """``backends.triton.forward`` of a normalizer that needs all keys of a row."""
    query = problem.query
    structure = launch.structure(problem)
    batch, heads, count = *query.shape[:2], structure.rows
    output = query.new_empty((batch, heads, count, launch.width(problem)))
    state = query.new_empty((len(problem.columns), batch, heads, count), dtype=torch.float32)
    if batch * heads * count > 0:
        call = _Launch(problem, count)
        rowwise_forward_kernel[(call.programs,)](
            *launch.inputs(problem),
            call.per_head,
            output,
            state,
            call.listed,
            *structure,
            heads,
            problem.repeats,
            *call.numbers,
            GATHER=problem.rows is not None,
            **call.constants,
        )
    return output, state, state.new_empty(0)


def backward(problem: Problem, state: Tensor, upstream: Upstream, needs: tuple[bool, ...]) -> Gradients:
    """Gradients for ``problem.differentiable``, those that ``needs`` marks."""
    tensors = problem.differentiable
    query, key, value, mask, multiplier, _, per_head = (
        needed and tensor is not None for needed, tensor in zip(needs, tensors, strict=True)
    )
    if 0 in problem.query.shape[:3] or problem.key.shape[2] == 0:
        return launch.nothing(tensors, needs)
    grads = Gradients()
    call = _Backward(problem, state, upstream)
    grads.query, by_row, of_head = call.of_rows(query, multiplier, per_head)
    grads.multiplier = None if by_row is None else launch.sum_to(by_row, problem.multiplier.shape)
    grads.per_head = None if of_head is None else of_head.sum((0, 2))
    if key or value:
        grads.key, grads.value = call.of_keys(key, value)
    if mask:
        grads.mask = call.of_bias()
    return grads


class _Launch:
    """What the kernels of a call share: how they are cut, their lists of blocks, numbers and constants."""

    def __init__(self, problem: Problem, count: int, upstream: Upstream | None = None) -> None:
        batch, heads = problem.query.shape[:2]
        self.problem, self.config = problem, tuning.rowwise(problem)
        self.programs = batch * heads * -(-count // self.config.rows)
        # What is listed last may stand behind the last block that counts.
        places = -(-problem.key.shape[2] // self.config.keys) + 1
        self.listed = torch.empty((self.programs, places), dtype=torch.int32, device=problem.query.device)
        self.per_head = problem.query if problem.per_head is None else problem.per_head
        self.numbers = (problem.first_tokens, problem.softcap, problem.number, places)
        self.constants = tuning.all_registers() | launch.constants(
            problem,
            self.config,
            bits(problem.columns),
            upstream,
            NORMALIZER=CODES[problem.normalizer],
            RELATIVE=relative(problem.columns),
        )


class _Backward(_Launch):
    """One backward pass. ``of_rows`` comes first, and leaves what the others read."""

    def __init__(self, problem: Problem, state: Tensor, upstream: Upstream) -> None:
        planes = problem.query.shape[:3]
        super().__init__(problem, planes[2], upstream)
        self.marks = torch.zeros(self.listed.shape, dtype=torch.uint8, device=problem.query.device)
        self.rows = Rows(
            state=state.contiguous(),
            above=upstream.state.contiguous(),
            numbers=state.new_empty((NUMBERS, *planes)),
            places=torch.empty((PLACES, *planes), dtype=torch.int32, device=state.device),
            plane=planes.numel(),
        )
        self.inputs = (*launch.gradient_inputs(problem, upstream), self.per_head)

    def of_rows(
        self, query: bool, multiplier: bool, per_head: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The query's gradient; the multiplier's and that of what is given per head, of each row [B, H, Q]."""
        problem, numbers = self.problem, self.rows.numbers
        gradient = launch.like(problem.query, query)
        by_row, of_head = launch.like(numbers[0], multiplier), launch.like(numbers[0], per_head)
        rowwise_query_kernel[(self.programs,)](
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
        key_grad, value_grad = launch.like(problem.key, key), launch.like(problem.value, value)
        rowwise_key_kernel[(batch * groups * -(-count // self.config.keys),)](
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
            VALUE=value and launch.width(problem) > 0,
            **self.constants,
        )
        return key_grad, value_grad

    def of_bias(self) -> Tensor:
        problem = self.problem
        bias = launch.bias(problem, self.config)
        rowwise_bias_kernel[(bias.programs,)](
            *self.inputs,
            bias.gradient,
            self.rows,
            self.marks,
            *launch.structure(problem),
            problem.query.shape[1],
            problem.repeats,
            *self.numbers,
            *bias.sizes,
            ALL_ROWS=bias.all_rows,
            **self.constants,
        )
        return bias.gradient
