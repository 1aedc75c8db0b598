"""What a watch's first sample says about later ones: heads that have fallen since, and a model that is untrained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attemper.monitor.alarms import alarms, fallen, over_enough_keys
from attemper.records import Alarm, HeadReading, SiteReading

Head = tuple[str, str, str, int]
"""(name, kind, mode) of a site, and the head."""


class Baseline:
    """Alarms of one watch.

    *fallen*: the normalised entropy of a head, over rows that see enough keys, is below ``limits["fallen"]`` times
    that of the same head in the first sample.

    *diffuse* is not told while the model looks untrained: as long as, in every sample since the first, more than half
    of the judged heads in training mode were near uniform. Then that is the state of the model and not of a head.
    """

    def __init__(self, limits: Mapping[str, float], fewest_keys: int) -> None:
        self._limits, self._fewest_keys = limits, fewest_keys
        self._first: dict[Head, float] = {}
        self.untrained = True
        """Whether the model looks untrained, in the sample that was judged last."""
        self.near_uniform = self.judged = 0
        """How many heads in training mode were near uniform then, and how many were judged."""

    def begin(self, sites: Iterable[SiteReading]) -> None:
        """Takes the readings of the first sample; of a site that it has already, the earlier ones stay."""
        self._first = {head: value for site, head, _, value in self._judged(sites)} | self._first

    def alarms(self, sites: tuple[SiteReading, ...]) -> tuple[Alarm, ...]:
        """Alarms of a sample. Sites that were in no sample before begin with this one."""
        self.begin(sites)
        self._look(sites)
        found = [alarm for alarm in alarms(sites, self._limits, self._fewest_keys) if self._is_told(alarm)]
        for site, key, head, now in self._judged(sites):
            before, limit = self._first[key], self._limits["fallen"]
            if now < limit * before:
                found.append(fallen(site, head, now, before, limit))
        return tuple(found)

    @property
    def untold(self) -> int | None:
        """Near uniform heads that are not told one by one; None where there are none."""
        return self.near_uniform or None if self.untrained else None

    def _look(self, sites: Iterable[SiteReading]) -> None:
        entropies = [now for site, *_, now in self._judged(sites) if site.mode == "train"]
        self.judged = len(entropies)
        self.near_uniform = sum(now > self._limits["diffuse"] for now in entropies)
        self.untrained = self.untrained and 2 * self.near_uniform > self.judged

    def _is_told(self, alarm: Alarm) -> bool:
        return alarm.kind != "diffuse" or not self.untrained

    def _judged(self, sites: Iterable[SiteReading]) -> Iterable[tuple[SiteReading, Head, HeadReading, float]]:
        for site in sites:
            for head in site.heads:
                entropy = over_enough_keys(head, "normalized_entropy", self._fewest_keys)
                if entropy is not None:
                    yield site, (site.name, site.kind, site.mode, head.head), head, entropy
