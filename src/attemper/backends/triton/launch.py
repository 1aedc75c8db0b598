"""From a problem to the arguments of a kernel: tensors, lengths and constants. Nothing here waits for the device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attemper.backends.contract import Gradients, Problem, Upstream
from attemper.backends.triton.scores import BIAS, BOOL, SPAN_MARK, VISIBLE, Constants, Structure, View
from attemper.backends.triton.tuning import Config, power_of_two

FAR = (1 << 30) - 2
"""A window side without a limit, as kernels count keys: in int32."""


def view_of(tensor: Tensor) -> View:
    """A 4-D tensor as kernels take it; a dimension of size 1 is broadcast."""
    sizes, strides = tensor.shape, tensor.stride()
    return View(
        tensor,
        0 if sizes[0] == 1 else strides[0],
        0 if sizes[1] == 1 else strides[1],
        0 if sizes[2] == 1 else strides[2],
        0 if sizes[3] == 1 else strides[3],
    )


def wide(tensors: tuple[Tensor | None, ...], block: int) -> bool:
    """Whether offsets inside a block of rows need 64 bits."""
    for tensor in tensors:
        if tensor is not None:
            _, _, row, column = tensor.stride()
            if block * abs(row) + tensor.shape[3] * abs(column) >= 1 << 31:
                return True
    return False


def structure(problem: Problem) -> Structure:
    """Where rows see keys. Pointers that a call does not need point at the query."""
    query, rows = problem.query, problem.rows
    documents = 0 if problem.cu_seqlens_q is None else problem.cu_seqlens_q.shape[0] - 1
    positions = query if problem.positions is None else problem.positions.to(query.device, non_blocking=True)
    return Structure(
        rows=query.shape[2] if rows is None else rows.shape[0],
        keys=problem.key.shape[2],
        left=min(problem.left, FAR),
        right=max(min(problem.right, FAR), -FAR),
        offset=problem.offset,
        positions=positions if rows is None else rows,
        starts_q=_offsets(problem.cu_seqlens_q, query),
        starts_k=_offsets(problem.cu_seqlens_k, query),
        documents=documents,
        steps=documents.bit_length(),
    )


def _offsets(offsets: Tensor | None, query: Tensor) -> Tensor:
    return query if offsets is None else offsets.to(query.device, non_blocking=True).contiguous()


def inputs(problem: Problem) -> tuple[View, ...]:
    """What every forward kernel reads: query, key, value, multiplier, mask, marks of keys. What a call has not is the query."""
    query, value = problem.query, problem.value
    values = view_of(query if value is None else value)
    return view_of(query), view_of(problem.key), values, _multiplier(problem), _mask(problem), _marks(problem)


def gradient_inputs(problem: Problem, upstream: Upstream) -> tuple[View, ...]:
    """What every backward kernel reads: the same, with the gradient of the output after the value."""
    query, key, value, *rest = inputs(problem)
    if width(problem) == 0:
        return query, key, query, query, *rest
    return query, key, value, view_of(upstream.output), *rest


def width(problem: Problem) -> int:
    """The head size of the output; 0 without a value."""
    return 0 if problem.value is None else problem.value.shape[3]


def _mask(problem: Problem) -> View:
    mask = problem.mask
    if mask is None:
        return View(problem.query)
    return view_of(mask.view(torch.uint8) if mask.dtype == torch.bool else mask)


def _marks(problem: Problem) -> View:
    """Marked keys: first tokens as they are, where there is no span beside them."""
    first, span = (None if keys is None else keys.view(torch.uint8) for keys in (problem.first_keys, problem.span_keys))
    if span is not None:
        span = span * SPAN_MARK.value
        first = span if first is None else first + span
    return View(problem.query) if first is None else view_of(first[:, None, None])


def _multiplier(problem: Problem) -> View:
    """scale / T in float32, with stride 0 where it is broadcast."""
    multiplier = problem.multiplier.to(torch.float32)
    batch, head, row = (0 if size == 1 else by for size, by in zip(multiplier.shape, multiplier.stride(), strict=True))
    return View(multiplier, batch, head, row)


def constants(
    problem: Problem, config: Config, bits: int, upstream: Upstream | None = None, fused: bool = False, **more: Any
) -> dict[str, Any]:
    """CALL, what a kernel is specialised for, and how the compiler is to treat it. ``more``: other fields of CALL.

    fused: whether the compiler may join a product and a sum into one instruction, which rounds once. Where it may not,
    s - m with s recomputed inside would not be 0 at the maximum.
    """
    mask, size = problem.mask, problem.query.shape[3]
    biased = mask is not None and mask.dtype != torch.bool
    tensors = (problem.query, problem.key, problem.value, None if upstream is None else upstream.output)
    fields: dict[str, Any] = {
        "STATE": bits,
        "MASK": VISIBLE.value if mask is None else BIAS.value if biased else BOOL.value,
        # At or below it a bias hides its key.
        "LIMIT": torch.finfo(mask.dtype).min / 2 if mask is not None and biased else 0.0,
        "FIRST": problem.first_keys is not None,
        "SOFTCAP": problem.softcap > 0,
        "SINK": problem.sink is not None,
        "MAXIMUM": upstream is not None and problem.maximum_gradient,
        "POSITIONS": problem.positions is not None,
        "PACKED": problem.packed,
        "BOTTOM_RIGHT": problem.packed and problem.bottom_right,
        "D": size,
        "BLOCK_D": power_of_two(size),
        "E": width(problem),
        "BLOCK_E": power_of_two(width(problem)),
        "BLOCK_M": config.rows,
        "BLOCK_N": config.keys,
        "WIDE": wide(tensors, max(config.rows, config.keys)),
    }
    return {
        "CALL": Constants(**fields | more),
        "num_warps": config.warps,
        "num_stages": config.stages,
        "enable_fp_fusion": fused,
    }


class Bias(NamedTuple):
    """The gradient of a bias, and how a kernel that makes it is launched."""

    gradient: Tensor
    programs: int
    sizes: tuple[int, ...]
    """Heads and rows of the bias; how many batches, heads and blocks of rows one entry of it stands for."""
    all_rows: bool


def bias(problem: Problem, config: Config) -> Bias:
    """[shape of the mask] float32; a dimension that was broadcast is summed inside the kernel."""
    assert problem.mask is not None
    batch, heads, count, _ = problem.query.shape
    batches, mask_heads, rows, keys = problem.mask.shape
    all_rows = rows == 1 and count > 1
    blocks = -(-count // config.rows)
    return Bias(
        gradient=problem.query.new_empty(problem.mask.shape, dtype=torch.float32),
        programs=batches * mask_heads * (1 if all_rows else blocks) * -(-keys // config.keys),
        sizes=(mask_heads, rows, batch // batches, heads // mask_heads, blocks if all_rows else 1),
        all_rows=all_rows,
    )


def like(tensor: Tensor | None, wanted: bool) -> Tensor | None:
    """Room for the gradient of a tensor, where it is wanted."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format) if wanted and tensor is not None else None


def nothing(tensors: tuple[Tensor | None, ...], needs: tuple[bool, ...]) -> Gradients:
    """Gradients of a call without rows or without keys."""
    return Gradients(
        *(
            torch.zeros_like(tensor) if needed and tensor is not None else None
            for tensor, needed in zip(tensors, needs, strict=True)
        )
    )


def sum_to(values: Tensor, shape: torch.Size) -> Tensor:
    """``values`` summed over the dimensions in which ``shape`` is 1."""
    axes = [axis for axis, (full, size) in enumerate(zip(values.shape, shape, strict=True)) if size == 1 < full]
    return values.sum(axes, keepdim=True) if axes else values
