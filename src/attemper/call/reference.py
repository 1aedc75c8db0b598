"""A checked call on the reference: dense, float64 inside, results in the call's own precision."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from attemper.backends.contract import UNBOUNDED, Problem
from attemper.backends.reference import rowwise, softmax
from attemper.call.formulas import at_most, log_count
from attemper.call.options import Request
from attemper.call.result import kept_detached
from attemper.statistics import Column, state_columns


def computed(request: Request) -> tuple[Tensor, dict[str, Tensor], dict[Column, Tensor]]:
    """Output, statistics and state of a call; the state follows from the statistics by their definitions."""
    call = request.problem
    if call.rowwise:
        return _by_rows(request)
    s, visible = scores(call)
    share = _share(call, s, visible)
    p = softmax.weights(s, visible)
    output = call.query.new_empty((*call.query.shape[:3], 0))
    if call.value is not None:
        output = softmax.output(p, share, call.value, call.dropout_p).to(call.query.dtype)
    measures = softmax.statistics(s, visible, call.sink, _first(call), _distance(call))
    dtype = torch.float64 if call.query.dtype == torch.float64 else torch.float32
    seen = visible.any(-1)
    # A score that float64 holds and the call's own precision does not: no backend could tell such a row.
    overflown = seen & ~torch.isfinite(_rounded(measures["lse"](), dtype))
    values = {name: _marked(name, _rounded(measures[name](), dtype), overflown) for name in request.names}
    if "entropy" in values:
        values["entropy"] = at_most(values["entropy"], log_count(measures["visible_keys"]().to(dtype)))
    if "normalized_entropy" in values:
        values["normalized_entropy"] = at_most(values["normalized_entropy"], torch.ones((), dtype=dtype))
    values = kept_detached(values, request.asked)
    return output, values, {column: value.to(dtype) for column, value in _state(request.names, measures).items()}


def _by_rows(request: Request) -> tuple[Tensor, dict[str, Tensor], dict[Column, Tensor]]:
    """``computed`` for rowwise normalizers."""
    call = request.problem
    s, visible = scores(call)
    w = rowwise.weights(s, visible, call.normalizer, call.number, call.per_head)
    output = call.query.new_empty((*call.query.shape[:3], 0))
    if call.value is not None:
        output = rowwise.output(w, call.value, call.dropout_p).to(call.query.dtype)
    dtype = torch.float64 if call.query.dtype == torch.float64 else torch.float32
    smallest = torch.finfo(dtype).tiny
    measures = rowwise.statistics(s, visible, w, _first(call), _distance(call), smallest)
    n = measures["visible_keys"]()
    values = {name: _rounded(measures[name](), dtype) for name in request.names}
    if "entropy" in values:
        values["entropy"] = at_most(values["entropy"], log_count(n.to(dtype)))
    if "normalized_entropy" in values:
        values["normalized_entropy"] = at_most(values["normalized_entropy"], torch.ones((), dtype=dtype))
    state = {
        Column.MAXIMUM: measures["max_logit"](),
        Column.VISIBLE_KEYS: n,
        Column.MASS: measures["mass"](),
    }
    return output, values, {column: value.to(dtype) for column, value in state.items()}


def applied_weights(call: Problem) -> Tensor:
    """mass p [B, H, Q, K] in float64."""
    s, visible = scores(call)
    if call.rowwise:
        return rowwise.weights(s, visible, call.normalizer, call.number, call.per_head)
    return softmax.weights(s, visible) * _share(call, s, visible)[..., None]


def head_weights(call: Problem, sequence: int, head: int) -> Tensor:
    """``applied_weights`` of one head of one sequence, [Q, K] in float64 on the CPU: of a call of all its rows."""
    batch, heads = call.query.shape[:2]

    def part(tensor: Tensor | None) -> Tensor | None:
        """Of a tensor [batch or 1, heads or 1, ...] what this head and sequence have."""
        if tensor is None:
            return None
        at, of = (place if size > 1 else 0 for place, size in zip((sequence, head), tensor.shape[:2], strict=True))
        return tensor[at : at + 1, of : of + 1].detach().cpu()

    def own(tensor: Tensor | None) -> Tensor | None:
        """Of a tensor [heads] what this head has."""
        return None if tensor is None else tensor[head : head + 1].detach().cpu()

    group = head // (heads // max(call.key.shape[1], 1))
    key = call.key[sequence : sequence + 1, group : group + 1].detach().cpu()
    query = call.query[sequence : sequence + 1, head : head + 1].detach().cpu()
    multiplier = part(call.multiplier)
    assert multiplier is not None
    assert batch > sequence
    one = replace(
        call, query=query, key=key, value=None, mask=part(call.mask), multiplier=multiplier, sink=own(call.sink),
        per_head=own(call.per_head), first_keys=None,
    )  # fmt: skip
    return applied_weights(one)[0, 0]


def _marked(name: str, value: Tensor, rows: Tensor) -> Tensor:
    """``value`` with NaN in these rows; counts and sums over keys stay."""
    return value if name == "key_mass" or value.dtype == torch.int64 else value.masked_fill(rows, math.nan)


def _rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value if value.dtype == torch.int64 else value.to(dtype)


def scores(call: Problem) -> tuple[Tensor, Tensor]:
    """Scores [B, H, Q, K] in float64, and which keys each row sees."""
    batch, heads, queries, _ = call.query.shape
    shape = (batch, heads, queries, call.key.shape[2])
    positions, documents = _positions(call)
    left, right = (math.inf if side >= UNBOUNDED else side for side in (call.left, call.right))
    visible = softmax.visible_keys(shape, call.mask, left, right, positions, documents)
    # In float64 before it is spread: its gradient is summed there.
    bias = None if call.mask is None or call.mask.dtype == torch.bool else call.mask.double().expand(shape)
    return softmax.scores(call.query, call.key, call.multiplier, bias, visible, call.softcap or None), visible


def products(call: Problem, visible: Tensor) -> Tensor:
    """``scores`` without bias and softcap: scale / T times q.k, -inf where hidden."""
    return softmax.scores(call.query, call.key, call.multiplier, None, visible, None)


def _share(call: Problem, s: Tensor, visible: Tensor) -> Tensor:
    """Weight that the sink leaves to the keys; 1 without one, [B, H, Q]."""
    if call.sink is None:
        return torch.ones(s.shape[:-1], dtype=torch.float64, device=s.device)
    seen = visible.any(-1)
    lse = softmax.log_sum_exp(torch.where(seen[..., None], s, 0.0))
    return torch.where(seen, torch.sigmoid(lse - call.sink.double()[:, None]), 0.0)


def _positions(call: Problem) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """The key on each row's diagonal, counted within its document, and the documents of queries and keys."""
    queries, keys, device = call.query.shape[2], call.key.shape[2], call.query.device
    if call.cu_seqlens_q is None or call.cu_seqlens_k is None:
        if call.positions is not None:
            return call.positions.to(device), None
        return torch.arange(queries, device=device) + call.offset, None
    starts_q, starts_k = (offsets.to(device, torch.int64) for offsets in (call.cu_seqlens_q, call.cu_seqlens_k))
    of_query, of_key = _documents(starts_q, queries), _documents(starts_k, keys)
    if call.positions is not None:
        return call.positions.to(device), (of_query, of_key)
    positions = torch.arange(queries, device=device) - starts_q[of_query]
    if call.bottom_right:
        positions = positions + (starts_k.diff() - starts_q.diff())[of_query]
    return positions, (of_query, of_key)


def _documents(starts: Tensor, total: int) -> Tensor:
    """The number of the document that each of ``total`` tokens belongs to."""
    return torch.searchsorted(starts, torch.arange(total, device=starts.device), right=True) - 1


def _key_places(call: Problem) -> Tensor:
    """[K]: the place of each key within its sequence."""
    places = torch.arange(call.key.shape[2], device=call.key.device)
    if call.cu_seqlens_k is None:
        return places
    starts = call.cu_seqlens_k.to(places.device, torch.int64)
    return places - starts[_documents(starts, len(places))]


def _first(call: Problem) -> Tensor:
    if call.first_keys is not None:
        return call.first_keys[:, None, None, :].double()
    return (_key_places(call) < call.first_tokens).double()


def _distance(call: Problem) -> Tensor:
    return (_positions(call)[0][:, None] - _key_places(call)).abs().double()


def _state(names: tuple[str, ...], measures: dict) -> dict[Column, Tensor]:
    maximum, n = measures["max_logit"](), measures["visible_keys"]().double()
    seen = n > 0

    def depth(level: str) -> Tensor:
        return torch.where(seen, maximum - measures[level](), 0.0)

    known = {
        Column.MAXIMUM: lambda: maximum,
        Column.LOG_SUM: lambda: torch.where(seen, measures["lse"]() - torch.where(seen, maximum, 0.0), 0.0),
        Column.VISIBLE_KEYS: lambda: n,
        Column.MEAN_DEPTH: lambda: depth("mean_logit"),
        Column.VARIANCE: measures["logit_variance"],
        Column.SQUARED_WEIGHTS: lambda: torch.where(
            seen, 1 / torch.where(seen, measures["effective_tokens"](), 1.0), 0.0
        ),
        Column.FIRST_TOKENS: measures["first_token_mass"],
        Column.PLAIN_DEPTH: lambda: depth("score_mean"),
        Column.PLAIN_VARIANCE: measures["score_variance"],
    }
    return {column: known[column]() for column in state_columns(names) if column in known}
