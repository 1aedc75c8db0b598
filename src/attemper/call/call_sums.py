"""Statistics of a call as sums per head on its device: what a watch keeps, and nothing waits for it.

The sums hold what readings show. A call that asks for more, or whose backend has no kernel that sums, is reduced from
``AttentionStats`` instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attemper.backends import table
from attemper.backends.contract import Problem
from attemper.backends.sums import SUMMED, empty_sums
from attemper.call import operator
from attemper.call.autograd import passes_dispatcher
from attemper.call.formulas import LazyStatistics
from attemper.call.normalizer import is_plain
from attemper.call.request import Request
from attemper.call.result import AttentionStats, CallFacts, facts_of
from attemper.call.state import state_of
from attemper.call.transforms import is_undisturbed
from attemper.statistics import BY_NAME, COLUMNS, COUNTED, TABLE, Column

BACKEND = table.summing().name
"""The backend whose kernels make the sums."""
_SUMS = (*COLUMNS, *COUNTED)
_LACKING = {row.name for row in TABLE if row.name in BY_NAME or (row.shown is not None and row.name not in _SUMS)}
"""Statistics that readings may want and the sums do not hold."""
_raised: dict[torch.device, Tensor] = {}
"""Flags that are never down."""


def accumulates(request: Request) -> bool:
    """Whether ``accumulate`` serves this call: softmax, on a backend that sums, with no statistic that sums lack."""
    problem, backend = request.problem, table.by_name(request.problem.backend)
    if problem.rowwise or not _LACKING.isdisjoint(request.names):
        return False
    if backend.sums:
        return problem.positions is None and set(problem.columns) <= set(SUMMED)
    # Sums of a state that is there: of softmax itself, without a sink.
    plain = problem.sink is None and problem.columns == SUMMED and problem.query.numel() > 0
    return plain and is_plain(request.normalizer) and passes_dispatcher(problem)


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
    backend: str

    @property
    def shape(self) -> torch.Size:
        """[B, H, Q] of the measured rows."""
        return self.state.shape[1:]

    @property
    def device(self) -> torch.device:
        return self.state.device

    @property
    def visible_rows(self) -> tuple[Tensor, Tensor]:
        """[B, H, Q] each: the keys that rows see, and which rows count (bool)."""
        of = dict(zip(SUMMED, self.state.unbind(0), strict=True))
        valid = torch.isfinite(of[Column.MAXIMUM] + of[Column.LOG_SUM])
        return of[Column.VISIBLE_KEYS], valid if self.included is None else valid & self.included[:, None]

    def statistics(self) -> AttentionStats:
        rows = state_of(SUMMED, self.state, self.backend if table.by_name(self.backend).direct else None)
        stats = AttentionStats(LazyStatistics(rows, self.names, self.facts.sink).settle(), rows, self.facts)
        return stats if self.included is None else stats.where(self.included[:, None])


def accumulate(request: Request, included: Tensor | None) -> CallSums:
    """Runs a call that ``accumulates``. ``included`` [B, Q] bool of its measured rows."""
    problem = request.problem
    sums, state = _accumulate(problem, included) if table.by_name(problem.backend).sums else _sum(problem, included)
    # The owner of the sink may change it before anybody asks.
    sink = None if problem.sink is None else problem.sink.detach().clone()
    return CallSums(sums, state, included, request.names, facts_of(request)._replace(sink=sink), problem.backend)


def _sum(problem: Problem, included: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sums by a kernel that reads the state which another has left."""
    _, state, _ = operator.forward(problem)
    marked = None if included is None else included[:, None].expand(state.shape[1:])
    return table.kernels(problem.backend).sums(state, marked, problem.first_tokens), state


def _accumulate(problem: Problem, included: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sums by one operator."""
    batch, heads, queries, _ = problem.query.shape
    measured = queries if problem.rows is None else problem.rows.shape[0]
    device = problem.query.device
    if device not in _raised:
        _raised[device] = torch.ones(1, dtype=torch.int32, device=device)
    sums = empty_sums(heads, device)
    state = problem.query.new_empty((len(SUMMED), batch, heads, measured), dtype=torch.float32)
    add(problem, sums, _raised[device], included=included, state=state)
    return sums, state


def add(
    problem: Problem, sums: Tensor, flag: Tensor, *, included: Tensor | None = None, state: Tensor | None = None
) -> None:
    """Adds the statistics of a call to ``sums``, unless ``flag`` [1] int on the device is down."""
    call = problem.with_fields(value=None, columns=SUMMED)
    if is_undisturbed() and not problem.query.is_meta:
        operator.accumulate(call, included, flag, sums, state)
        return
    with torch.no_grad():
        torch.ops.attemper.accumulate(*call.values(), included, flag, sums, state)
