"""A whole run in few columns: least, mean and largest of a statistic, read from the pyramid as far as it reaches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from attemper.readings.sample import SiteKey
from attemper.store import pyramid
from attemper.store.compaction import Pair
from attemper.store.ranks import Ranks
from attemper.store.series import FragmentReader

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Columns:
    """A statistic of a site over a run: each column stands for neighbouring samples."""

    steps: Array
    """[columns] the first step of each."""
    least: Array
    """[columns, heads] float32, NaN where nothing is known. Numbers of the pyramid have 10 bits of mantissa."""
    mean: Array
    largest: Array


def columns(ranks: Ranks, statistic: str, key: SiteKey, most: int) -> Columns:
    """At most ``most`` columns. Of one fragment the pyramid is read, and samples only where it does not reach."""
    having = [reader for reader in ranks.readers if key in reader.sites]
    if len(having) == 1 and len(having[0].moments):
        steps, blocks = _of_fragment(having[0], statistic, key, most)
    else:
        steps = ranks.steps()
        (values,) = ranks.values(statistic, [key], steps)
        blocks = pyramid.blocks(values[:, None])
    many = max(1, -(-len(steps) // most))
    more = pyramid.empty_blocks(-len(blocks) % many, blocks.shape[-1])
    blocks = pyramid.join(np.concatenate([blocks, more]), many)
    parts = (blocks[:, part] for part in (pyramid.LEAST, pyramid.MEAN, pyramid.LARGEST))
    return Columns(steps[::many], *parts)


def _of_fragment(reader: FragmentReader, statistic: str, key: SiteKey, most: int) -> tuple[Array, Array]:
    """[blocks] steps and [blocks, 4, heads], of blocks that hold a sample that counts."""
    moments, pairs = reader.moments, reader.pairs(statistic, key)
    level = pyramid.level_for(int(moments["id"][-1]) + 1, most)
    if not level:
        steps = np.unique(moments["step"])
        (values,) = reader.values(statistic, [key], steps)
        return steps, pyramid.blocks(values[:, None])
    places, firsts = np.unique(moments["id"] >> level, return_index=True)
    parts = [_of_pair(reader, pair, level, int(places[-1]) + 1)[places] for pair in pairs]
    heads = max(part.shape[-1] for part in parts)
    wide = [np.concatenate([part, pyramid.empty_blocks(len(part), heads - part.shape[-1])], -1) for part in parts]
    return moments["step"][firsts], pyramid.join(np.stack(wide, 1).reshape(-1, 4, heads), len(parts))


def _of_pair(reader: FragmentReader, pair: Pair, level: int, many: int) -> Array:
    """[many, 4, heads]: the blocks of a level from the first on."""
    rows = reader.pyramid_rows(pair, level)
    known = np.zeros(many, bool)
    found = pyramid.empty_blocks(many, max((row.shape[-1] for row in rows.values()), default=0))
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
            found = pyramid.empty_blocks(many, blocks.shape[-1])
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
    found = pyramid.empty_blocks(ends[1] - ends[0], values.shape[1])
    # A block at a time: a thinned run has numbers of few of its samples, and room for all of them would be too much.
    places, firsts = np.unique(samples[counts] >> level, return_index=True)
    for place, one in zip(places.tolist(), np.split(values[counts], firsts[1:]), strict=False):
        found[place - ends[0]] = pyramid.blocks(one[None])[0]
    return found


def _stretches(wanted: Array) -> Iterator[tuple[int, int]]:
    """First and end of every stretch of True."""
    edges = np.flatnonzero(np.diff(wanted, prepend=False, append=False))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
