"""What one process wrote of a run, read while it is written or after: samples, and the numbers of sites over them."""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attemper.errors import InputError
from attemper.file_schema import check_document, parse_json
from attemper.readings.sample import QUANTITIES, Sample, Samples, SiteKey, SiteLabel
from attemper.store.checksum import JUDGED_VERSION, damage, get, has_unchecked, whole
from attemper.store.compaction import (
    CHUNK,
    FIRST_LEVEL,
    LEVEL_STEP,
    MOMENT,
    REST,
    Layout,
    Pair,
    join_counts,
    layouts,
    moments,
    row_span,
    split_counts,
    unpack,
)
from attemper.store.process import UNNOTED, is_held, lost_beside
from attemper.store.scalars import Series, read, state, thinned_until
from attemper.store.schema import DAMAGED, Tables, read_about

Array = np.ndarray
Hot = tuple[int, Layout, Array]
BLOCK, NUMBERS = 1024, 10 << 20
"""Samples, and numbers, that are read together at most: 40 MB, of 1,024 samples of 1,024 heads and 10 statistics."""


def between(moments: Array, start: int | None, stop: int | None) -> Array:
    first = 0 if start is None else np.searchsorted(moments["step"], start)
    last = len(moments) if stop is None else np.searchsorted(moments["step"], stop)
    return moments[first:last]


class Start(NamedTuple):
    """How a segment began."""

    segment: int
    first_sample: int
    first_step: int
    began: float
    """Seconds since 1970, UTC."""


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

    def __init__(
        self, tables: Tables, rank: int = 0, lock: Path | None = None, until: float = 0.0, since: int = 0
    ) -> None:
        """
        Args:
            tables: of the fragment.
            lock: the file that a writer of the fragment locks; None where nobody else can write.
            until: when parts of which these tables were made no longer count as live; seconds since 1970, UTC.
            since: the first sample of a chunk: earlier ones are not read.
        """
        self.rank, self._since = rank, since
        self._lock, self._until = lock, until
        self.tables = tables
        self._read = self._kept = np.zeros(0, MOMENT)
        """All samples as they were read last, and those of them that count."""
        self._edges = np.zeros(1, np.int64)
        """Where chunks begin, with the end of the last."""
        self._unchecked: bool | None = None
        """Whether any of it has no checksum; None where nobody has asked yet."""
        self._layouts: dict[int, Layout] = {}
        self._state: object = None
        self._hot_of: object = None
        self._hot_rows: list[Hot] = []
        self._held: dict[tuple[int, ...], Array] = {}
        """Layouts -> the samples that have one of them."""
        self._scalars: tuple[tuple[int, ...], dict[str, Series]] | None = None
        """Numbers of steps as they were read last, and the state of the file then."""
        self._first_rank: FragmentReader | None = None

    def follow(self, first_rank: FragmentReader) -> None:
        """What the first rank replaced when it was resumed counts here no longer either.

        A rank that did not come back has no segment of its own that would say so.
        """
        self._first_rank = first_rank

    @property
    def live(self) -> bool:
        """Whether a process of this machine writes to it, or its newest part is so new that one of any may."""
        return time.time() < self._until or (self._lock is not None and is_held(self._lock))

    def close(self) -> None:
        self.tables.close()

    def __del__(self) -> None:
        self.close()

    # --- what the fragment says of the run ---

    @property
    def about(self) -> dict[str, Any]:
        return read_about(self.tables)

    @property
    def statistics(self) -> dict[str, int]:
        return {name: number for number, name, *_ in whole(self.tables.rows, "statistic")}

    @property
    def sites(self) -> dict[SiteKey, SiteLabel]:
        """In the order in which they were first seen; of a site whose label has changed, the latest."""
        return {label.key: label for label, _ in self._places}

    @property
    def _places(self) -> list[tuple[SiteLabel, int]]:
        # A file of an earlier version has not all columns of a label: what it lacks is as the label's default.
        return [(SiteLabel(*label), site) for site, *label in whole(self.tables.rows, "site")]

    @property
    def segments(self) -> list[Segment]:
        moments, found = self.moments, []
        for number, _, _, began, rank, process, versions in whole(self.tables.rows, "segment"):
            steps = moments["step"][moments["segment"] == number]
            ends = (int(steps[0]), int(steps[-1])) if len(steps) else (None, None)
            told = check_document(parse_json(versions, f"{DAMAGED} versions"), {str: str}, "versions of the run")
            found.append(Segment(rank, began, process, told, len(steps), *ends))
        return found

    @property
    def coverage(self) -> dict[SiteKey, str | None]:
        """Every site that was expected -> None where it was read, else why it was not."""
        return {(name, kind, mode): reason for name, kind, mode, reason in whole(self.tables.rows, "coverage")}

    @property
    def lost(self) -> list[Lost]:
        rows = whole(self.tables.rows, "lost")
        noted = [Lost(samples, reason, noted, step) for _, step, noted, samples, reason in rows]
        beside = [] if self._lock is None else lost_beside(self._lock)
        return [*noted, *(Lost(samples, UNNOTED, path.stat().st_mtime) for path, samples in beside)]

    @property
    def scalars(self) -> dict[str, Series]:
        """Numbers of steps that the loop gave, by name."""
        with self.tables.snapshot():
            now = state(self.tables.rows)
            if self._scalars is None or self._scalars[0] != now:
                self._scalars = now, read(self.tables.rows)
        return self._scalars[1]

    @property
    def scalars_thinned_until(self) -> int | None:
        """Up to which step; None where all are there."""
        return thinned_until(self.tables.rows)

    @property
    def moments(self) -> Array:
        """[samples] of ``MOMENT`` that count, by step. Two have the same step where a step had two passes."""
        self._look()
        return self._kept

    def _look(self) -> None:
        """Reads which samples there are, where that has changed."""
        with self.tables.snapshot():
            # Samples are added at the end, and taken away only together with chunks.
            (counts,) = self.tables.rows("SELECT (SELECT max(id) FROM sample), (SELECT count(*) FROM chunk)")
            state = counts, self._first_rank.starts if self._first_rank else []
            if state != self._state:
                self._read, self._edges = moments(self.tables.rows, self._since)
                self._unchecked = None
                self._kept = self._not_replaced(self._read)
                self._layouts, self._held = layouts(self.tables.rows), {}
                if not set(np.unique(self._read["layout"]).tolist()) <= self._layouts.keys():
                    raise InputError(f"{DAMAGED} a sample has no layout.")
                keys, names = {site: label.key for label, site in self._places}, {*self.statistics.values()}
                for layout in self._layouts.values():
                    if not names.issuperset(layout.statistics) or len({keys[site] for site in layout.sites}) < len(
                        layout.sites
                    ):
                        raise InputError(f"{DAMAGED} a layout has unknown statistics, or a site twice.")
                self._state = state

    @property
    def unchecked(self) -> bool:
        """Whether any of it has no checksum: an earlier version wrote it."""
        if len(self.moments) and self._unchecked is None:
            self._unchecked = has_unchecked(self.tables.rows)
        return bool(self._unchecked)

    @property
    def starts(self) -> list[Start]:
        """Of each segment that has or had a sample, in their order. Thinning takes samples, and no start."""
        return [Start(*row[:4]) for row in whole(self.tables.rows, "segment") if row[2] is not None]

    @property
    def restarts(self) -> list[int]:
        """First steps of segments that replace all that was stored before them."""
        steps = [start.first_step for start in self.starts]
        return [step for place, step in enumerate(steps) if place and step <= min(steps[:place])]

    def _not_replaced(self, moments: Array) -> Array:
        """Without the samples that a later segment replaces: those from its first step on."""
        counts, stop = np.ones(len(moments), bool), np.iinfo(np.int64).max
        others = self._first_rank.starts if self._first_rank else []
        for start in reversed(self.starts):
            own = np.flatnonzero(moments["segment"] == start.segment)
            ended = max(start.began, moments["time"][own].max(initial=-np.inf))
            stops = [stop, *(other.first_step for other in others if other.began > ended)]
            counts[own] = moments["step"][own] < min(stops)
            stop = min(stop, start.first_step)
        return moments[counts]

    def verdicts(self, laws: int) -> list[tuple[int, int, bytes]]:
        """What judges by these laws knew, the latest first.

        Returns:
            How many samples they saw, the CRC-32 of the moments of these, and what ``RunJudge.to_bytes`` gave.
        """
        ((version,),) = self.tables.rows("PRAGMA user_version")
        if version < JUDGED_VERSION:
            return []
        rows = get(self.tables.rows, "verdict", "WHERE laws = ? ORDER BY samples DESC", (laws,))
        return [row[1:] for row in rows]

    # --- numbers ---

    def values(self, statistic: str, keys: Sequence[SiteKey], steps: Array) -> Iterator[Array]:
        """Of each site [steps, heads]; NaN where a step, of those ascending, has no number.

        float32, and float64 of counts that need it.
        """
        moments = self.moments
        moments = moments[np.isin(moments["step"], steps)]
        split = f"{statistic}{REST}" in self.statistics
        span, rows = self._span(moments), np.searchsorted(steps, moments["step"])
        for key in keys:
            series = [self.series(pair, span) for pair in self.pairs(statistic, key)]
            found = _align(moments["id"], rows, len(steps), series)
            if split:
                rests = [self.series(pair, span) for pair in self.pairs(f"{statistic}{REST}", key)]
                rest = _align(moments["id"], rows, len(steps), rests)
                found = found + np.nan_to_num(rest.astype(np.float64)) if rest.size else found
            yield found

    def samples(self, moments: Array, names: Container[str] = QUANTITIES) -> Iterator[Sample]:
        """Of each of ``moments`` the statistics of these names that it holds."""
        for block in self.blocks(moments, names):
            yield from block.each()

    def replay(self, first: int, last: int) -> dict[int, Sample]:
        """The samples with numbers from ``first`` to ``last`` that are left, replaced or not, as they were stored."""
        with self.tables.snapshot():
            self._look()
            taken = self._read[(self._read["id"] >= first) & (self._read["id"] <= last)]
            return dict(zip(taken["id"].tolist(), map(split_counts, self.samples(taken, self.statistics)), strict=True))

    def blocks(self, moments: Array, names: Container[str] = QUANTITIES) -> Iterator[Samples]:
        """The same, neighbours with the same sites together."""
        known = {number: name for name, number in self.statistics.items() if name.removesuffix(REST) in names}
        told: dict[int, tuple[tuple[SiteLabel, ...], tuple[str, ...]]] = {}
        """Layout -> its sites and statistics, the same objects for all samples."""
        size = max((one.heads * len(one.statistics) for one in self._layouts.values()), default=1)
        many = min(BLOCK, max(1, NUMBERS // max(1, size)))
        for start in range(0, len(moments), many):
            block = moments[start : start + many]
            numbers = {one: self._numbers(block, one, known) for one in np.unique(block["layout"]).tolist()}
            for one in numbers.keys() - told.keys():
                held = tuple(known[number] for number in self._layouts[one].statistics if number in known)
                told[one] = self._labels(one), held
            read = dict.fromkeys(numbers, 0)
            edges = np.flatnonzero(np.diff(block["layout"])) + 1
            for alike in np.split(block, edges):
                number, many = int(alike["layout"][0]), len(alike)
                sites, held = told[number]
                values = np.moveaxis(numbers[number][read[number] : read[number] + many], 1, 0)
                read[number] += many
                steps, times, tokens = (alike[name].tolist() for name in ("step", "time", "tokens"))
                yield Samples(steps, times, tokens, sites, *join_counts(held, values))

    def sites_of(self, moments: Array) -> Iterator[tuple[SiteLabel, ...]]:
        """The sites of samples, once for each of their layouts, in the order in which these come first."""
        _, firsts = np.unique(moments["layout"], return_index=True)
        yield from (self._labels(layout) for layout in moments["layout"][np.sort(firsts)].tolist())

    def _labels(self, layout: int) -> tuple[SiteLabel, ...]:
        labels = {site: label for label, site in self._places}
        return tuple(labels[site] for site in self._layouts[layout].sites)

    def _numbers(self, block: Array, layout: int, known: Container[int]) -> Array:
        """[samples, statistics, heads] of those of a block that have this layout."""
        moments, sites = block[block["layout"] == layout], self._layouts[layout].sites
        statistics = [number for number in self._layouts[layout].statistics if number in known]
        found = np.full((len(moments), len(statistics), self._layouts[layout].heads), np.nan, np.float32)
        span, rows = self._span(moments), np.arange(len(moments))
        for site, heads in sites.items():
            for row, statistic in enumerate(statistics):
                series = self.series((statistic, site), span)
                found[:, row, heads] = _align(moments["id"], rows, len(rows), [series])
        return found

    def _span(self, moments: Array) -> tuple[int, int]:
        return self.span(int(moments["id"][0]), int(moments["id"][-1])) if len(moments) else (0, -1)

    def span(self, first: int, last: int) -> tuple[int, int]:
        """Of samples ``first`` to ``last``, with the first of its chunk."""
        firsts = self._edges[:-1]
        return int(firsts[firsts <= first].max(initial=self._since)), last

    def _hot(self, span: tuple[int, int]) -> list[Hot]:
        """Samples that are not folded: their numbers, layouts and values."""
        if self._hot_of != (self._state, span):
            taken = self._read[(self._read["id"] >= max(span[0], self._edges[-1])) & (self._read["id"] <= span[1])]
            ends = (int(taken["id"][0]), int(taken["id"][-1])) if len(taken) else (0, -1)
            rows = get(self.tables.rows, "hot", "WHERE sample BETWEEN ? AND ? ORDER BY sample", ends)
            if [sample for sample, _ in rows] != taken["id"].tolist():
                raise damage("some of its samples have no number")
            found = zip(rows, taken["layout"].tolist(), strict=True)
            self._hot_rows = [(sample, self._layouts[one], np.frombuffer(data, "<f4")) for (sample, data), one in found]
            if any(data.size != layout.heads * len(layout.statistics) for _, layout, data in self._hot_rows):
                raise damage("a sample has not the heads of its sites")
            self._hot_of = self._state, span
        return self._hot_rows

    def pairs(self, statistic: str, key: SiteKey) -> list[Pair]:
        """Where a statistic of a site stands in the fragment; a site whose label has changed stands in several."""
        number = self.statistics.get(statistic, -1)
        return [(number, site) for label, site in self._places if label.key == key]

    def series(self, pair: Pair, span: tuple[int, int]) -> tuple[Array, Array]:
        """Samples that hold a statistic of a site, and their values [samples, heads]. ``span``: first and last sample;
        the first is that of a chunk, and what follows in the chunk of the last comes with it.
        """
        where = "WHERE statistic = ? AND site = ? AND first BETWEEN ? AND ? ORDER BY first"
        rows = get(self.tables.rows, "cold", where, (*pair, *span))
        parts = [unpack(numbers) for *_, numbers in rows]
        samples, firsts = self._cold(pair, span)
        if [row[:3] for row in rows] != [(*pair, first) for first in firsts] or sum(map(len, parts)) != len(samples):
            raise damage("some of its samples have no number")
        heads = next((one.sites[pair[1]] for one in self._layouts.values() if pair in one.pairs), slice(0, 0))
        if any(part.shape[1] != heads.stop - heads.start for part in parts):
            raise damage("a block has not the heads of its site")
        hot = [one for one in self._hot(span) if pair in one[1].pairs]
        for _, layout, values in hot:
            row, heads = layout.pairs[pair]
            parts.append(values.reshape(-1, layout.heads)[row, heads][None])
        samples = np.concatenate([samples, np.array([sample for sample, _, _ in hot], samples.dtype)])
        return samples, np.concatenate(parts) if parts else np.zeros((0, 0), np.float32)

    def pyramid_rows(self, pair: Pair, level: int) -> dict[int, Array]:
        """First sample -> blocks [blocks, 4, heads] of a level of the pyramid."""
        found = get(self.tables.rows, "pyramid", "WHERE statistic = ? AND site = ? AND level = ?", (*pair, level))
        if any(row[:3] != (*pair, level) for row in found):
            raise damage("its index leads to other rows")
        rows = {first: unpack(numbers) for *_, first, numbers in found}
        return {first: blocks.reshape(len(blocks), 4, -1) for first, blocks in rows.items()}

    def check_pyramid(self, pair: Pair, level: int, known: Array) -> None:
        """``known``: which blocks of a level, from the first on, the file has of a statistic of a site."""
        holding, stop = self._holding(pair), int(self._edges[-1])
        if level > FIRST_LEVEL:
            stop -= stop % row_span(level - LEVEL_STEP)
        spacings = np.diff(self._edges) // CHUNK
        kept = holding[holding < stop]
        kept = kept[spacings[np.searchsorted(self._edges, kept, "right") - 1] >> level == 0] >> level
        if not self.unchecked and not known[kept[kept < len(known)]].all():
            raise damage("blocks of its pyramid are gone")

    @property
    def replaced(self) -> list[tuple[int, int]]:
        """First and end of each range of samples that do not count, ascending, with those that thinning took."""
        starts, last = self.starts, int(self._read["id"][-1]) if len(self._read) else -1
        ends = [*(start.first_sample for start in starts[1:]), last + 1]
        found = []
        for start, end in zip(starts, ends, strict=True):
            kept = self._kept["id"][self._kept["segment"] == start.segment]
            read = self._read["id"][self._read["segment"] == start.segment]
            if len(kept) < len(read) or not len(read):  # steps of a segment ascend: what counts of it is its beginning
                found.append((int(kept[-1]) + 1 if len(kept) else start.first_sample, end))
        return [(first, end) for first, end in found if first < end]

    def _cold(self, pair: Pair, span: tuple[int, int]) -> tuple[Array, list[int]]:
        """Numbers of the samples that hold a statistic of a site, in chunks that begin in a span, and these chunks."""
        first, last = np.searchsorted(self._edges[:-1], span[0]), np.searchsorted(self._edges[:-1], span[1], "right")
        edges, holding = self._edges[first : last + 1], self._holding(pair)
        places = np.searchsorted(holding, edges)
        return holding[places[0] : places[-1]], edges[:-1][np.diff(places) > 0].tolist()

    def _holding(self, pair: Pair) -> Array:
        """Numbers of the samples that hold a statistic of a site."""
        holding = tuple(number for number in self._layouts if pair in self._layouts[number].pairs)
        if holding not in self._held:
            self._held[holding] = self._read["id"][np.isin(self._read["layout"], holding)]
        return self._held[holding]


def _align(wanted: Array, rows: Array, many: int, parts: Sequence[tuple[Array, Array]]) -> Array:
    """[many, heads]: of each wanted sample, in its row, the values that one of ``parts`` (samples, values) has for it.

    Of two samples in one row the later one counts.
    """
    parts = [(samples, values) for samples, values in parts if len(samples)]
    in_order = len(wanted) == many and np.array_equal(rows, np.arange(many))
    if len(parts) == 1 and in_order and np.array_equal(parts[0][0], wanted):
        return parts[0][1]
    found = np.full((many, max((values.shape[1] for _, values in parts), default=0)), np.nan, np.float32)
    for samples, values in parts:
        _, here, there = np.intersect1d(wanted, samples, assume_unique=True, return_indices=True)
        found[rows[here], : values.shape[1]] = values[there]
    return found
