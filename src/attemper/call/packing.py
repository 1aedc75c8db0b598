"""Packed documents: where each starts among the queries and the keys, and the call of each."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from attemper.backends import table
from attemper.backends.contract import Problem
from attemper.call import transforms
from attemper.call.partial_call import ALL, part_of
from attemper.errors import InputError


@dataclass(frozen=True)
class Packing:
    """Documents that stand one after another: where each starts, [documents + 1], int."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor


def packing_of(where: str, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Packing:
    """Offsets of both, checked for what can be told without reading them."""
    for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(offsets, Tensor) or offsets.dim() != 1 or offsets.dtype not in (torch.int32, torch.int64):
            came = f"{list(offsets.shape)} {offsets.dtype}" if isinstance(offsets, Tensor) else type(offsets).__name__
            raise InputError(
                f"{where}({name}=...) must be a one-dimensional int32 or int64 tensor of offsets, got {came}."
            )
        if transforms.active() and transforms.is_mapped(offsets):
            raise InputError(
                f"{where}({name}=...) must be the same for all that torch.vmap maps over: the host reads where "
                "documents start. Map over the tokens alone (in_dims=None for offsets), or call once for each sample."
            )
    if cu_seqlens_q.shape != cu_seqlens_k.shape or cu_seqlens_q.shape[0] < 1:
        raise InputError(
            f"{where}: cu_seqlens_q and cu_seqlens_k must both be [documents + 1], got {list(cu_seqlens_q.shape)} and "
            f"{list(cu_seqlens_k.shape)}."
        )
    return Packing(cu_seqlens_q, cu_seqlens_k)


def check_offsets(where: str, packing: Packing, totals: tuple[int, int], problem: Problem | None = None) -> None:
    """Offsets must rise from 0 to the number of queries and of keys, ``totals``.

    Those on the host are read before there is a problem; those on a device with it, when it is known whether its
    backend may wait for the device.

    Raises:
        InputError: they do not; where nothing may wait, the device says so when it comes to it.
    """
    edges = (("cu_seqlens_q", packing.cu_seqlens_q, totals[0]), ("cu_seqlens_k", packing.cu_seqlens_k, totals[1]))
    for name, offsets, total in edges:
        if table.asynchronous(offsets.device.type) != (problem is not None) or torch.compiler.is_compiling():
            continue
        waiting = problem is None or table.waits(problem.backend, offsets.device.type)
        read = _check if waiting else _assert_on_device
        read(f"{where}({name}=...) must rise from 0 to {total}", offsets, total)


def _check(rule: str, offsets: Tensor, total: int) -> None:
    edges = offsets.tolist()
    if edges[0] != 0 or edges[-1] != total or any(b < a for a, b in pairwise(edges)):
        raise InputError(f"{rule}, got {edges[:8]}.")


def _assert_on_device(rule: str, offsets: Tensor, total: int) -> None:
    rising = (offsets[0] == 0) & (offsets[-1] == total) & (offsets.diff() >= 0).all()
    torch.ops.aten._assert_async.msg(rising, f"{rule}.")


@dataclass(frozen=True)
class Document:
    """One document of a packed call (or the whole of a plain one), and where it stands."""

    problem: Problem
    rows: slice
    keys: slice


def documents(problem: Problem) -> list[Document]:
    """A call cut where its documents start; reads the offsets on the host."""
    if problem.cu_seqlens_q is None or problem.cu_seqlens_k is None:
        return [Document(problem, ALL, ALL)]
    edges = zip(*(pairwise(starts.tolist()) for starts in (problem.cu_seqlens_q, problem.cu_seqlens_k)), strict=True)
    bounds = [(slice(*of_rows), slice(*of_keys)) for of_rows, of_keys in edges]
    return [_document(problem, rows, keys, number) for number, (rows, keys) in enumerate(bounds)]


def _document(whole: Problem, rows: slice, keys: slice, number: int) -> Document:
    seed = None if whole.seed is None else whole.seed + 104_729 * number
    part = part_of(whole, rows=rows, keys=keys, cu_seqlens_q=None, cu_seqlens_k=None, seed=seed)
    return Document(part, rows, keys)
