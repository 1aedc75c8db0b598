"""Grids, strides and constants: from a problem to the arguments of a kernel. Nothing here waits for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attemper.backends.contract import Problem
from attemper.backends.triton.scores import BIAS, BOOL, VISIBLE, Strided, Structure
from attemper.backends.triton.softmax.state import letters
from attemper.backends.triton.tuning import Config, power_of_two

FAR = (1 << 30) - 2
"""A window side without a limit, as kernels count keys: in int32."""


def strided(tensor: Tensor) -> Strided:
    """A 4-D tensor as kernels take it; a dimension of size 1 is broadcast."""
    sizes, strides = tensor.shape, tensor.stride()
    return Strided(
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


def mask_of(problem: Problem) -> tuple[Strided, int, float]:
    """The mask, its kind, and the bias at or below which a key is hidden."""
    mask = problem.mask
    if mask is None:
        return Strided(problem.query), VISIBLE.value, 0.0
    if mask.dtype == torch.bool:
        return strided(mask.view(torch.uint8)), BOOL.value, 0.0
    return strided(mask), BIAS.value, torch.finfo(mask.dtype).min / 2


def first_of(problem: Problem) -> Strided:
    first = problem.first_keys
    if first is None:
        return Strided(problem.query)
    return strided(first.view(torch.uint8)[:, None, None])


def constants(problem: Problem, config: Config) -> dict[str, Any]:
    """What every kernel is specialised for, and how the compiler is to treat it.

    Products and sums stay apart unless a kernel joins them itself: s - m with s recomputed inside would not be 0 at
    the maximum, and the least entropy would be negative.
    """
    _, kind, limit = mask_of(problem)
    size = problem.query.shape[3]
    return {
        "LETTERS": letters(problem.fields),
        "MASK": kind,
        "LIMIT": limit,
        "FIRST": problem.first_keys is not None,
        "SOFTCAP": problem.softcap > 0,
        "POSITIONS": problem.positions is not None,
        "PACKED": problem.packed,
        "BOTTOM_RIGHT": problem.packed and problem.bottom_right,
        "D": size,
        "BLOCK_D": power_of_two(size),
        "BLOCK_M": config.rows,
        "BLOCK_N": config.keys,
        "WIDE": wide((problem.query, problem.key, problem.value), max(config.rows, config.keys)),
        "num_warps": config.warps,
        "num_stages": config.stages,
        "enable_fp_fusion": False,
    }


def multiplier_of(problem: Problem) -> Strided:
    """scale / T in float32, with stride 0 where it is broadcast."""
    multiplier = problem.multiplier.to(torch.float32)
    batch, head, row = (0 if size == 1 else by for size, by in zip(multiplier.shape, multiplier.stride(), strict=True))
    return Strided(multiplier, batch, head, row)
