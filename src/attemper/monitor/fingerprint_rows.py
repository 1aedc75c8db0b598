"""The chosen rows of one attention call as a fingerprint keeps them: exact numbers, pairs, vectors and sketches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attemper.backends import reference
from attemper.backends.contract import Problem
from attemper.call.sampling import pick
from attemper.errors import InputError
from attemper.fingerprints.record import (
    COUNTS,
    PAIRS,
    PROJECTIONS,
    STATISTICS,
    SiteFingerprint,
    chosen_heads,
    chosen_rows,
    join_rows,
    key_numbers,
    keys_of_row,
    projection,
    vector_rows,
)
from attemper.text import clean_name


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
    """Rows of one sequence: the arrays of ``SiteFingerprint``."""

    rows: np.ndarray
    pair_keys: np.ndarray
    counts: np.ndarray
    """[COUNTS, H, R]"""
    statistics: np.ndarray
    """[STATISTICS, H, R]"""
    raw: np.ndarray
    final: np.ndarray
    residual: np.ndarray
    input: np.ndarray
    output: np.ndarray
    recomputed: np.ndarray
    tiled: np.ndarray

    def of_heads(self, heads: Sequence[int]) -> Rows:
        """The same rows of these heads alone."""
        chosen = list(heads)
        return replace(
            self,
            **{name: getattr(self, name)[:, chosen] for name in ("counts", "statistics")},
            **{name: getattr(self, name)[chosen] for name in ("raw", "final", "output", "recomputed", "tiled")},
        )


@dataclass
class SiteRows:
    """What is kept of a site, call after call."""

    name: str
    kind: str
    order: int
    facts: dict[str, Any]
    query: np.ndarray
    key: np.ndarray
    rows: list[Rows] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    keys: int = 0

    @classmethod
    def of(
        cls, name: str, order: int, seen: SeenAttention, asked: Sequence[int] | None = None, **facts: Any
    ) -> SiteRows:
        """A new site by its first call.

        Args:
            asked: numbers of the heads to keep; None for all.
            facts: ``inv_freq`` and ``matmul_precision``.

        Raises:
            InputError: it has no head of such a number.
        """
        problem = seen.problem
        numbers = problem.multiplier.flatten()
        shared = len(numbers) > 0 and bool((numbers == numbers[0]).all())
        facts |= dict(zip(("heads", "kv_heads", "head_dim"), _shape(problem), strict=True))
        facts["scale"] = float(numbers[0]) if shared else None
        facts["softcap"] = problem.softcap or None
        facts["dtype"] = str(problem.query.dtype).removeprefix("torch.")
        heads, groups = facts["heads"], facts["kv_heads"]
        if asked is not None and max(asked) >= heads:
            raise InputError(
                f"fingerprint(heads=...): {clean_name(name)} has no head {max(asked)}, its {heads} are 0 to "
                f"{heads - 1}."
            )
        facts["kept_heads"] = kept = chosen_heads(asked, heads, groups)
        query, key = vectors_of(seen)
        if kept is not None:
            query, key = query[list(kept)], key[list(key_numbers(kept, heads, groups))]
        return cls(name, seen.kind, order, facts, query, key)

    def add(self, seen: SeenAttention, first_sequence: int, counts: Mapping[int, int]) -> bool:
        """Keeps the chosen rows of a call; whether it is of as many heads as the first.

        Args:
            first_sequence: number of its first sequence among all batches.
            counts: number of a sequence -> how many of its rows.
        """
        if _shape(seen.problem) != tuple(self.facts[part] for part in ("heads", "kv_heads", "head_dim")):
            return False
        self.keys = max(self.keys, seen.problem.key.shape[2])
        sequences, _, queries, _ = seen.problem.query.shape
        for sequence in range(sequences):
            number = first_sequence + sequence
            self.lengths.append(len(places_of(seen.real_queries, sequence, queries)))
            if count := counts.get(number, 0):
                rows = rows_of(seen, sequence, number, count)
                kept = self.facts["kept_heads"]
                self.rows.append(rows if kept is None else rows.of_heads(kept))
        return True

    def fingerprint(self) -> SiteFingerprint:
        """All rows as one record."""

        def all_of(name: str, axis: int) -> Any:
            return join_rows([getattr(rows, name) for rows in self.rows], axis)

        return SiteFingerprint(
            name=self.name,
            kind=self.kind,
            order=self.order,
            **self.facts,
            keys=self.keys,
            **{name: all_of(name, 0) for name in ("rows", "pair_keys", "residual", "input")},
            **{name: all_of(name, 1) for name in ("raw", "final", "output", "recomputed", "tiled")},
            counts=dict(zip(COUNTS, all_of("counts", 2), strict=True)),
            statistics=dict(zip(STATISTICS, all_of("statistics", 2), strict=True)),
            query=self.query,
            key=self.key,
        )


def _shape(problem: Problem) -> tuple[int, int, int]:
    """Heads, heads of keys, size."""
    return problem.query.shape[1], problem.key.shape[1], problem.query.shape[3]


def places_of(real: Tensor | None, sequence: int, tokens: int) -> list[int]:
    """Where the tokens of a sequence stand in its tensors, without padding."""
    return list(range(tokens)) if real is None else real[sequence].nonzero().view(-1).tolist()


def rows_of(seen: SeenAttention, sequence: int, number: int, count: int) -> Rows:
    """``count`` rows of one sequence of a call; ``number``: of the sequence among all batches."""
    problem = of_sequence(seen.problem, sequence)
    queries, keys = problem.query.shape[2], problem.key.shape[2]
    own = places_of(seen.real_queries, sequence, queries)
    others = places_of(seen.real_keys, sequence, keys)
    earlier = max(len(others) - len(own), 0) if seen.kind == "self" else 0
    places = chosen_rows(len(own), count)
    index = torch.tensor([own[place] for place in places], dtype=torch.int64)
    wanted = [keys_of_row(min(place + earlier, len(others) - 1), len(others)) for place in places]
    first = others[0] if others else 0
    picked = pick(problem, index)
    scores, visible = reference.scores(picked)
    weights = reference.weights(picked)
    raw = _products(picked)
    pairs = torch.tensor([[max(key, 0) + first for key in row] for row in wanted], dtype=torch.int64)
    missing = torch.tensor([[key < 0 for key in row] for row in wanted]).view(1, len(places), PAIRS)
    taken = pairs.clamp(max=max(keys - 1, 0))[None].expand(raw.shape[1], -1, -1)
    own_keys = taken[..., :1]
    output = None if seen.output is None else seen.output[sequence][:, index.to(seen.output.device)]
    value = None if seen.value is None else seen.value[sequence].detach().cpu().double()
    return Rows(
        np.array([[number, place] for place in places], np.int32).reshape(-1, 2),
        np.array(wanted, np.int32).reshape(-1, PAIRS),
        _counts(scores[0], visible[0], first),
        _statistics(picked, scores[0], visible[0], weights[0], own_keys, first),
        _numbers(raw[0].gather(2, taken).masked_fill(missing, torch.nan)),
        _numbers(scores[0].gather(2, taken).masked_fill(missing, torch.nan)),
        _states_of(seen.residual, sequence, index, queries),
        _states_of(seen.input, sequence, index, queries),
        _sketch(output, (raw.shape[1], len(places))),
        _sketch(_weigh(weights[0], value), (raw.shape[1], len(places))),
        _sketch(_tile_output(picked, value), (raw.shape[1], len(places))),
    )


def vectors_of(seen: SeenAttention) -> tuple[np.ndarray, np.ndarray]:
    """Queries [H, P, D] and keys [G, P, D] of the first sequence at ``VECTOR_ROWS``, in float32."""
    problem = seen.problem
    found = []
    for part, real in ((problem.query, seen.real_queries), (problem.key, seen.real_keys)):
        places = places_of(real, 0, part.shape[2])
        index = torch.tensor([places[place] for place in vector_rows(len(places))], device=part.device)
        found.append(_numbers(part[0].index_select(1, index.to(torch.int64))))
    return found[0], found[1]


def has_products(problem: Problem) -> bool:
    """Whether queries and keys were seen: attention that is softmaxed by hand shows its scores alone."""
    return problem.query.shape[-1] > 1 or bool(problem.query.count_nonzero())


def of_sequence(problem: Problem, sequence: int) -> Problem:
    """The call of one of its sequences, on the CPU, without values."""

    def part(tensor: Tensor) -> Tensor:
        place = sequence if tensor.shape[0] > 1 else 0
        return tensor[place : place + 1].detach().cpu()

    return replace(
        problem,
        query=part(problem.query),
        key=part(problem.key),
        value=None,
        mask=None if problem.mask is None else part(problem.mask),
        multiplier=part(problem.multiplier),
        sink=None if problem.sink is None else problem.sink.detach().cpu(),
        per_head=None if problem.per_head is None else problem.per_head.detach().cpu(),
        first_keys=None,
    )


def _products(problem: Problem) -> Tensor:
    """q.k [1, H, R, K] in float64; NaN where queries were not seen."""
    key = problem.key.double().repeat_interleave(problem.repeats, 1)
    raw = problem.query.double() @ key.transpose(2, 3)
    return raw if has_products(problem) else torch.full_like(raw, torch.nan)


def _counts(scores: Tensor, visible: Tensor, first: int) -> np.ndarray:
    """[COUNTS, H, R]; ``first``: where the first token stands among the keys."""
    seen = visible.any(-1)
    keys = torch.arange(visible.shape[-1])
    low = torch.where(visible, keys, visible.shape[-1]).amin(-1) - first
    high = torch.where(visible, keys, -1).amax(-1) - first
    top = scores.argmax(-1) - first
    found = {"visible_keys": visible.sum(-1), "first_visible": low, "last_visible": high, "argmax": top}
    empty = {"visible_keys": 0, "first_visible": 0, "last_visible": -1, "argmax": -1}
    return np.stack([torch.where(seen, found[name], empty[name]).to(torch.int32).numpy() for name in COUNTS])


def _statistics(
    picked: Problem, scores: Tensor, visible: Tensor, weights: Tensor, own_keys: Tensor, first: int
) -> np.ndarray:
    """[STATISTICS, H, R]"""
    finite = torch.where(visible, scores, 0.0)
    mass = weights.sum(-1)
    share = weights / mass.clamp(min=torch.finfo(torch.float64).tiny)[..., None]
    mean = (share * finite).sum(-1)
    lse_keys = torch.logsumexp(scores, -1)
    lse = lse_keys if picked.sink is None else torch.logaddexp(lse_keys, picked.sink.double()[:, None])
    spread = visible.shape[:2]
    key = picked.key[0].double().repeat_interleave(picked.repeats, 0)
    own = key.gather(1, own_keys.expand(-1, -1, key.shape[-1]))
    known = has_products(picked)
    found = {
        "max_logit": scores.amax(-1),
        "mean": mean,
        "variance": (share * (finite - mean[..., None]) ** 2).sum(-1),
        "lse": lse,
        "lse_keys": lse_keys,
        "kept_mass": mass,
        "self_weight": share.gather(2, own_keys)[..., 0],
        "first_token_mass": share[..., min(max(first, 0), share.shape[-1] - 1)],
        "q_norm": picked.query[0].double().norm(dim=-1) if known else torch.full(spread, torch.nan),
        "k_norm": own.norm(dim=-1) if known else torch.full(spread, torch.nan),
        "multiplier": picked.multiplier[0].double().expand(spread) if known else torch.full(spread, torch.nan),
    }
    return np.stack([_numbers(found[name]) for name in STATISTICS])


def _weigh(weights: Tensor, value: Tensor | None) -> Tensor | None:
    """Weights [H, R, K] times values [G, K, E]."""
    if value is None or value.shape[1] != weights.shape[2]:
        return None
    return weights @ value.repeat_interleave(weights.shape[0] // max(value.shape[0], 1), 0)


def _tile_output(picked: Problem, value: Tensor | None) -> Tensor | None:
    """The output [H, R, E] if query head h read key head h mod G; None where every head has its own."""
    repeats = picked.repeats
    if value is None or repeats < 2 or value.shape[0] != picked.key.shape[1]:
        return None
    weights = reference.weights(replace(picked, key=picked.key.repeat(1, repeats, 1, 1)))
    return _weigh(weights[0], value.repeat(repeats, 1, 1))


def _states_of(states: Tensor | None, sequence: int, index: Tensor, queries: int) -> np.ndarray:
    fits = states is not None and states.shape[1] == queries
    chosen = states[sequence if states.shape[0] > 1 else 0] if fits and states is not None else None
    return _sketch(None if chosen is None else chosen[index.to(chosen.device)], (len(index),))


def _sketch(vectors: Tensor | None, shape: tuple[int, ...]) -> np.ndarray:
    """[..., 1 + PROJECTIONS] of [..., E]: the norm, and projections; NaN where there is nothing."""
    if vectors is None or vectors.shape[:-1] != shape:
        return np.full((*shape, 1 + PROJECTIONS), np.nan, np.float32)
    vectors = vectors.detach().cpu().double()
    drawn = torch.from_numpy(projection(vectors.shape[-1])).double()
    return _numbers(torch.cat((vectors.norm(dim=-1, keepdim=True), vectors @ drawn), -1))


def _numbers(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().to(torch.float32).contiguous().numpy()
