"""A problem as the C++ library takes it: addresses, strides and sizes (``source/arguments.h``, field by field)."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p

import torch
from torch import Tensor

from attemper.backends.contract import Problem
from attemper.backends.normalizers import CODES
from attemper.statistics import Column

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3, torch.bool: 4}


STATISTICS = 16
"""Addresses of ``Statistics`` in ``source/arguments.h``: those of ``rows.DERIVED``, and of the counts."""


class View(ctypes.Structure):
    """A tensor of up to four dimensions; strides in elements, 0 where it is broadcast."""

    _fields_ = (("data", c_void_p), ("type", c_int64), ("stride", c_int64 * 4))


class Arguments(ctypes.Structure):
    """One call. It owns nothing: whoever fills it keeps the tensors until the call is over."""

    _fields_ = (
        ("size", c_int64),
        ("query", View), ("key", View), ("value", View), ("mask", View),
        ("multiplier", c_void_p), ("multiplier_stride", c_int64 * 3),
        ("sink", c_void_p), ("positions", c_void_p),
        ("first_keys", c_void_p), ("first_keys_stride", c_int64 * 2),
        ("span_keys", c_void_p), ("span_keys_stride", c_int64 * 2),
        ("batch", c_int64), ("heads", c_int64), ("groups", c_int64), ("queries", c_int64), ("keys", c_int64),
        ("depth", c_int64), ("width", c_int64),
        ("left", c_int64), ("right", c_int64), ("offset", c_int64), ("first_tokens", c_int64),
        ("softcap", c_double),
        ("place", c_int64 * len(Column)),
        ("output", View), ("state", c_void_p), ("threads", c_int64),
        ("statistics", c_void_p * STATISTICS),
        ("grad_output", View), ("grad_state", c_void_p),
        ("grad_query", c_void_p), ("grad_key", c_void_p), ("grad_value", c_void_p),
        ("grad_mask", c_void_p), ("grad_mask_stride", c_int64 * 4),
        ("grad_multiplier", c_void_p), ("grad_sink", c_void_p), ("maximum_gradient", c_int64),
    )  # fmt: skip


# Filling a ctypes structure field by field takes four times as long as packing its slots, which are 8 bytes each.
_SIZE = ctypes.sizeof(Arguments)
_BEFORE = Arguments.softcap.offset // 8
_PACK = struct.Struct(f"@{_BEFORE}qd{_SIZE // 8 - _BEFORE - 1}q")
_ROWWISE = struct.Struct("@qdqq")
"""What follows an ``Arguments`` in a ``RowwiseCall``: normalizer, number, per_head and its gradient."""
_ABSENT = (0,) * 6
_NO_STRIDES = (0,) * 3
_NO_STATISTICS = (0,) * STATISTICS
_NO_GRADIENTS = (0,) * ((_SIZE - Arguments.grad_output.offset) // 8)


def address(tensor: Tensor | None) -> int:
    """Where a tensor's numbers stand; 0 without one. Every address that leaves for C++ is taken here."""
    if tensor is None:
        return 0
    # The dispatcher resolves both; who goes past it has to look.
    assert not tensor.is_neg(), "the numbers in its memory have the other sign"
    assert not tensor._is_zerotensor(), "it has no memory"
    return tensor.data_ptr()


def view(tensor: Tensor | None) -> tuple[int, ...]:
    """The slots of a ``View``: the tensor where it lies, whatever its strides."""
    if tensor is None or tensor.numel() == 0:
        return _ABSENT
    return (address(tensor), _TYPES[tensor.dtype], *tensor.stride())


def broadcast_view(tensor: Tensor | None) -> tuple[int, ...]:
    """The same of a tensor whose dimensions of size 1 stand for all places."""
    whole = view(tensor)
    return whole if tensor is None else (*whole[:2], *broadcast_strides(tensor))


def broadcast_strides(tensor: Tensor) -> Sequence[int]:
    """Strides in elements, 0 where a dimension has size 1."""
    return [0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True)]


def describe(
    problem: Problem,
    output: Tensor,
    state: Tensor,
    gradients: Sequence[int] = _NO_GRADIENTS,
    grad_per_head: Tensor | None = None,
) -> tuple[bytes, tuple[Tensor | None, ...]]:
    """The call as the bytes of an ``Arguments`` (rowwise: a ``RowwiseCall``), and small tensors that must outlive it.

    ``gradients``: the slots from ``grad_output`` on.
    """
    query, key, value = problem.query, problem.key, problem.value
    batch, heads, queries, depth = query.shape
    groups, keys = key.shape[1:3]
    multiplier = problem.multiplier
    if multiplier.dtype is not torch.float32:
        multiplier = multiplier.to(torch.float32)
    sink, per_head = _numbers(problem.sink), _numbers(problem.per_head)
    positions = None if problem.positions is None else problem.positions.to("cpu", torch.int64).contiguous()
    first = None if problem.first_keys is None else problem.first_keys.to(torch.bool)
    span = problem.span_keys
    places = [-1] * len(Column)
    for place, column in enumerate(problem.columns):
        places[column] = place
    call = _PACK.pack(
        _SIZE,
        *view(query), *view(key), *view(value), *broadcast_view(problem.mask),
        address(multiplier), *(_NO_STRIDES if multiplier.numel() == 1 else broadcast_strides(multiplier)),
        address(sink), address(positions),
        address(first), *((0, 0) if first is None else broadcast_strides(first)),
        address(span), *((0, 0) if span is None else broadcast_strides(span)),
        batch, heads, groups, queries, keys, depth, 0 if value is None else value.shape[3],
        min(problem.left, 1 << 60), min(problem.right, 1 << 60), problem.offset, min(problem.first_tokens, keys),
        problem.softcap,
        *places,
        *view(output), address(state), torch.get_num_threads(), *_NO_STATISTICS,
        *gradients,
    )  # fmt: skip
    if problem.rowwise:
        call += _ROWWISE.pack(CODES[problem.normalizer], problem.number, address(per_head), address(grad_per_head))
    return call, (multiplier, sink, per_head, positions, first, span)


def _numbers(per_head: Tensor | None) -> Tensor | None:
    """[H] as C++ reads it."""
    return None if per_head is None else per_head.detach().to(torch.float32).contiguous()
