"""The chosen rows of one attention call as a fingerprint keeps them: exact numbers, pairs, vectors and sketches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attemper.backends import reference
from attemper.backends.contract import Problem
from attemper.call.partial_call import on_host, part_of, side_by_side
from attemper.call.sampling import pick, unless_hidden
from attemper.fingerprints.causes.outputs import mismatch
from attemper.fingerprints.encoding import round_rows
from attemper.fingerprints.site import (
    COUNTS,
    OF_HEADS,
    PAIRS,
    PROJECTIONS,
    STATISTICS,
    VECTOR_ROWS,
    chosen_rows,
    final_scores,
    keys_of_row,
    projection,
)

_LARGEST = 2**23
"""Elements of keys of the sequences that are computed together."""


@dataclass(frozen=True, eq=False)
class SeenAttention:
    """One call, and what stands around it. B sequences, Q queries, K keys."""

    problem: Problem
    kind: str
    real_queries: Tensor | None
    """[B, Q] bool; None where all are tokens."""
    real_keys: Tensor | None
    """[B, K] bool; None where all are tokens."""
    value: Tensor | None
    output: Tensor | None
    input: Tensor | None
    """[B, Q, E]: what the module that attends was given."""
    residual: Tensor | None
    """[B, Q, E]: what its block was given."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of some sequences: the arrays of ``SiteFingerprint``."""

    rows: np.ndarray
    pair_keys: np.ndarray
    counts: np.ndarray
    """[COUNTS, H, R]"""
    statistics: np.ndarray
    """[STATISTICS, H, R]"""
    raw: np.ndarray
    final: np.ndarray
    output: np.ndarray
    recomputed: np.ndarray
    tiled: np.ndarray

    def of_heads(self, heads: Sequence[int]) -> Rows:
        """The same rows of these heads alone."""
        chosen = list(heads)
        return replace(
            self,
            **{name: getattr(self, name)[:, chosen] for name in ("counts", "statistics")},
            **{name: getattr(self, name)[chosen] for name in OF_HEADS},
        )


@dataclass(frozen=True, eq=False)
class RowPlaces:
    """Where the rows of a call stand in tensors [B, tokens, E], group after group, and its first sequence's anchors."""

    shape: tuple[int, int]
    groups: list[tuple[list[int], Tensor]]
    """Sequences, and places of their rows."""
    anchors: Tensor

    @classmethod
    def of(cls, seen: SeenAttention, groups: Sequence[Sequence[Plan]]) -> RowPlaces:
        batch, _, queries, _ = seen.problem.query.shape
        own = places_of(seen.real_queries, 0, queries)
        anchors = [own[min(place, len(own) - 1)] for place in VECTOR_ROWS] if len(own) else []
        rows = [
            ([plan.sequence for plan in plans], torch.tensor(plans[0].index, dtype=torch.int64)) for plans in groups
        ]
        return cls((batch, queries), rows, torch.tensor(anchors, dtype=torch.int64))

    def take(self, states: Tensor | None) -> Taken | None:
        """Rows [R, E] and anchors [ANCHORS, E] of states [B, tokens, E], or [1, tokens, E] for all; None where these
        are of another shape.
        """
        batch, tokens = self.shape
        fits = states is not None and states.dim() == 3 and states.shape[0] in (1, batch) and states.shape[1] == tokens
        if states is None or not fits or not self.groups or not len(self.anchors):
            return None
        parts = [
            _choose(states[:, None], sequences, index).expand(len(sequences), 1, -1, -1).flatten(0, 2)
            for sequences, index in self.groups
        ]
        return torch.cat(parts).double(), states[0].index_select(0, self.anchors.to(states.device)).cpu().double()


Taken = tuple[Tensor, Tensor]
"""Vectors of rows, and anchors."""


def sketch_of(vectors: Tensor) -> np.ndarray:
    """[R, 1 + PROJECTIONS] of vectors [R, E]."""
    return _sketch(vectors, vectors.shape[:1])


def grams_of(vectors: Tensor, anchors: Tensor) -> np.ndarray:
    """[R, 2, 1 + ANCHORS] of vectors [R, E]: norm and inner products with the directions of anchors [ANCHORS, E]; as
    they are, and less the mean of features.
    """
    found = []
    for own, fixed in ((vectors, anchors), (_center(vectors), _center(anchors))):
        directions = fixed / fixed.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        found.append(torch.cat((own.norm(dim=-1, keepdim=True), own @ directions.T), -1))
    return _numbers(torch.stack(found, 1))


def _center(vectors: Tensor) -> Tensor:
    return vectors - vectors.mean(-1, keepdim=True)


@dataclass(frozen=True)
class Plan:
    """Which rows of a sequence are kept."""

    sequence: int
    """Its place in the call."""
    number: int
    """Its number among all batches."""
    places: tuple[int, ...]
    """By tokens."""
    index: tuple[int, ...]
    """The same rows by their place in tensors."""
    wanted: tuple[tuple[int, ...], ...]
    """The keys of each row's pairs, by tokens."""
    first: int
    """Where its first token stands among the keys."""

    @classmethod
    def of(cls, seen: SeenAttention, sequence: int, number: int, count: int) -> Plan:
        """``count`` rows of a sequence."""
        problem = seen.problem
        own = places_of(seen.real_queries, sequence, problem.query.shape[2])
        others = places_of(seen.real_keys, sequence, problem.key.shape[2])
        earlier = max(len(others) - len(own), 0) if seen.kind == "self" else 0
        places = tuple(chosen_rows(len(own), count))
        wanted = (keys_of_row(min(place + earlier, len(others) - 1), len(others)) for place in places)
        return cls(
            sequence,
            number,
            places,
            tuple(own[place] for place in places),
            tuple(map(tuple, wanted)),
            others[0] if others else 0,
        )

    @property
    def alike(self) -> tuple[Any, ...]:
        """Sequences for which it is the same are computed together."""
        return self.index, self.wanted, self.first


def groups_of(plans: Sequence[Plan], elements: int) -> Iterator[list[Plan]]:
    """Plans side by side that choose the same places, each group of ``elements`` keys a sequence not too large."""
    most = max(_LARGEST // max(elements, 1), 1)
    for _, alike in groupby(plans, lambda plan: plan.alike):
        listed = list(alike)
        yield from (listed[start : start + most] for start in range(0, len(listed), most))


def places_of(real: Tensor | None, sequence: int, tokens: int) -> Sequence[int]:
    """Where the tokens of a sequence stand in its tensors, without padding."""
    return range(tokens) if real is None else real[sequence].nonzero().view(-1).tolist()


def rows_of(seen: SeenAttention, plans: Sequence[Plan]) -> Rows:
    """The rows of sequences that choose the same places. S sequences, r rows of each, R = S r."""
    plan, sequences = plans[0], [one.sequence for one in plans]
    index = torch.tensor(plan.index, dtype=torch.int64)
    picked = on_host(part_of(pick(seen.problem, index), side_by_side(sequences)))
    products = _products(picked.query, picked.key)
    scores, visible = found = reference.scores(picked, products)
    weights = reference.weights(picked, found)
    visible = unless_hidden(picked.mask, visible)
    pairs = _Pairs.of(plan, products.shape[3])
    raw = pairs.numbers(products if has_products(picked) else torch.full_like(products, torch.nan))
    value = None if seen.value is None else _choose(seen.value, sequences)
    output = None if seen.output is None else _choose(seen.output, sequences, index)
    sketches = _outputs(picked, weights, value, output)
    if picked.query.dtype.itemsize == 2:
        raw, sketches = round_rows(raw), [round_rows(part) for part in sketches]
    statistics = _statistics(picked, scores, visible, weights, pairs.index[:, 0], plan.first)
    multiplier = statistics[STATISTICS.index("multiplier")]
    return Rows(
        np.array([[one.number, place] for one in plans for place in plan.places], np.int32).reshape(-1, 2),
        np.array(plan.wanted * len(plans), np.int32).reshape(-1, PAIRS),
        _counts(scores, visible, plan.first),
        statistics,
        raw,
        _final(picked, raw, multiplier, pairs, scores, visible),
        *sketches,
    )


def vectors_of(seen: SeenAttention) -> tuple[np.ndarray, np.ndarray]:
    """Queries [H, P, D] and keys [G, P, D] of the first sequence at ``VECTOR_ROWS``, in float32."""
    problem = seen.problem
    found = []
    for part, real in ((problem.query, seen.real_queries), (problem.key, seen.real_keys)):
        places = places_of(real, 0, part.shape[2])
        index = torch.tensor([places[place] for place in VECTOR_ROWS if place < len(places)], device=part.device)
        found.append(_numbers(part[0].index_select(1, index.to(torch.int64))))
    return found[0], found[1]


def has_products(problem: Problem) -> bool:
    """Whether queries and keys were seen: attention that is softmaxed by hand shows its scores alone."""
    return problem.query.shape[-1] > 1 or bool(problem.query.count_nonzero())


def _choose(tensor: Tensor, sequences: Sequence[int], rows: Tensor | None = None) -> Tensor:
    """Some sequences of a tensor whose first axis has all or 1, on the CPU; of its third axis ``rows`` alone."""
    part = tensor if tensor.shape[0] == 1 else tensor[side_by_side(sequences)]
    return (part if rows is None else part.index_select(2, rows.to(part.device))).detach().cpu()


def _products(query: Tensor, key: Tensor) -> Tensor:
    """q.k [S, H, r, K] in float64."""
    columns = _by_group(query.double(), key.shape[1]).transpose(2, 3)
    # Few columns on the right are several times as fast as few rows on the left, and keys are widened one sequence
    # after another, within the processor's cache.
    every = key.expand(len(columns), -1, -1, -1)
    found = torch.stack([keys.double() @ own for keys, own in zip(every, columns, strict=True)])
    return found.transpose(2, 3).reshape(*query.shape[:3], key.shape[2])


def _by_group(rows: Tensor, groups: int) -> Tensor:
    """Rows [S, H, r, ...] as [S, G, H/G r, ...], those that read the same keys together, so that no key is repeated."""
    sequences, heads, count, size = rows.shape
    return rows.reshape(sequences, groups, heads // max(groups, 1) * count, size)


@dataclass(frozen=True)
class _Pairs:
    """The pairs of rows among scores."""

    index: Tensor
    """[r, PAIRS]: the place of each key."""
    missing: Tensor
    """[r, PAIRS]: where there is none."""

    @classmethod
    def of(cls, plan: Plan, keys: int) -> _Pairs:
        wanted = torch.tensor(plan.wanted, dtype=torch.int64).view(-1, PAIRS)
        return cls((wanted.clamp(min=0) + plan.first).clamp(max=max(keys - 1, 0)), wanted < 0)

    def take(self, numbers: Tensor) -> Tensor:
        """[S, H, r, PAIRS] of [S, H, r, K]."""
        return numbers.gather(3, self.index.expand(*numbers.shape[:2], -1, -1))

    def numbers(self, numbers: Tensor) -> np.ndarray:
        """[H, R, PAIRS] float32, NaN where there is no key."""
        return _heads_first(self.take(numbers).masked_fill(self.missing, torch.nan))


def _final(
    picked: Problem, raw: np.ndarray, multiplier: np.ndarray, pairs: _Pairs, scores: Tensor, visible: Tensor
) -> np.ndarray:
    """[H, R, PAIRS]: by what is kept of the products, where these were seen."""
    if np.isnan(raw).all():
        return pairs.numbers(scores)
    added = picked.mask is not None and picked.mask.dtype != torch.bool
    bias = pairs.numbers(picked.mask.double().expand(scores.shape)) if added and picked.mask is not None else None
    hidden = _heads_first((~pairs.take(visible) & ~pairs.missing).float()) > 0
    return final_scores(raw, multiplier, picked.softcap or None, bias, hidden)


def _counts(scores: Tensor, visible: Tensor, first: int) -> np.ndarray:
    """[COUNTS, H, R]; ``first``: where the first token stands among the keys."""
    seen = visible.any(-1)
    keys = torch.arange(visible.shape[-1])
    low = torch.where(visible, keys, visible.shape[-1]).amin(-1) - first
    high = torch.where(visible, keys, -1).amax(-1) - first
    top = scores.argmax(-1) - first
    found = {"visible_keys": visible.sum(-1), "first_visible": low, "last_visible": high, "argmax": top}
    empty = {"visible_keys": 0, "first_visible": 0, "last_visible": -1, "argmax": -1}
    kept = [torch.where(seen, found[name], empty[name]).to(torch.int32) for name in COUNTS]
    return np.stack([part.transpose(0, 1).flatten(1).numpy() for part in kept])


def _statistics(
    picked: Problem, scores: Tensor, visible: Tensor, weights: Tensor, own_keys: Tensor, first: int
) -> np.ndarray:
    """[STATISTICS, H, R]; ``own_keys`` [r]: the key at each row's own place."""
    finite = torch.where(visible, scores, 0.0)
    mass = weights.sum(-1)
    share = weights / mass.clamp(min=torch.finfo(torch.float64).tiny)[..., None]
    mean = (share * finite).sum(-1)
    lse_keys = torch.logsumexp(scores, -1)
    lse = lse_keys if picked.sink is None else torch.logaddexp(lse_keys, picked.sink.double()[:, None])
    spread = mass.shape
    known = has_products(picked)
    nothing = torch.full(spread, torch.nan)
    own_norm = picked.key[:, :, own_keys].double().norm(dim=-1).repeat_interleave(picked.repeats, 1)
    found = {
        "max_logit": scores.amax(-1),
        "mean": mean,
        "variance": (share * (finite - mean[..., None]) ** 2).sum(-1),
        "lse": lse,
        "lse_keys": lse_keys,
        "kept_mass": mass,
        "self_weight": share.gather(3, own_keys[:, None].expand(*spread, 1))[..., 0],
        "first_token_mass": share[..., min(max(first, 0), share.shape[-1] - 1)],
        "q_norm": picked.query.double().norm(dim=-1) if known else nothing,
        "k_norm": own_norm.expand(spread) if known else nothing,
        "multiplier": picked.multiplier.double().expand(spread) if known else nothing,
    }
    return np.stack([_heads_first(found[name]) for name in STATISTICS])


def _outputs(picked: Problem, weights: Tensor, value: Tensor | None, output: Tensor | None) -> list[np.ndarray]:
    """Sketches of the output as it is, as its own queries, keys and values give it, and, where that differs, as they
    give it if query head h reads key head h mod G.
    """
    shape = weights.shape[:3]
    own, recomputed = (_sketch(part, shape) for part in (output, _weigh(weights, value)))
    differ = bool((mismatch(own, recomputed, str(picked.query.dtype).removeprefix("torch.")) > 1).any())
    found = own, recomputed, _sketch(_tiled_output(picked, value) if differ else None, shape)
    return [part.swapaxes(0, 1).reshape(shape[1], -1, part.shape[-1]) for part in found]


def _weigh(weights: Tensor, value: Tensor | None) -> Tensor | None:
    """Weights [S, H, r, K] times values [S, G, K, E], in float32 at least."""
    if value is None or value.shape[2] != weights.shape[3]:
        return None
    dtype = torch.promote_types(value.dtype, torch.float32)
    found = _by_group(weights.to(dtype), value.shape[1]) @ value.to(dtype)
    return found.view(*weights.shape[:3], value.shape[3])


def _tiled_output(picked: Problem, value: Tensor | None) -> Tensor | None:
    """The output [S, H, r, E] if query head h read key head h mod G; None where every head has its own."""
    repeats = picked.repeats
    if value is None or repeats < 2 or value.shape[1] != picked.key.shape[1]:
        return None
    weights = reference.weights(replace(picked, key=picked.key.repeat(1, repeats, 1, 1)))
    return _weigh(weights, value.repeat(1, repeats, 1, 1))


def _sketch(vectors: Tensor | None, shape: Sequence[int]) -> np.ndarray:
    """[..., 1 + PROJECTIONS] of [..., E]: the norm, and projections; NaN where there is nothing."""
    if vectors is None or vectors.shape[:-1] != torch.Size(shape):
        return np.full((*shape, 1 + PROJECTIONS), np.nan, np.float32)
    vectors = vectors.double()
    drawn = torch.from_numpy(projection(vectors.shape[-1])).double()
    return _numbers(torch.cat((vectors.norm(dim=-1, keepdim=True), vectors @ drawn), -1))


def _heads_first(numbers: Tensor) -> np.ndarray:
    """[H, S r, ...] float32 of [S, H, r, ...]."""
    return _numbers(numbers.transpose(0, 1).flatten(1, 2))


def _numbers(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().to(torch.float32).contiguous().numpy()
