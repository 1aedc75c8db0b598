"""The dense backend, float64 inside: the specification of the others.

It is plain PyTorch, which autograd differentiates as often as it is asked, and exporters know. Slow and n x n in memory
on purpose. It leaves a state as the others do, in float64: statistics that follow are rounded once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from attemper.backends.contract import UNBOUNDED, Problem
from attemper.backends.reference import rowwise, softmax
from attemper.backends.reference.state import Rows
from attemper.statistics import Column

_DIRECT = (Column.LARGEST_WEIGHT, Column.ENTROPY)
"""Left beside what is asked for: the quantities themselves, by their definitions, not parts that they follow from."""


class Results(NamedTuple):
    """What a call leaves."""

    output: Tensor
    """[B, H, Q, E] in the type of the query."""
    state: dict[Column, Tensor]
    """Column -> [B, H, Q], float64."""
    key_mass: Tensor
    """[B, H, K], float64; of size 0 where it was not asked for."""


def forward(problem: Problem) -> Results:
    """Output, state and key_mass of a call."""
    s, visible = scores(problem)
    w = _weights(problem, s, visible)
    output = problem.query.new_empty((*problem.query.shape[:3], 0))
    if problem.value is not None:
        output = weigh(w, problem.value, problem.dropout_p).to(problem.query.dtype)
    rows = rows_of(problem, s, visible, w if problem.rowwise else softmax.weights(s, visible))
    known = rows.columns()
    direct = _DIRECT if Column.MEAN_DEPTH in problem.columns else _DIRECT[:1]
    state = {column: known[column]() for column in (*problem.columns, *direct)}
    if not problem.rowwise:
        state = _within(state, problem.compute_dtype)
    return Results(output, state, rows.key_mass() if problem.key_mass else s.new_empty(0))


def weights(problem: Problem, found: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """The weights that a call applies to its values, [B, H, Q, K] in float64; with a sink they sum to ``mass``.

    ``found``: of ``scores``, where they are known.
    """
    return _weights(problem, *(found or scores(problem)))


def scores(problem: Problem, raw: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Scores [B, H, Q, K] in float64, and which keys each row sees. ``raw``: q.k in float64, where it is known."""
    visible, mask = visible_keys(problem), problem.mask
    # In float64 before it is spread: its gradient is summed there.
    bias = None if mask is None or mask.dtype == torch.bool else mask.double().expand(visible.shape)
    softcap = problem.softcap or None
    if raw is not None:
        return softmax.of_products(raw, problem.multiplier, bias, visible, softcap), visible
    return softmax.scores(problem.query, problem.key, problem.multiplier, bias, visible, softcap), visible


def rows_of(problem: Problem, s: Tensor, visible: Tensor, weights: Tensor) -> Rows:
    """Rows of scores, and their weights without a sink's share."""
    smallest = torch.finfo(problem.compute_dtype).tiny if problem.rowwise else None
    return Rows(s, visible, weights, factors=_factors(problem), smallest=smallest)


def visible_keys(problem: Problem) -> Tensor:
    """Which keys each row sees, [B, H, Q, K] bool."""
    return shared_visible_keys(problem).expand(*problem.query.shape[:3], -1)


def shared_visible_keys(problem: Problem) -> Tensor:
    """The same, [B or 1, H or 1, Q, K]: once for all that the mask does not tell apart."""
    batch, heads = (1, 1) if problem.mask is None else problem.mask.shape[:2]
    shape = (batch, heads, problem.query.shape[2], problem.key.shape[2])
    places, documents = positions(problem)
    left, right = (math.inf if side >= UNBOUNDED else side for side in (problem.left, problem.right))
    return softmax.visible_keys(shape, problem.mask, left, right, places, documents)


def products(problem: Problem, visible: Tensor) -> Tensor:
    """``scores`` without bias and softcap: scale / T times q.k, -inf where hidden."""
    return softmax.scores(problem.query, problem.key, problem.multiplier, None, visible, None)


def weigh(w: Tensor, value: Tensor, dropout_p: float) -> Tensor:
    """``O = dropout(w) V`` [B, H, Q, E] in float64."""
    value = value.double().repeat_interleave(w.shape[1] // max(value.shape[1], 1), dim=1)
    return torch.nn.functional.dropout(w, dropout_p) @ value


def _weights(problem: Problem, s: Tensor, visible: Tensor) -> Tensor:
    if problem.rowwise:
        return rowwise.weights(s, visible, problem.normalizer, problem.number, problem.per_head)
    w = softmax.weights(s, visible)
    return w if problem.sink is None else w * softmax.share(s, visible, problem.sink)[..., None]


def _within(state: dict[Column, Tensor], dtype: torch.dtype) -> dict[Column, Tensor]:
    """NaN in rows whose level float64 holds and ``dtype`` does not: no other backend could tell them."""
    lse = state[Column.MAXIMUM] + state[Column.LOG_SUM]
    overflown = (state[Column.VISIBLE_KEYS] > 0) & ~torch.isfinite(lse.to(dtype))
    return {
        column: value if column is Column.VISIBLE_KEYS else value.masked_fill(overflown, math.nan)
        for column, value in state.items()
    }


def positions(problem: Problem) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """The key on each row's diagonal, counted within its document, and the documents of queries and keys."""
    queries, keys, device = problem.query.shape[2], problem.key.shape[2], problem.query.device
    given = None if problem.positions is None else problem.positions.to(device)
    if problem.cu_seqlens_q is None or problem.cu_seqlens_k is None:
        return torch.arange(queries, device=device) + problem.offset if given is None else given, None
    starts_q, starts_k = (offsets.to(device, torch.int64) for offsets in (problem.cu_seqlens_q, problem.cu_seqlens_k))
    of_query, of_key = _documents(starts_q, queries), _documents(starts_k, keys)
    if given is not None:
        return given, (of_query, of_key)
    positions = torch.arange(queries, device=device) - starts_q[of_query]
    if problem.bottom_right:
        positions = positions + (starts_k.diff() - starts_q.diff())[of_query]
    return positions, (of_query, of_key)


def _documents(starts: Tensor, total: int) -> Tensor:
    """The number of the document that each of ``total`` tokens belongs to."""
    return torch.searchsorted(starts, torch.arange(total, device=starts.device), right=True) - 1


def key_places(problem: Problem) -> Tensor:
    """[K]: the place of each key within its sequence."""
    places = torch.arange(problem.key.shape[2], device=problem.key.device)
    if problem.cu_seqlens_k is None:
        return places
    starts = problem.cu_seqlens_k.to(places.device, torch.int64)
    return places - starts[_documents(starts, len(places))]


def _factors(problem: Problem) -> dict[Column, Tensor]:
    """u of each column that is a sum of p u, broadcastable to the scores."""
    places, own = key_places(problem), positions(problem)[0][:, None]
    first = places < problem.first_tokens if problem.first_keys is None else problem.first_keys[:, None, None]
    factors = {
        Column.FIRST_TOKENS: first,
        Column.DISTANCE: (own - places).abs(),
        # In other documents, too, whose keys have no weight here.
        Column.OWN_KEY: own == places,
    }
    if problem.span_keys is not None:
        factors[Column.SPAN] = problem.span_keys[:, None, None]
    return {column: u.double() for column, u in factors.items() if column in problem.columns}
