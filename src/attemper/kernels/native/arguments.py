"""A problem as the C++ library takes it: addresses, strides and sizes (``source/arguments.h``, field by field)."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p

import torch
from torch import Tensor

from attemper.kernels.problem import Problem

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3, torch.bool: 4}
LETTERS = "mznavcft"
"""Letters of the state that one pass gives; gini and key_mass need a second."""


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
        ("batch", c_int64), ("heads", c_int64), ("groups", c_int64), ("queries", c_int64), ("keys", c_int64),
        ("depth", c_int64), ("width", c_int64),
        ("left", c_int64), ("right", c_int64), ("offset", c_int64), ("first_tokens", c_int64),
        ("softcap", c_double),
        ("place", c_int64 * len(LETTERS)),
        ("output", View), ("state", c_void_p), ("threads", c_int64),
        ("grad_output", View), ("grad_state", c_void_p),
        ("grad_query", c_void_p), ("grad_key", c_void_p), ("grad_value", c_void_p),
        ("grad_mask", c_void_p), ("grad_mask_stride", c_int64 * 4),
        ("grad_multiplier", c_void_p), ("grad_sink", c_void_p), ("maximum_gradient", c_int64),
    )  # fmt: skip


def view(tensor: Tensor | None) -> View:
    """The tensor where it lies, whatever its strides; broadcast dimensions (size 1) get stride 0."""
    if tensor is None or tensor.numel() == 0:
        return View()
    strides = [0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    return View(tensor.data_ptr(), _TYPES[tensor.dtype], (c_int64 * 4)(*strides))


def described(problem: Problem, output: Tensor, state: Tensor) -> tuple[Arguments, list[Tensor]]:
    """The call, and small tensors made for it that must outlive it."""
    batch, heads, queries, depth = problem.query.shape
    multiplier = problem.multiplier.detach().to(torch.float32)
    sink = None if problem.sink is None else problem.sink.detach().to(torch.float32).contiguous()
    positions = None if problem.positions is None else problem.positions.to("cpu", torch.int64).contiguous()
    first = None if problem.first_keys is None else problem.first_keys.to(torch.bool)
    held = [tensor for tensor in (multiplier, sink, positions, first) if tensor is not None]
    wanted = [problem.fields.find(letter) for letter in LETTERS]
    call = Arguments(
        size=ctypes.sizeof(Arguments),
        query=view(problem.query), key=view(problem.key), value=view(problem.value), mask=view(problem.mask),
        multiplier=multiplier.data_ptr(),
        multiplier_stride=(c_int64 * 3)(*view_strides(multiplier)),
        sink=None if sink is None else sink.data_ptr(),
        positions=None if positions is None else positions.data_ptr(),
        first_keys=None if first is None else first.data_ptr(),
        first_keys_stride=(c_int64 * 2)(*((0, 0) if first is None else view_strides(first))),
        batch=batch, heads=heads, groups=problem.key.shape[1], queries=queries, keys=problem.key.shape[2],
        depth=depth, width=0 if problem.value is None else problem.value.shape[3],
        left=min(problem.left, 1 << 60), right=min(problem.right, 1 << 60), offset=problem.offset,
        first_tokens=min(problem.first_tokens, problem.key.shape[2]), softcap=problem.softcap,
        place=(c_int64 * len(LETTERS))(*wanted),
        output=view(output), state=state.data_ptr(), threads=torch.get_num_threads(),
    )  # fmt: skip
    return call, held


def view_strides(tensor: Tensor) -> list[int]:
    """Strides in elements, 0 where a dimension has size 1."""
    return [0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
