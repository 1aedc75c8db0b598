"""Histories in the files of a run: samples of one statistic at one site, joined from hot rows and cold chunks."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from attemper.store.chunk import Values, unpacked
from attemper.store.fragment import SiteLabel


@dataclass(frozen=True)
class Moment:
    """One sample of a file: its number there, segment, step, time and layout."""

    sample: int
    segment: int
    step: int
    time: float
    layout: int


class FragmentReader:
    """What one process wrote, as far as it stands at the moment of each question."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @cached_property
    def statistics(self) -> dict[str, int]:
        """Name -> number in the file."""
        return dict(self._connection.execute("SELECT name, id FROM statistic ORDER BY id"))

    @property
    def sites(self) -> dict[SiteLabel, int]:
        """Label -> number in the file, in the order in which they appeared."""
        rows = self._connection.execute(
            "SELECT name, mode, layer, kind, attention, normalizer, heads, id FROM site ORDER BY id"
        )
        return {SiteLabel(*row[:-1]): row[-1] for row in rows}

    @property
    def moments(self) -> list[Moment]:
        """All samples that count, by step: a later segment replaces what it overlaps."""
        rows = self._connection.execute("SELECT id, segment, step, time, layout FROM sample ORDER BY id DESC")
        kept: list[Moment] = []
        least: dict[int, int] = {}
        bound = None
        for moment in (Moment(*row) for row in rows):
            least.setdefault(moment.segment, moment.step)
            if kept and moment.segment != kept[-1].segment:
                bound = kept[-1].step if bound is None else min(bound, kept[-1].step)
            if bound is None or moment.step < bound:
                kept.append(moment)
        return kept[::-1]

    def values(self, statistic: str, site: SiteLabel) -> dict[int, Values]:
        """Sample -> [heads] of every sample that holds the site; those that were thinned away are missing."""
        number, place = self.statistics[statistic], self.sites[site]
        found: dict[int, Values] = {}
        chunks = self._connection.execute(
            "SELECT first, every, numbers FROM cold WHERE statistic = ? AND site = ? ORDER BY first", (number, place)
        )
        for first, every, data in chunks:
            block = unpacked(data)
            found.update(zip(range(first, first + every * len(block), every), block, strict=True))
        return found | self._hot(number, place)

    def _hot(self, statistic: int, site: int) -> dict[int, Values]:
        rows = self._connection.execute(
            "SELECT hot.sample, layout, numbers FROM hot JOIN sample ON sample.id = hot.sample ORDER BY hot.sample"
        )
        found = {}
        for sample, layout, data in rows:
            place = self._place(layout, statistic, site)
            if place is not None:
                row, heads, statistics = place
                found[sample] = np.frombuffer(data, "<f4").reshape(statistics, -1)[row, heads]
        return found

    @cache
    def _place(self, layout: int, statistic: int, site: int) -> tuple[int, slice, int] | None:
        """Where a statistic of a site stands in the hot rows of a layout: row, heads, and how many rows there are."""
        (text,) = self._connection.execute("SELECT content FROM layout WHERE id = ?", (layout,)).fetchone()
        content, start = json.loads(text), 0
        for other, heads in content["sites"]:
            if other == site and statistic in content["statistics"]:
                numbers = content["statistics"]
                return numbers.index(statistic), slice(start, start + heads), len(numbers)
            start += heads
        return None
