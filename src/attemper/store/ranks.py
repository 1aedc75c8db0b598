"""The fragments of a run as one: what every rank wrote, by step and by site; one step; a whole run in few columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from heapq import merge
from itertools import groupby, zip_longest
from operator import itemgetter
from typing import Any

import numpy as np

from attemper.readings.reading import FEWEST_KEYS, HeadReading, Reading, SiteReading, Skipped
from attemper.readings.sample import QUANTITIES, Sample, Samples, SiteKey, SiteLabel
from attemper.store import compaction
from attemper.store.compaction import REST, Pair, blocks_of, empty_blocks, join_blocks, level_for
from attemper.store.scalars import Columns, Series, join
from attemper.store.series import FragmentReader, Lost, between
from attemper.text import date_of

Array = np.ndarray


class Ranks:
    """Fragments in the order of their ranks. Where several have a site at a step, the first one counts."""

    def __init__(self, readers: Sequence[FragmentReader]) -> None:
        self.readers = tuple(readers)
        for reader in self.readers[1:]:
            reader.follow(self.readers[0])
        self._within = False
        """Whether a snapshot is open."""

    def close(self) -> None:
        for reader in self.readers:
            reader.close()

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Answers to all questions within belong together, whatever the writers do meanwhile. One may hold others."""
        with ExitStack() as snapshots:
            for reader in self.readers if not self._within else ():
                snapshots.enter_context(reader.tables.snapshot())
            before, self._within = self._within, True
            try:
                yield
            finally:
                self._within = before

    @property
    def about(self) -> dict[str, Any]:
        """What the first rank tells of the run, and of what it does not tell the next one."""
        return {name: value for reader in reversed(self.readers) for name, value in reader.about.items()}

    @property
    def sites(self) -> dict[SiteKey, SiteLabel]:
        """The heads of all ranks together; of a site whose heads several ranks have, as the first one says it."""
        found: dict[SiteKey, SiteLabel] = {}
        for reader in self.readers:
            found |= {key: _join_labels([found.get(key, label), label]) for key, label in reader.sites.items()}
        return found

    @property
    def _split_sites(self) -> dict[SiteKey, SiteLabel]:
        have = [reader.sites for reader in self.readers]
        return {
            key: label
            for key, label in self.sites.items()
            if any(key in sites and sites[key].head_numbers != label.head_numbers for sites in have)
        }

    @property
    def shared_sites(self) -> list[SiteKey]:
        """Sites of which more than one rank has written the same heads."""
        ranks = Counter(
            (key, head) for reader in self.readers for key, label in reader.sites.items() for head in label.head_numbers
        )
        return list(dict.fromkeys(key for (key, _), many in ranks.items() if many > 1))

    @property
    def statistics(self) -> tuple[str, ...]:
        names = dict.fromkeys(name for reader in self.readers for name in reader.statistics)
        return tuple(name for name in names if not name.endswith(REST))

    @property
    def scalars(self) -> dict[str, Series]:
        """Name -> the numbers of steps that the loop gave: at each step those of the first rank that has one."""
        found: dict[str, Series] = {}
        for reader in self.readers:
            found |= {name: join(found.get(name), series) for name, series in reader.scalars.items()}
        return found

    @property
    def coverage(self) -> dict[SiteKey, str | None]:
        """Every site that was expected -> None where any rank reads it, else the reason of the first that does not."""
        found: dict[SiteKey, str | None] = {}
        for reader in self.readers:
            for key, reason in reader.coverage.items():
                first = found.get(key, reason)
                found[key] = None if reason is None else first
        return found

    @property
    def lost(self) -> list[Lost]:
        return [lost for reader in self.readers for lost in reader.lost]

    @property
    def moments(self) -> list[Array]:
        """Of each rank, the samples that count."""
        return [reader.moments for reader in self.readers]

    @property
    def last_time(self) -> float | None:
        """Of the latest sample: seconds since 1970, UTC."""
        return max((float(reader.moments["time"][-1]) for reader in self.readers if len(reader.moments)), default=None)

    def steps(self, start: int | None = None, stop: int | None = None) -> Array:
        """The steps that were sampled, ascending, with ``start`` <= step < ``stop``."""
        return np.unique(np.concatenate([between(reader.moments, start, stop)["step"] for reader in self.readers]))

    def values(self, statistic: str, keys: Sequence[SiteKey], steps: Array) -> Iterator[Array]:
        """Of each site [steps, heads] as of ``FragmentReader.values``, NaN where no rank has a number."""
        if len(self.readers) == 1:
            yield from self.readers[0].values(statistic, keys, steps)
        else:
            for key in keys:
                yield self._join_values(statistic, key, steps)

    def _join_values(self, statistic: str, key: SiteKey, steps: Array) -> Array:
        having = [(reader, reader.sites[key]) for reader in self.readers if key in reader.sites]
        whole = _join_labels([label for _, label in having])
        found = np.full((len(steps), whole.heads), np.nan, np.float32)
        for reader, label in having:
            first = label.first_head - whole.first_head
            missing = np.flatnonzero(np.isnan(found[:, first : first + label.heads]).all(1))
            if len(missing):
                (values,) = reader.values(statistic, [key], steps[missing])
                if first + values.shape[1] > found.shape[1]:  # it had more heads once
                    more = ((0, 0), (0, first + values.shape[1] - found.shape[1]))
                    found = np.pad(found, more, constant_values=np.nan)
                found = found.astype(np.result_type(found, values), copy=False)
                found[missing, first : first + values.shape[1]] = values
        return found

    def sample(self, step: int) -> Sample:
        """Every number of one step, which was sampled; of two passes over a site the later one counts."""
        samples = [
            sample
            for reader in self.readers
            for sample in reversed(list(reader.samples(between(reader.moments, step, step + 1))))
        ]
        split = self._split_sites
        return samples[0] if len(samples) == 1 and not split else _join_samples(samples, split)

    def blocks(self, moments: Sequence[Array], names: Container[str] = QUANTITIES) -> Iterator[Samples]:
        """The samples of each rank's ``moments`` by step, with these statistics: of one rank, neighbours with the same
        sites together. What several ranks wrote of a step is one sample.
        """
        if len(self.readers) == 1:
            yield from self.readers[0].blocks(moments[0], names)
            return
        series = (reader.samples(one, names) for reader, one in zip(self.readers, moments, strict=True))
        split = self._split_sites
        by_step = (groupby(samples, key=lambda sample: sample.step) for samples in series)
        steps = (((step, list(samples)) for step, samples in groups) for groups in by_step)
        for _, group in groupby(merge(*steps, key=itemgetter(0)), key=itemgetter(0)):
            for passes in zip_longest(*(samples for _, samples in group)):
                yield Samples.of(_join_samples([sample for sample in passes if sample is not None], split))


def _join_samples(samples: Sequence[Sample], split: Mapping[SiteKey, SiteLabel]) -> Sample:
    """One sample of several of a step: of a head that two of them have, the first one counts.

    A site of ``split`` always has all its heads, without numbers where the rank that has them took no sample.
    """
    names = tuple(dict.fromkeys(name for sample in samples for name in sample.quantities))
    found: dict[SiteKey, list[tuple[SiteLabel, Array]]] = {}
    for sample in samples:
        numbers = np.stack([sample.of(name) for name in names])
        for label in sample.sites:
            found.setdefault(label.key, []).append((label, numbers[:, sample.places[label.key]]))
    labels = tuple(
        _join_labels([*(label for label, _ in parts), *([split[key]] if key in split else [])])
        for key, parts in found.items()
    )
    values = [_join_heads(label, parts) for label, parts in zip(labels, found.values(), strict=True)]
    first = samples[0]
    tokens = max(sample.tokens for sample in samples)
    return Sample(first.step, first.time, labels, names, np.concatenate(values, 1), tokens)


def _join_labels(labels: Sequence[SiteLabel]) -> SiteLabel:
    """The label of a site of which these ranks have heads. Heads that nobody has between theirs have no numbers."""
    first = min(label.first_head for label in labels)
    return replace(labels[0], first_head=first, heads=max(label.head_numbers.stop for label in labels) - first)


def _join_heads(whole: SiteLabel, parts: Sequence[tuple[SiteLabel, Array]]) -> Array:
    """[quantities, heads] of a site from what several ranks have of it."""
    if parts[0][0].head_numbers == whole.head_numbers:
        return parts[0][1]
    found = np.full((len(parts[0][1]), whole.heads), np.nan, np.float32)
    for label, values in reversed(parts):
        found[:, label.first_head - whole.first_head :][:, : label.heads] = values
    return found


# --- one sample ---

_FIELDS = tuple(part.name for part in fields(HeadReading) if part.name in QUANTITIES)
_NONE_STORED: dict[str, Any] = {"normalized_entropy_histogram": (), "by_visible_keys": ()}
"""Histograms and curves of a head: no history keeps them."""


def reading_of(sample: Sample, about: Mapping[str, Any], skipped: Iterable[Skipped] = ()) -> Reading:
    """What a watch showed at this step, as far as it was stored; a number that was not is None."""
    return Reading(
        model=str(about.get("model", "")),
        tokens=sample.tokens,
        backend=str(about.get("backend", "")),
        sites=tuple(_site(sample, label) for label in sample.sites),
        skipped=tuple(skipped),
        sampled_rows=about.get("rows"),
        fewest_keys=about.get("fewest_keys", FEWEST_KEYS),
        date=date_of(sample.time),
        dtype=about.get("dtype"),
        revision=about.get("revision"),
        versions=about.get("versions"),
    )


def _site(sample: Sample, label: SiteLabel) -> SiteReading:
    heads = sample.places[label.key]
    columns = {name: _numbers(name, row[heads]) for name, row in zip(sample.quantities, sample.values, strict=True)}
    return SiteReading(
        name=label.name,
        kind=label.kind,
        mode=label.mode,
        queries=_largest(columns.get("queries", [])),
        keys=_largest(columns.get("keys", [])),
        heads=tuple(_head(label, place, columns) for place in range(label.heads)),
        normalizer=label.normalizer,
        layer=label.layer,
    )


def _head(label: SiteLabel, place: int, columns: Mapping[str, list[Any]]) -> HeadReading:
    values: dict[str, Any] = {name: columns[name][place] if name in columns else None for name in _FIELDS}
    values |= {name: values[name] or 0 for name in _FIELDS if QUANTITIES[name].exact}
    judged = bool(columns["judged_rows"][place]) if "judged_rows" in columns else False
    return HeadReading(head=label.head_numbers[place], layer=label.layer, judged=judged, **_NONE_STORED, **values)


def _numbers(name: str, row: np.ndarray) -> list[Any]:
    """Counts as whole numbers, others in the fewest digits that tell them from their neighbours; None for NaN."""
    to = int if QUANTITIES[name].exact else (lambda value: float(str(np.float32(value))))
    return [to(value) if np.isfinite(value) else None for value in row]


def _largest(counts: list[int | None]) -> int:
    return max((count for count in counts if count is not None), default=0)


# --- a whole run in few columns ---


def columns(ranks: Ranks, statistic: str, key: SiteKey, most: int) -> Columns:
    """At most ``most`` columns. Of one fragment the pyramid is read, and samples only where it does not reach."""
    having = [reader for reader in ranks.readers if key in reader.sites]
    if len(having) == 1 and len(having[0].moments):
        steps, blocks = _of_fragment(having[0], statistic, key, most)
    else:
        steps = ranks.steps()
        (values,) = ranks.values(statistic, [key], steps)
        blocks = blocks_of(values[:, None])
    many = max(1, -(-len(steps) // most))
    more = empty_blocks(-len(blocks) % many, blocks.shape[-1])
    blocks = join_blocks(np.concatenate([blocks, more]), many)
    parts = (blocks[:, part] for part in (compaction.LEAST, compaction.MEAN, compaction.LARGEST))
    return Columns(steps[::many], *parts)


def _of_fragment(reader: FragmentReader, statistic: str, key: SiteKey, most: int) -> tuple[Array, Array]:
    """[blocks] steps and [blocks, 4, heads], of blocks that hold a sample that counts."""
    moments, pairs = reader.moments, reader.pairs(statistic, key)
    level = level_for(int(moments["id"][-1]) + 1, most)
    if not level:
        steps = np.unique(moments["step"])
        (values,) = reader.values(statistic, [key], steps)
        return steps, blocks_of(values[:, None])
    places, firsts = np.unique(moments["id"] >> level, return_index=True)
    parts = [_of_pair(reader, pair, level, int(places[-1]) + 1)[places] for pair in pairs]
    heads = max(part.shape[-1] for part in parts)
    wide = [np.concatenate([part, empty_blocks(len(part), heads - part.shape[-1])], -1) for part in parts]
    return moments["step"][firsts], join_blocks(np.stack(wide, 1).reshape(-1, 4, heads), len(parts))


def _of_pair(reader: FragmentReader, pair: Pair, level: int, many: int) -> Array:
    """[many, 4, heads]: the blocks of a level from the first on."""
    rows = reader.pyramid_rows(pair, level)
    known = np.zeros(many, bool)
    found = empty_blocks(many, max((row.shape[-1] for row in rows.values()), default=0))
    for first, row in rows.items():
        place = first >> level
        found[place : place + len(row)] = row
        known[place : place + len(row)] = True
    reader.check_pyramid(pair, level, known)
    for first, end in reader.replaced:
        known[first >> level : ((end - 1) >> level) + 1] = False
    for first, last in _stretches(~known):
        blocks = _of_samples(reader, pair, level, (first, last))
        if not found.shape[-1]:
            found = empty_blocks(many, blocks.shape[-1])
        if blocks.shape[-1]:
            found[first:last] = blocks
    return found


def _of_samples(reader: FragmentReader, pair: Pair, level: int, ends: tuple[int, int]) -> Array:
    """Blocks from the first of ``ends`` on, below the last, as samples that count make them."""
    start, stop = (end << level for end in ends)
    samples, values = reader.series(pair, reader.span(start, stop - 1))
    counts = (samples >= start) & (samples < stop)
    for first, end in reader.replaced:
        counts &= (samples < first) | (samples >= end)
    found = empty_blocks(ends[1] - ends[0], values.shape[1])
    # A block at a time: a thinned run has numbers of few of its samples, and room for all of them would be too much.
    places, firsts = np.unique(samples[counts] >> level, return_index=True)
    for place, one in zip(places.tolist(), np.split(values[counts], firsts[1:]), strict=False):
        found[place - ends[0]] = blocks_of(one[None])[0]
    return found


def _stretches(wanted: Array) -> Iterator[tuple[int, int]]:
    """First and end of every stretch of True."""
    edges = np.flatnonzero(np.diff(wanted, prepend=False, append=False))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
