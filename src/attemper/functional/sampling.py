"""Measuring some of the query rows of each sequence."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attemper.errors import InputError
from attemper.functional.call import Call, Packing


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
    start = torch.rand((), generator=generator, dtype=torch.float64)
    positions = ((start + torch.arange(rows, dtype=torch.float64)) * (queries / rows)).floor().to(torch.int64)
    positions = positions.clamp(max=queries - 1)
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


def _places(call: Call, rows: Tensor) -> tuple[Tensor, Packing | None]:
    """The diagonal key of each of ``rows``, counted within its document, and where documents start among the rows."""
    if call.packing is None:
        return rows + (call.key.shape[2] - call.query.shape[2] if call.bottom_right else 0), None
    starts_q, starts_k = call.packing.cu_seqlens_q, call.packing.cu_seqlens_k
    rows = rows.to(starts_q)
    document = torch.searchsorted(starts_q, rows, right=True) - 1
    places = rows - starts_q[document]
    if call.bottom_right:
        places += (starts_k.to(rows.device).diff() - starts_q.diff())[document]
    return places.to(torch.int64), Packing(torch.searchsorted(rows, starts_q).to(starts_q), starts_k)
