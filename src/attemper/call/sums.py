"""Statistics of a call as sums per head on its device, by one operator: what a watch keeps, and nothing waits for it.

The sums hold what readings show. A call that asks for more, or that Triton does not compute, is reduced from
``AttentionStats`` instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attemper.backends import table
from attemper.backends.sums import BINNED
from attemper.call.formulas import statistics_of
from attemper.call.operator import COLUMNS, SUMMED, WIDTH, column, emptied, empty_sums, joined, sampled_positions
from attemper.call.options import Call
from attemper.call.result import AttentionStats
from attemper.call.state import LazyState, state_of
from attemper.statistics import BY_NAME, state_columns

_raised: dict[torch.device, Tensor] = {}
"""Flags that are never down."""


def accumulates(call: Call) -> bool:
    """Whether ``accumulated`` serves this call: softmax on Triton, with no statistic that the sums lack."""
    softmax = call.normalizer == "softmax" and set(state_columns(call.names)) <= set(SUMMED)
    return call.backend == "triton" and softmax and call.positions is None and set(BY_NAME).isdisjoint(call.names)


def fits(dtype: str, size: int) -> bool:
    """Whether Triton's kernels take queries of this type and head size, wherever they are, and are there at all."""
    given = table.Given(dtype.removeprefix("torch."), "cuda", size)
    return next(backend for backend in table.BACKENDS if backend.name == "triton").reason(frozenset(), given) is None


@dataclass(frozen=True)
class Accumulated:
    """Sums of a call and the state of its rows, from which statistics per row follow once somebody asks."""

    sums: Tensor
    """[H, WIDTH] float64."""
    state: Tensor
    """[F, B, H, Q] float32."""
    included: Tensor | None
    """[B, Q] bool: the rows that count; None for all."""
    names: tuple[str, ...]
    sink: Tensor | None
    first_tokens: int
    keys: int
    rows: Tensor | None
    population: int

    def statistics(self) -> AttentionStats:
        """The statistics of the same rows, from the same state."""
        rows = state_of(SUMMED, self.state)
        stats = AttentionStats(
            statistics_of(rows, self.names, self.sink), rows, sink=self.sink, first_tokens=self.first_tokens,
            keys=self.keys, rows=self.rows, population=self.population,
        )  # fmt: skip
        return stats if self.included is None else stats.where(self.included[:, None])


def accumulated(call: Call, included: Tensor | None, population: int) -> Accumulated:
    """Runs a call that ``accumulates``. ``included`` [B, Q] bool of its measured rows; ``population``: all its rows."""
    batch, heads, queries, _ = call.query.shape
    measured = queries if call.rows is None else call.rows.shape[0]
    device = call.query.device
    if device not in _raised:
        _raised[device] = torch.ones(1, dtype=torch.int32, device=device)
    sums = empty_sums(heads, device)
    state = call.query.new_empty((len(SUMMED), batch, heads, measured), dtype=torch.float32)
    add(call, sums, _raised[device], rows=call.rows, included=included, state=state)
    # The owner of the sink may change it before anybody asks.
    sink = None if call.sink is None else call.sink.detach().clone()
    return Accumulated(
        sums, state, included, call.names, sink, call.first_tokens, call.key.shape[2], call.rows, population
    )


def summed(stats: AttentionStats) -> Tensor | None:
    """Rows that were measured already as sums per head, [H, WIDTH], by one pass; None where no kernel can do it."""
    state = stats._state
    if stats.normalizer != "softmax" or stats._sink is not None or not isinstance(state, LazyState):
        return None
    return state.sums(stats._included, stats._first_tokens)


def add(
    call: Call, sums: Tensor, flag: Tensor, *, rows: Tensor | None = None, included: Tensor | None = None,
    state: Tensor | None = None,
) -> None:  # fmt: skip
    """Adds the statistics of a call to ``sums``, unless ``flag`` [1] int on the device is down."""
    packing = call.packing
    with torch.no_grad():
        torch.ops.attemper.accumulate(
            call.query, call.key, call.mask, call.multiplier, call.sink, call.first_keys, included, rows, flag, sums,
            call.left, call.right, call.bottom_right, call.softcap or 0.0, call.first_tokens,
            None if packing is None else packing.cu_seqlens_q, None if packing is None else packing.cu_seqlens_k, state,
        )  # fmt: skip


__all__ = [
    "BINNED",
    "COLUMNS",
    "WIDTH",
    "Accumulated",
    "accumulated",
    "accumulates",
    "add",
    "column",
    "emptied",
    "empty_sums",
    "fits",
    "joined",
    "sampled_positions",
    "summed",
]
