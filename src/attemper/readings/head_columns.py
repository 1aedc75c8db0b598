"""Heads of a run as columns: each gets its own when it is first seen, and keeps it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from attemper.readings.alarm_laws import Array
from attemper.readings.calls import apart, first_call
from attemper.readings.sample import Sample, Samples, SiteKey, SiteLabel


class Columns:
    """Where the heads of every site stand. A site that comes back with other heads is another site. So is one that
    comes back as a call of its module where it was the mean over all calls, or the other way round.
    """

    def __init__(self) -> None:
        self.sites: list[SiteLabel] = []
        self.starts = np.empty(0, np.int64)
        """[sites] the column of each site's first head."""
        self.site = np.empty(0, np.int64)
        """[H] which of ``sites`` a head is of."""
        self.in_training = np.empty(0, bool)
        """[H]"""
        self.replaced = np.empty(0, bool)
        """[H] whether the sample has other sites of the same module: of each call, where it was one of all, or back."""
        self._firsts: dict[tuple[SiteKey, range, bool], int] = {}
        """Of each of ``sites``, by its key, its heads and whether each call of its module was a site."""
        self._sample: tuple[SiteLabel, ...] = ()
        self._places: slice | np.ndarray = slice(0)

    def __len__(self) -> int:
        return len(self.site)

    def find(self, sites: tuple[SiteLabel, ...]) -> bool:
        """Turns to a sample of these sites. Whether some were never seen before, so that there are more columns."""
        if sites is self._sample or sites == self._sample:
            return False
        before = len(self)
        calls = apart(sites)
        keys = {(site.key, site.head_numbers, first_call(*site.key) in calls): site for site in sites}
        new = {key: site for key, site in keys.items() if key not in self._firsts}
        for place, (key, site) in enumerate(new.items(), len(self.sites)):
            self._firsts[key] = len(self.site)
            self.site = np.concatenate([self.site, np.full(site.heads, place)])
        self.sites += new.values()
        self.starts = np.array(list(self._firsts.values()))
        self.in_training = np.array([self.sites[place].mode == "train" for place in self.site], bool)
        here = {first_call(*site.key): key[2] for key, site in keys.items()}
        replaced = [here.get(first_call(*key), own) != own for key, _, own in self._firsts]
        self.replaced = np.array(replaced, bool)[self.site]
        firsts = [self._firsts[key] for key in keys]
        parts = [np.arange(first, first + site.heads) for first, site in zip(firsts, sites, strict=True)]
        places = np.concatenate([np.empty(0, np.int64), *parts])
        in_order = len(places) and (np.diff(places) == 1).all()
        self._places = slice(int(places[0]), int(places[-1]) + 1) if in_order else places
        self._sample = sites
        return len(self) > before

    def spread(self, sample: Sample, quantity: str) -> Array:
        """[H] of one quantity; NaN for heads that the sample does not have."""
        found = np.full(len(self), np.nan)
        found[self._places] = sample.of(quantity)
        return found

    def spread_all(self, blocks: Sequence[Samples], quantities: Iterable[str]) -> tuple[dict[str, Array], np.ndarray]:
        """Name -> [samples, H] as ``spread``, and [samples, H] ``replaced``, of samples whose sites were all found."""
        ends = np.cumsum([len(block.steps) for block in blocks])
        found = {name: np.full((int(ends[-1]), len(self)), np.nan) for name in quantities}
        replaced = np.zeros((int(ends[-1]), len(self)), bool)
        alike: dict[tuple[int, tuple[str, ...]], list[int]] = {}
        for place, block in enumerate(blocks):
            alike.setdefault((id(block.sites), block.quantities), []).append(place)
        for (_, names), places in alike.items():
            self.find(blocks[places[0]].sites)
            rows = np.concatenate([np.arange(ends[one] - len(blocks[one].steps), ends[one]) for one in places])
            replaced[rows] = self.replaced
            values = np.concatenate([blocks[one].values for one in places], 1)
            where = slice(None), self._places
            if len(alike) > 1:
                where = rows[:, None], np.arange(len(self))[self._places]
            for name in found.keys() & set(names):
                found[name][where] = values[names.index(name)]
        self.find(blocks[-1].sites)
        return found, replaced

    def heads(self, column: int) -> slice:
        site = self.site[column]
        return slice(int(self.starts[site]), int(self.starts[site]) + self.sites[site].heads)

    def head(self, column: int) -> int:
        return self.sites[self.site[column]].head_numbers[column - self.heads(column).start]
