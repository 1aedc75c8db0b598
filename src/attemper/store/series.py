"""What one process wrote of a run, read while it is written or after: samples, and the numbers of sites over them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from attemper.errors import InputError
from attemper.readings.sample import Sample, SiteKey, SiteLabel
from attemper.store.chunk import unpack
from attemper.store.folding import Layout, Pair, layouts
from attemper.store.lock import is_held
from attemper.store.schema import Tables

Array = np.ndarray
Hot = tuple[int, Layout, Array]
_LABEL = ", ".join(part.name for part in fields(SiteLabel))


MOMENT = np.dtype([("id", "i8"), ("segment", "i8"), ("step", "i8"), ("time", "f8"), ("tokens", "i8"), ("layout", "i8")])
"""A sample of a fragment but for its numbers: what the table ``sample`` has of it."""


def between(moments: Array, start: int | None, stop: int | None) -> Array:
    """Those of ``moments``, which are by step, with ``start`` <= step < ``stop``."""
    first = 0 if start is None else np.searchsorted(moments["step"], start)
    last = len(moments) if stop is None else np.searchsorted(moments["step"], stop)
    return moments[first:last]


@dataclass(frozen=True)
class Segment:
    """What one process wrote of a run without going back."""

    rank: int
    began: float
    """Seconds since 1970, UTC."""
    process: int
    versions: dict[str, str]
    samples: int
    """How many of them count: a later segment replaces what it overlaps."""
    first_step: int | None
    last_step: int | None


@dataclass(frozen=True)
class Lost:
    """Samples that could not be stored."""

    samples: int
    reason: str
    time: float
    """Seconds since 1970, UTC, when that was noted."""
    step: int | None = None


class FragmentReader:
    """What one process wrote, as far as it stands at the moment of each question."""

    def __init__(self, tables: Tables, rank: int = 0, lock: Path | None = None) -> None:
        """
        Args:
            tables: of the fragment.
            lock: the file that a writer of the fragment locks; None where nobody else can write.
        """
        self.rank = rank
        self._lock = lock
        self._tables = tables
        self._read = self._kept = np.zeros(0, MOMENT)
        """All samples as they were read last, and those of them that count."""
        self._layouts: dict[int, Layout] = {}
        self._state: object = None
        self._held: dict[tuple[int, ...], Array] = {}
        """Layouts -> the samples that have one of them."""

    @property
    def live(self) -> bool:
        """Whether a process of this machine writes to it."""
        return self._lock is not None and is_held(self._lock)

    def close(self) -> None:
        self._tables.close()

    def snapshot(self) -> AbstractContextManager[None]:
        """Answers to all questions within belong together, whatever the writer does meanwhile."""
        return self._tables.snapshot()

    # --- what the fragment says of the run ---

    @property
    def about(self) -> dict[str, Any]:
        return {name: json.loads(value) for name, value in self._tables.rows("SELECT name, value FROM about")}

    @property
    def statistics(self) -> dict[str, int]:
        """Name -> number in the fragment."""
        return dict(self._tables.rows("SELECT name, id FROM statistic ORDER BY id"))

    @property
    def sites(self) -> dict[SiteKey, SiteLabel]:
        """In the order in which they were first seen; of a site whose label has changed, the latest."""
        return {label.key: label for label, _ in self._places}

    @property
    def _places(self) -> list[tuple[SiteLabel, int]]:
        rows = self._tables.rows(f"SELECT {_LABEL}, id FROM site ORDER BY id")
        return [(SiteLabel(*row[:-1]), row[-1]) for row in rows]

    @property
    def segments(self) -> list[Segment]:
        moments, found = self.moments, []
        rows = self._tables.rows("SELECT id, rank, began, process, versions FROM segment ORDER BY id")
        for number, rank, began, process, versions in rows:
            steps = moments["step"][moments["segment"] == number]
            ends = (int(steps[0]), int(steps[-1])) if len(steps) else (None, None)
            found.append(Segment(rank, began, process, json.loads(versions), len(steps), *ends))
        return found

    @property
    def coverage(self) -> dict[SiteKey, str | None]:
        """Every site that was expected -> None where it was read, else why it was not."""
        rows = self._tables.rows("SELECT name, kind, mode, reason FROM coverage")
        return {(name, kind, mode): reason for name, kind, mode, reason in rows}

    @property
    def lost(self) -> list[Lost]:
        return [Lost(*row) for row in self._tables.rows("SELECT samples, reason, time, step FROM lost ORDER BY id")]

    @property
    def moments(self) -> Array:
        """[samples] of ``MOMENT`` that count, by step. Two have the same step where a step had two passes."""
        # Samples are added at the end, and taken away only together with chunks.
        (state,) = self._tables.rows("SELECT (SELECT max(id) FROM sample), (SELECT count(*) FROM chunk)")
        if state != self._state:
            self._state = state
            rows = self._tables.rows(f"SELECT {', '.join(MOMENT.names or ())} FROM sample ORDER BY id")
            self._read = np.array(rows, MOMENT)
            self._kept = _not_replaced(self._read)
            self._layouts, self._held = layouts(self._tables.rows), {}
        return self._kept

    # --- numbers ---

    def values(self, statistic: str, keys: Sequence[SiteKey], steps: Array) -> Iterator[Array]:
        """Of each site [steps, heads] float32; NaN where a step, of those ascending, has no number."""
        moments = self.moments
        moments = moments[np.isin(moments["step"], steps)]
        number, span = self.statistics.get(statistic, -1), self._span(moments)
        hot, rows = self._hot(span), np.searchsorted(steps, moments["step"])
        for key in keys:
            sites = [site for label, site in self._places if label.key == key]
            series = [self._series((number, site), span, hot) for site in sites]
            yield _align(moments["id"], rows, len(steps), series)

    def samples(self, step: int) -> list[Sample]:
        """Every number of a step: a sample of each of its passes, the last one first."""
        moments = between(self.moments, step, step + 1)
        return [self._sample(moments[place : place + 1]) for place in reversed(range(len(moments)))]

    def _sample(self, one: Array) -> Sample:
        layout, span = self._layouts[int(one["layout"][0])], self._span(one)
        names = {number: name for name, number in self.statistics.items()}
        labels = {site: label for label, site in self._places}
        hot = self._hot(span)
        values = np.full((len(layout.statistics), layout.heads), np.nan, np.float32)
        for pair, (row, heads) in layout.pairs.items():
            values[row, heads] = _align(one["id"], np.zeros(1, int), 1, [self._series(pair, span, hot)])[0]
        return Sample(
            step=int(one["step"][0]),
            time=float(one["time"][0]),
            sites=tuple(labels[site] for site in layout.sites),
            quantities=tuple(names[number] for number in layout.statistics),
            values=values,
            tokens=int(one["tokens"][0]),
        )

    def _span(self, moments: Array) -> tuple[int, int]:
        """First and last number of the samples whose chunks hold ``moments``."""
        if not len(moments):
            return 0, -1
        first, last = int(moments["id"][0]), int(moments["id"][-1])
        ((start,),) = self._tables.rows("SELECT coalesce(max(first), 0) FROM chunk WHERE first <= ?", (first,))
        return start, last

    def _hot(self, span: tuple[int, int]) -> list[Hot]:
        """Samples that are not folded: their numbers, layouts and values."""
        rows = self._tables.rows(
            "SELECT hot.sample, layout, numbers FROM hot JOIN sample ON sample.id = hot.sample "
            "WHERE hot.sample BETWEEN ? AND ? ORDER BY hot.sample",
            span,
        )
        return [(sample, self._layouts[number], np.frombuffer(data, "<f4")) for sample, number, data in rows]

    def _series(self, pair: Pair, span: tuple[int, int], hot: Sequence[Hot]) -> tuple[Array, Array]:
        """Samples of a span that hold a statistic of a site, and their values [samples, heads]."""
        question = "SELECT numbers FROM cold WHERE statistic = ? AND site = ? AND first BETWEEN ? AND ? ORDER BY first"
        parts = [unpack(numbers) for (numbers,) in self._tables.rows(question, (*pair, *span))]
        samples = self._holding(pair, span[0])[: sum(map(len, parts))]
        if sum(map(len, parts)) != len(samples):
            raise InputError("the run cannot be read: its file is damaged, some of its samples have no number.")
        for sample, layout, values in hot:
            if pair in layout.pairs:
                row, heads = layout.pairs[pair]
                samples = np.append(samples, sample)
                parts.append(values.reshape(-1, layout.heads)[row, heads][None])
        return samples, np.concatenate(parts) if parts else np.zeros((0, 0), np.float32)

    def _holding(self, pair: Pair, first: int) -> Array:
        """Numbers of the samples from ``first`` on that hold a statistic of a site."""
        holding = tuple(number for number in self._layouts if pair in self._layouts[number].pairs)
        if holding not in self._held:
            self._held[holding] = self._read["id"][np.isin(self._read["layout"], holding)]
        samples = self._held[holding]
        return samples[np.searchsorted(samples, first) :]


def _not_replaced(moments: Array) -> Array:
    """Without the samples that a later segment replaces: those from its first step on."""
    starts = np.flatnonzero(np.diff(moments["segment"], prepend=-1))
    firsts = moments["step"][starts]
    following = np.append(np.minimum.accumulate(firsts[::-1])[::-1][1:], np.iinfo(np.int64).max)
    return moments[moments["step"] < np.repeat(following[: len(starts)], np.diff(starts, append=len(moments)))]


def _align(wanted: Array, rows: Array, many: int, parts: Sequence[tuple[Array, Array]]) -> Array:
    """[many, heads]: of each wanted sample, in its row, the values that one of ``parts`` (samples, values) has for it.

    Of two samples in one row the later one counts.
    """
    parts = [(samples, values) for samples, values in parts if len(samples)]
    if len(parts) == 1 and len(wanted) == many and np.array_equal(parts[0][0], wanted):
        return parts[0][1]
    found = np.full((many, max((values.shape[1] for _, values in parts), default=0)), np.nan, np.float32)
    for samples, values in parts:
        _, here, there = np.intersect1d(wanted, samples, assume_unique=True, return_indices=True)
        found[rows[here], : values.shape[1]] = values[there]
    return found
