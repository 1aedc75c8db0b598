"""Statistics of a call as sums per head on its device, by one operator: what a watch keeps, and nothing waits for it.

The sums hold what readings show. A call that asks for more, or that Triton does not compute, is reduced from
``AttentionStats`` instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attemper.backends import table
from attemper.backends.contract import Problem
from attemper.backends.sums import COLUMNS, SUMMED, empty_sums
from attemper.call.formulas import statistics_of
from attemper.call.options import Request
from attemper.call.result import AttentionStats, CallFacts, facts_of
from attemper.call.state import state_of
from attemper.statistics import BY_NAME, TABLE

BACKEND = table.summing().name
"""The backend whose kernels make the sums."""
_LACKING = {row.name for row in TABLE if row.name in BY_NAME or (row.shown is not None and row.name not in COLUMNS)}
"""Statistics that readings may want and the sums do not hold."""
_raised: dict[torch.device, Tensor] = {}
"""Flags that are never down."""


def accumulates(request: Request) -> bool:
    """Whether ``accumulate`` serves this call: softmax, on a backend that sums, with no statistic that sums lack."""
    problem = request.problem
    if problem.rowwise or problem.positions is not None or not table.by_name(problem.backend).sums:
        return False
    return set(problem.columns) <= set(SUMMED) and _LACKING.isdisjoint(request.names)


def fits(dtype: str, size: int) -> bool:
    """Whether kernels that sum take queries of this type and head size, wherever they are, and are there at all."""
    backend = table.summing()
    return backend.reason(frozenset(), table.Inputs(dtype.removeprefix("torch."), backend.devices, size)) is None


@dataclass(frozen=True)
class CallSums:
    """Sums of a call and the state of its rows, from which statistics per row follow once somebody asks."""

    sums: Tensor
    """[H, WIDTH] float64."""
    state: Tensor
    """[F, B, H, Q] float32."""
    included: Tensor | None
    """[B, Q] bool: the rows that count; None for all."""
    names: tuple[str, ...]
    facts: CallFacts

    def statistics(self) -> AttentionStats:
        """The statistics of the same rows, from the same state."""
        rows = state_of(SUMMED, self.state)
        stats = AttentionStats(statistics_of(rows, self.names, self.facts.sink), rows, self.facts)
        return stats if self.included is None else stats.where(self.included[:, None])


def accumulate(request: Request, included: Tensor | None) -> CallSums:
    """Runs a call that ``accumulates``. ``included`` [B, Q] bool of its measured rows."""
    problem = request.problem
    batch, heads, queries, _ = problem.query.shape
    measured = queries if problem.rows is None else problem.rows.shape[0]
    device = problem.query.device
    if device not in _raised:
        _raised[device] = torch.ones(1, dtype=torch.int32, device=device)
    sums = empty_sums(heads, device)
    state = problem.query.new_empty((len(SUMMED), batch, heads, measured), dtype=torch.float32)
    add(problem, sums, _raised[device], included=included, state=state)
    # The owner of the sink may change it before anybody asks.
    sink = None if problem.sink is None else problem.sink.detach().clone()
    return CallSums(sums, state, included, request.names, facts_of(request)._replace(sink=sink))


def add(
    problem: Problem, sums: Tensor, flag: Tensor, *, included: Tensor | None = None, state: Tensor | None = None
) -> None:
    """Adds the statistics of a call to ``sums``, unless ``flag`` [1] int on the device is down."""
    with torch.no_grad():
        call = replace(problem, value=None, columns=SUMMED)
        torch.ops.attemper.accumulate(*call.values(), included, flag, sums, state)
