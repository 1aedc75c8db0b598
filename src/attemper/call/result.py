"""What an attention call reports: statistics per row, and how they reduce and merge."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from attemper.call.formulas import LazyStatistics
from attemper.call.merging import joined_output, merge
from attemper.call.normalizer import is_mergeable, is_plain, is_rowwise
from attemper.call.request import Request
from attemper.call.state import LazyState, State, detach
from attemper.errors import InputError
from attemper.statistics import BINS, NAMES, OF_SOFTMAX, STATISTICS, Column, Rows


class HeadSummary(NamedTuple):
    """One statistic over the rows of each head: each [H], float64; NaN where ``count`` is 0. ``std`` is
    the population's.
    """

    mean: Tensor
    std: Tensor
    min: Tensor
    max: Tensor
    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    """Valid rows that define the statistic."""
    empty: Tensor
    """Rows that see no key."""
    nonfinite: Tensor
    """Rows with a visible score that is not finite."""


class VisibleKeyCurve(NamedTuple):
    """Rows in buckets of how many keys they see: ``first[i] <= n <= last[i]``, powers of two.

    All but the edges add up.
    """

    first: Tensor
    """[32] int64: 1, 2, 4, ..."""
    last: Tensor
    """[32] int64: 1, 3, 7, ..."""
    rows: Tensor
    """[H, 32] float64: valid rows."""
    sums: dict[str, Tensor]
    """Statistic -> [H, 32] float64: its sum over those rows (of ``normalized_entropy``: those with 2 keys or more)."""


class CallFacts(NamedTuple):
    """What statistics need to know of the call whose rows they describe, beside the state of the rows."""

    sink: Tensor | None = None
    """[H]: the sink's logits."""
    first_tokens: int = 1
    asked: tuple[str, ...] = ()
    """The statistics that keep their gradient; others are kept for merging."""
    keys: int = 0
    rows: Tensor | None = None
    """[Q] int: positions of the measured rows; None for all."""
    population: int | None = None
    """All query rows of each sequence."""
    normalizer: str = "softmax"
    included: Tensor | None = None
    """[B, H, Q] bool: the rows that count; None for all."""


def facts_of(request: Request) -> CallFacts:
    """The facts of a checked call."""
    problem, keys = request.problem, request.problem.key.shape[2]
    first, asked, rows = problem.first_tokens, request.asked, request.rows
    return CallFacts(problem.sink, first, asked, keys, rows, request.population, request.normalizer)


class AttentionStats:
    """Statistics of attention rows, one tensor [B, H, Q] per name (``key_mass`` is [B, H, K]).

    ``lse`` and ``max_logit`` are always there, so that partial results over keys can merge. Float32, or float64 for
    float64 inputs; ``visible_keys`` and ``support_size`` are int64 (exact to 2^24 keys; above, float32's nearest
    count on every backend but the reference). A row with no visible key reads lse = max_logit =
    -inf and 0 elsewhere; a row with a non-finite visible score reads NaN. Neither is ``valid``.

    Attributes:
        names: the statistics it holds.
        normalizer: what makes weights of scores. ``lse`` belongs to softmax, also with a sink or a scale; parts
            of the keys merge where no weight depends on how many keys there are.
        rows: positions of the measured rows [Q] when they are a sample (``attention_statistics(rows=)``), else None.
        lower_bounds: names whose maximum is only a lower bound, because rows were sampled.
    """

    lse: Tensor
    entropy: Tensor
    normalized_entropy: Tensor
    effective_tokens: Tensor
    max_weight: Tensor
    max_logit: Tensor
    mean_logit: Tensor
    logit_variance: Tensor
    visible_keys: Tensor
    mass: Tensor
    first_token_mass: Tensor
    support_size: Tensor
    entropy_with_sink: Tensor
    mean_distance: Tensor
    gini: Tensor
    key_mass: Tensor
    score_variance: Tensor
    self_weight: Tensor
    span_mass: Tensor

    def __init__(
        self, values: Mapping[str, Tensor], state: State, facts: CallFacts, names: tuple[str, ...] | None = None
    ) -> None:
        self._values = values
        self._state = state
        self._facts = facts
        self.normalizer = facts.normalizer
        self.rows = facts.rows
        self.names = tuple(values) if names is None else names
        self.lower_bounds = () if facts.rows is None else ("max_logit",)

    def __getattr__(self, name: str) -> Tensor:
        # Only what was not found otherwise arrives here: a statistic, or a mistake.
        names = self.__dict__.get("names", ())
        if name in names:
            return self._values[name]
        if name in OF_SOFTMAX and is_rowwise(self.__dict__.get("normalizer", "softmax")):
            raise AttributeError(f"{name} belongs to softmax: weights of {self.normalizer} have none.")
        if name in NAMES:
            raise AttributeError(
                f"{name} was not asked for: pass stats=({name!r},), or stats='all' for all of one pass."
            )
        raise AttributeError(f"AttentionStats has no attribute {name!r}. Statistics here: {', '.join(names)}.")

    def __getitem__(self, name: str) -> Tensor:
        # Not by the attribute, which is looked for in vain first.
        return self._values[name] if name in self.names else getattr(self, name)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __repr__(self) -> str:
        every = self._facts.population
        sampled = "" if self.rows is None else f", {len(self.rows)} of {every} rows, max_logit a lower bound"
        return f"AttentionStats({', '.join(self.names)}; rows {list(self.shape)}{sampled})"

    @property
    def valid(self) -> Tensor:
        """[B, H, Q] bool: the row sees a key, every visible score is finite, and ``where`` has not left it out."""
        return self._included_rows(torch.isfinite(self._level))

    @property
    def empty(self) -> Tensor:
        """[B, H, Q] bool: the row sees no key."""
        return self._included_rows(self._state[Column.VISIBLE_KEYS] == 0)

    @property
    def nonfinite(self) -> Tensor:
        """[B, H, Q] bool: a visible score of the row is not finite."""
        return self._included_rows((self._state[Column.VISIBLE_KEYS] > 0) & ~torch.isfinite(self._level))

    @property
    def shape(self) -> torch.Size:
        """[B, H, Q]: the rows."""
        return self._state[Column.VISIBLE_KEYS].shape

    @property
    def visible_rows(self) -> tuple[Tensor, Tensor]:
        """[B, H, Q] each: the keys that rows see, and which rows count (bool)."""
        return self._state[Column.VISIBLE_KEYS], self.valid

    @property
    def device(self) -> torch.device:
        return self._state[Column.VISIBLE_KEYS].device

    @property
    def _level(self) -> Tensor:
        """[B, H, Q]: finite where the row sees keys and every visible score is finite."""
        return self._state[Column.MAXIMUM] if is_rowwise(self.normalizer) else self.lse

    def _included_rows(self, rows: Tensor) -> Tensor:
        included = self._facts.included
        return rows if included is None else rows & included

    def where(self, rows: Tensor) -> AttentionStats:
        """The same statistics, counting only ``rows`` (bool, broadcastable to [B, H, Q]): real tokens, say,
        not padding.
        """
        # A sum over all rows cannot leave some out: it is not carried along.
        names = tuple(name for name in self.names if name != "key_mass")
        included = self._included_rows(rows.to(torch.bool).expand(self.shape))
        return AttentionStats(self._values, self._state, self._facts._replace(included=included), names)

    def with_values(self, name: str, values: Tensor) -> AttentionStats:
        """The same statistics and one more, [B, H, Q]."""
        held = {each: self._values[each] for each in self.names} | {name: values}
        return AttentionStats(held, self._state, self._facts)

    def without(self, name: str) -> AttentionStats:
        """The same statistics but for this one."""
        return AttentionStats(
            self._values, self._state, self._facts, tuple(each for each in self.names if each != name)
        )

    def detach(self) -> AttentionStats:
        """The same statistics outside the autograd graph."""
        values = self._values
        if isinstance(values, LazyStatistics):
            values = values.detach()
        else:
            values = {name: value.detach() for name, value in values.items()}
        sink = None if self._facts.sink is None else self._facts.sink.detach()
        return AttentionStats(values, detach(self._state), self._facts._replace(sink=sink), self.names)

    def defined_rows(self, name: str) -> Tensor:
        """[B, H, Q] bool: the valid rows over which ``name`` is averaged (normalised entropy needs 2 keys,
        for example).
        """
        where = STATISTICS[name].defined
        if where is Rows.ALL:
            return self.valid
        more_than = {Rows.TWO_KEYS: 1, Rows.BEYOND_FIRST: self._facts.first_tokens}.get(where)
        rows = self.valid if more_than is None else self.valid & (self._state[Column.VISIBLE_KEYS] > more_than)
        # Sigmoids may all vanish: nothing is a mean under such weights.
        mass = self._state.get(Column.MASS)
        return rows if mass is None else rows & (mass > 0)

    def per_head(self) -> dict[str, HeadSummary]:
        """Name -> mean, std, min, max, count, empty, nonfinite over the rows of each head, each [H], float64.

        Reduced on the CPU where a device has no float64. ``key_mass`` is summarised over all keys.
        """
        empty, nonfinite = (_count(rows) for rows in (self.empty, self.nonfinite))
        summaries = {}
        for name in self.names:
            value = self._values[name]
            rows = torch.ones_like(value, dtype=torch.bool) if name == "key_mass" else self.defined_rows(name)
            summaries[name] = HeadSummary(*_moments(value.detach(), rows), empty, nonfinite)
        return summaries

    def standard_error(self) -> dict[str, Tensor]:
        """Name -> standard error of ``per_head()[name].mean`` [H], float64: what measuring only some rows may
        have missed.

        ``s / sqrt(count) * sqrt(1 - fraction)``, rows taken as a random sample without replacement; 0 where all were
        measured. Evenly strided rows usually do better than this.
        """
        errors, every = {}, self._facts.population
        fraction = 1.0 if self.rows is None or not every else len(self.rows) / every
        for name, summary in self.per_head().items():
            if name == "key_mass":
                continue  # a sum over rows, not a mean of them
            sample_std = summary.std * torch.sqrt(summary.count / (summary.count - 1).clamp(min=1))
            errors[name] = sample_std / summary.count.sqrt() * math.sqrt(max(0.0, 1 - fraction))
        return errors

    def sums(self) -> Tensor | None:
        """The rows as sums per head, [H, WIDTH] float64 (``backends/sums.py``), by one pass of a kernel; None
        where none can do it.
        """
        if not is_plain(self.normalizer) or self._facts.sink is not None or not isinstance(self._state, LazyState):
            return None
        return self._state.sums(self._facts.included, self._facts.first_tokens)

    def histogram(self) -> Tensor:
        """[H, 32] int64: valid rows by normalised entropy, in 32 equal bins of [0, 1]. Adds up over parts."""
        heads = self.shape[1]
        rows = self.defined_rows("normalized_entropy")
        bins = (self.normalized_entropy.detach() * BINS).nan_to_num(0.0).to(torch.int64).clamp(0, BINS - 1)
        counts = torch.zeros((heads, BINS), dtype=torch.int64, device=bins.device)
        return counts.scatter_add_(1, by_head(bins), by_head(rows.to(torch.int64)))

    def by_visible_keys(self) -> VisibleKeyCurve:
        """Rows and sums of ``entropy``, ``normalized_entropy`` and ``first_token_mass`` by visible keys: the long-
        context curve.

        Sums of those that were asked for; all but the edges add up over parts.
        """
        device = _reduction_device(self._state[Column.VISIBLE_KEYS])
        n = by_head(self._state[Column.VISIBLE_KEYS].to(device, torch.int64))
        bucket = (n.clamp(min=1).to(torch.float64).log2() + 1e-12).floor().to(torch.int64).clamp(max=BINS - 1)

        def add(value: Tensor) -> Tensor:
            return torch.zeros((n.shape[0], BINS), dtype=torch.float64, device=device).scatter_add_(1, bucket, value)

        sums = {}
        for name in ("entropy", "normalized_entropy", "first_token_mass"):
            if name in self.names:
                rows = by_head(self.defined_rows(name).to(device))
                value = by_head(self._values[name].detach().to(device, torch.float64))
                sums[name] = add(torch.where(rows, value, 0.0))
        edges = 2 ** torch.arange(BINS + 1, dtype=torch.int64, device=device)
        return VisibleKeyCurve(edges[:-1], edges[1:] - 1, add(by_head(self.valid.to(device, torch.float64))), sums)

    def merge(self, other: AttentionStats) -> AttentionStats:
        """The statistics over the keys of both; ``other`` holds the later keys of the same queries.

        Raises:
            InputError: the two hold different statistics or rows, or one that two parts do not determine.
        """
        _check_mergeable(self, other)
        one, two = self._facts, other._facts
        state = merge(self._state, other._state)
        sink = one.sink if one.sink is not None else two.sink
        asked = tuple(name for name in one.asked if name in two.asked)
        values = LazyStatistics(state, self.names, sink, asked).settle()
        return AttentionStats(values, state, one._replace(sink=sink, asked=asked, keys=one.keys + two.keys), self.names)


class AttentionOutput(NamedTuple):
    """The output of attention, with statistics if you asked for them."""

    output: Tensor
    """[B, H, Q, E]."""
    stats: AttentionStats | None
    """Statistics of the rows; None if none were asked for."""

    def merge(self, other: AttentionOutput) -> AttentionOutput:
        """The result over the keys of both; ``other`` holds the later keys of the same queries.

        Associative, differentiable, exact up to rounding: the law behind key blocks, split decoding and context
        parallelism. A sink must be given to one part only.

        Raises:
            InputError: a part has no statistics, or they cannot merge.
        """
        if self.stats is None or other.stats is None:
            raise InputError(
                "AttentionOutput.merge needs the statistics of both parts: pass stats=('lse',) to both calls."
            )
        one, two = self.stats, other.stats
        stats, sinks = one.merge(two), (one._facts.sink, two._facts.sink)
        output = joined_output((self.output, other.output), (one._state, two._state), sinks)
        return AttentionOutput(output, stats)


def _check_mergeable(one: AttentionStats, two: AttentionStats) -> None:
    for part in (one, two):
        if not is_mergeable(part.normalizer):
            raise InputError(
                f"merge: weights of {part.normalizer} over some keys do not determine those over all. Only softmax "
                "merges: compute it in one call."
            )
    if one.names != two.names:
        raise InputError(f"merge needs the same statistics in both parts, got {one.names} and {two.names}.")
    refused = [name for name in one.names if not STATISTICS[name].mergeable]
    if refused:
        raise InputError(
            f"{', '.join(refused)} cannot be merged over keys: leave it out of stats=, or compute it in one call."
        )
    if one.lse.shape != two.lse.shape:
        raise InputError(
            f"merge needs the same rows in both parts, got {list(one.lse.shape)} and {list(two.lse.shape)}."
        )
    if one._facts.sink is not None and two._facts.sink is not None:
        raise InputError(
            "merge: both parts were given sink_logits, or a normalizer with a sink, which would count it twice. "
            "Give it to one part, and plain softmax to the other."
        )
    keys, first_tokens = one._facts.keys, one._facts.first_tokens
    if "first_token_mass" in one.names and keys < first_tokens:
        raise InputError(
            f"merge: the keys of the first part are fewer ({keys}) than first_tokens={first_tokens}: "
            "first_token_mass cannot be computed. Make the first part longer or leave the statistic out."
        )


def by_head(value: Tensor) -> Tensor:
    """[B, H, Q] as [H, B * Q]."""
    return value.transpose(0, 1).flatten(1)


def _reduction_device(value: Tensor) -> torch.device:
    """Where float64 sums can be taken."""
    return torch.device("cpu") if value.device.type == "mps" else value.device


def _count(rows: Tensor) -> Tensor:
    return by_head(rows.to(_reduction_device(rows))).sum(1, dtype=torch.float64)


def _moments(value: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Mean, population std, min, max, count over the marked rows of each head, float64."""
    device = _reduction_device(value)
    flat, chosen = by_head(value.to(device, torch.float64)), by_head(rows.to(device))
    count = chosen.sum(1, dtype=torch.float64)
    missing = count == 0
    safe = count.clamp(min=1)
    mean = torch.where(chosen, flat, 0.0).sum(1) / safe
    variance = torch.where(chosen, (flat - mean[:, None]) ** 2, 0.0).sum(1) / safe
    if flat.shape[1] == 0:
        low = high = torch.full_like(mean, math.nan)
    else:
        low = torch.where(chosen, flat, math.inf).amin(1)
        high = torch.where(chosen, flat, -math.inf).amax(1)
    mean, std, low, high = (part.masked_fill(missing, math.nan) for part in (mean, variance.sqrt(), low, high))
    return mean, std, low, high, count
