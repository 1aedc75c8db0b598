"""The samples of a fragment as they were taken, from hot rows and cold chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from attemper.readings.sample import Sample, SiteLabel
from attemper.store.checksum import get, whole
from attemper.store.chunk import unpack
from attemper.store.compaction import Layout, layouts
from attemper.store.schema import Tables

"""Of the table ``site``, in the order of ``SiteLabel``."""


@dataclass(frozen=True)
class _Names:
    """What the numbers in a fragment's layouts stand for."""

    layouts: dict[int, Layout]
    statistics: dict[int, str]
    sites: dict[int, SiteLabel]


def replay(tables: Tables, first: int, last: int) -> Iterator[Sample]:
    """The samples with ids from ``first`` to ``last`` that are left, with the bits that are stored."""
    with tables.snapshot():
        names = _Names(
            layouts(tables.rows),
            {number: name for number, name, *_ in whole(tables.rows, "statistic")},
            {site: SiteLabel(*label) for site, *label in whole(tables.rows, "site")},
        )
        rows = get(tables.rows, "sample", "WHERE id >= ? AND id <= ? ORDER BY id", (first, last))
        numbers = _hot(tables, first, last)
        taken = {sample: layout for sample, *_, layout in rows}
        spans = tables.rows("SELECT first, span FROM chunk WHERE first <= ? AND first + span > ?", (last, first))
        for start, span in spans:
            held = tables.rows(
                "SELECT id, layout FROM sample WHERE id >= ? AND id < ? ORDER BY id", (start, start + span)
            )
            numbers |= _cold(tables, names.layouts, start, dict(held), taken)
    for sample, _, step, moment, tokens, layout in rows:
        yield _sample(names, layout, numbers[sample], step=step, time=moment, tokens=tokens)


def _hot(tables: Tables, first: int, last: int) -> dict[int, np.ndarray]:
    rows = get(tables.rows, "hot", "WHERE sample >= ? AND sample <= ?", (first, last))
    return {sample: np.frombuffer(numbers, "<f4") for sample, numbers in rows}


def _cold(
    tables: Tables, known: dict[int, Layout], first: int, held: dict[int, int], wanted: dict[int, int]
) -> dict[int, np.ndarray]:
    """Sample -> [statistics, heads] of the ``wanted`` ones among those that a chunk holds (sample -> layout)."""
    found = {
        sample: np.full((len(known[layout].statistics), known[layout].heads), np.nan, np.float32)
        for sample, layout in wanted.items()
        if sample in held
    }
    for pair in {pair for layout in set(held.values()) for pair in known[layout].pairs}:
        ((*_, data),) = get(tables.rows, "cold", "WHERE statistic = ? AND site = ? AND first = ?", (*pair, first))
        holding = [sample for sample, layout in held.items() if pair in known[layout].pairs]
        for sample, heads in zip(holding, unpack(data), strict=True):
            if sample in found:
                row, place = known[held[sample]].pairs[pair]
                found[sample][row, place] = heads
    return found


def _sample(names: _Names, number: int, values: np.ndarray, *, step: int, time: float, tokens: int) -> Sample:
    layout = names.layouts[number]
    quantities = tuple(names.statistics[statistic] for statistic in layout.statistics)
    sites = tuple(names.sites[site] for site in layout.sites)
    return Sample(step, time, sites, quantities, values.reshape(len(quantities), layout.heads), tokens)
