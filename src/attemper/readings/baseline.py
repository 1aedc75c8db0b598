"""What the first sample of a watch says about later ones: heads that have fallen, and a model that is untrained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from attemper.readings.alarms import ALARMS, KINDS, AlarmKind, alarms
from attemper.readings.reading import Alarm, HeadReading, SiteReading

Key = tuple[str, str, str, str, int]
"""(kind of alarm, name, kind and mode of the site, head)."""

DIFFUSE = KINDS["diffuse"]
"""What most heads of an untrained model are."""
RELATIVE = tuple(kind for kind in ALARMS if kind.relative)


class Baseline:
    """The alarms of one watch.

    A relative kind (*fallen*) rings where the value of a head is below its limit times that of the same head in the
    first sample.

    *diffuse* is held back while the model looks untrained: as long as, in every sample since the first, more than half
    of the judged heads in training mode were near uniform. Then that is the state of the model and not of a head.
    """

    def __init__(self, limits: Mapping[str, float], fewest_keys: int) -> None:
        self._limits, self._fewest_keys = limits, fewest_keys
        self._first: dict[Key, float] = {}
        self.untrained = True
        """Whether the model looks untrained, in the sample that was judged last."""
        self.near_uniform = self.judged = 0
        """How many heads in training mode were near uniform then, and how many were judged."""

    def begin(self, sites: Iterable[SiteReading]) -> None:
        """Keeps the values of the first sample. Heads that have one already keep the earlier one."""
        self._first = {key: value for _, key, _, value in self._values(sites, RELATIVE)} | self._first

    def alarms(self, sites: tuple[SiteReading, ...]) -> tuple[Alarm, ...]:
        """The alarms of a sample. Sites that were in no sample before begin with this one."""
        self.begin(sites)
        self._judge(sites)
        held_back = DIFFUSE.name if self.untrained else None
        raised = [alarm for alarm in alarms(sites, self._limits, self._fewest_keys) if alarm.kind != held_back]
        for site, key, head, value in self._values(sites, RELATIVE):
            kind, before = KINDS[key[0]], self._first[key]
            limit = self._limits[kind.name] * before
            if kind.rings(value, limit):
                raised.append(kind.alarm(site, head, value, limit, before))
        return tuple(raised)

    @property
    def untold(self) -> int | None:
        """Near uniform heads that raise no alarm because the model looks untrained; None where there are none."""
        return self.near_uniform or None if self.untrained else None

    def _judge(self, sites: Iterable[SiteReading]) -> None:
        in_training = (site for site in sites if site.mode == "train")
        values = [value for *_, value in self._values(in_training, (DIFFUSE,))]
        self.judged = len(values)
        self.near_uniform = sum(DIFFUSE.rings(value, self._limits[DIFFUSE.name]) for value in values)
        self.untrained = self.untrained and 2 * self.near_uniform > self.judged

    def _values(
        self, sites: Iterable[SiteReading], kinds: tuple[AlarmKind, ...]
    ) -> Iterator[tuple[SiteReading, Key, HeadReading, float]]:
        """What alarms of these kinds judge, head by head."""
        for site in sites:
            for head in site.heads:
                for kind in kinds:
                    value = kind.value(head, self._fewest_keys)
                    if value is not None:
                        yield site, (kind.name, site.name, site.kind, site.mode, head.head), head, value
