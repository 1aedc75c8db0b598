"""Measuring some of the query rows of each sequence."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attemper.backends import table
from attemper.call import transforms
from attemper.call.options import Call, Packing
from attemper.errors import InputError


def sampled(where: str, call: Call, rows: int, generator: torch.Generator | None) -> Call:
    """The call on ``rows`` of its queries, evenly strided from a random start; as it is where it has no more than
    that. Of packed documents, which are one row of queries, each gives its share.
    """
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise InputError(f"{where}(rows=...) must be an int of at least 1, or None for all rows; got {rows!r}.")
    if "key_mass" in call.names:
        raise InputError(f"{where}(rows=...) cannot sample key_mass, a sum over all rows: leave it out of stats=.")
    queries = call.query.shape[2]
    if rows >= queries:
        return call
    positions = _positions(call, rows, generator)
    if gathers(call):
        # The kernel takes these rows as it loads them, each at its own place.
        return replace(call, rows=positions)
    return picked(call, positions)


def picked(call: Call, positions: Tensor) -> Call:
    """The call on these rows of its queries, [rows], each at its own place among the keys."""
    places, packing = _places(call, positions)

    def chosen(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or tensor.shape[2] == 1:
            return tensor
        return tensor.index_select(2, positions.to(tensor.device))

    query, multiplier = chosen(call.query), chosen(call.multiplier)
    assert query is not None
    assert multiplier is not None
    return replace(
        call,
        query=query,
        mask=chosen(call.mask),
        multiplier=multiplier,
        positions=places,
        packing=packing,
        rows=positions,
        bottom_right=False,
    )


def gathers(call: Call) -> bool:
    """Whether the kernel itself picks rows: Triton's, which has no gradient there."""
    tensors = (call.query, call.key, call.mask, call.multiplier, call.sink, call.per_head)
    graph = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    return call.backend == "triton" and not graph and not transforms.active()


def waits(call: Call, tensor: Tensor) -> bool:
    """Whether reading ``tensor`` on the host may wait for its device: Triton's calls are launched and left alone."""
    return not (call.backend == "triton" and table.asynchronous(tensor.device.type))


def _positions(call: Call, rows: int, generator: torch.Generator | None) -> Tensor:
    """Which rows: on the CPU, or on the query's device where nothing may wait for it."""
    device = torch.device("cpu") if waits(call, call.query) else call.query.device
    drawn = device if generator is None else generator.device
    # A start from the CPU is one number among the arguments of the device's first operation: nothing is copied.
    start = torch.rand((), generator=generator, dtype=torch.float64, device=drawn)
    queries = call.query.shape[2]
    strided = (start + torch.arange(rows, dtype=torch.float64, device=device)) * (queries / rows)
    return strided.floor().to(torch.int64).clamp(max=queries - 1)


def _places(call: Call, rows: Tensor) -> tuple[Tensor, Packing | None]:
    """The diagonal key of each of ``rows``, counted within its document, and where documents start among the rows."""
    if call.packing is None:
        return rows + (call.key.shape[2] - call.query.shape[2] if call.bottom_right else 0), None
    starts_q, starts_k = (
        starts if rows.device.type == "cpu" else starts.to(rows.device, non_blocking=True)
        for starts in (call.packing.cu_seqlens_q, call.packing.cu_seqlens_k)
    )
    rows = rows.to(starts_q)
    document = torch.searchsorted(starts_q, rows, right=True) - 1
    places = rows - starts_q[document]
    if call.bottom_right:
        places += (starts_k.to(rows.device).diff() - starts_q.diff())[document]
    return places.to(torch.int64), Packing(torch.searchsorted(rows, starts_q).to(starts_q), starts_k)
