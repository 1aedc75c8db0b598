"""A reading as named scalars for a tracker, within a budget of names: the model first, then sites, then heads.

attention/normalized_entropy/min                      over all heads of the model; also /mean and /max
attention/alarms/collapsed                            number of heads
attention/layers.0.attention/normalized_entropy/mean  over the heads of a site; also /min and /max
attention/layers.0.attention/head3/normalized_entropy
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from attemper.checks import one_of, whole_number
from attemper.errors import InputError
from attemper.readings.alarms import ALARMS
from attemper.readings.reading import SiteReading
from attemper.results.scan import Scan
from attemper.statistics import NAMES, SHOWN, STATISTIC_OF

logger = logging.getLogger("attemper")

STATISTICS = tuple(name for name in SHOWN if STATISTIC_OF[name] in NAMES)
"""Numbers of a head that can be logged: fields of ``HeadReading``."""
LEVELS = ("model", "site", "head")
_KINDS = tuple(kind.name for kind in ALARMS if not kind.needs_ranks and not kind.of_loss)
"""Alarms that are logged also where there are none."""

Keep = Callable[[str], bool]


def scalars(scan: Scan, stats: Iterable[str]) -> dict[str, dict[str, float]]:
    """Level -> name -> value, for every level of ``LEVELS``. A statistic that a head lacks is left out.

    Args:
        scan: of ``watch.table()`` or ``attemper.scan``.
        stats: of ``STATISTICS``.
    """
    levels: dict[str, dict[str, float]] = {level: {} for level in LEVELS}
    names = _unique_names(scan.sites)
    for statistic in stats:
        everything: list[float] = []
        for name, site in zip(names, scan.sites, strict=True):
            found = {head.head: value for head in site.heads if (value := getattr(head, statistic)) is not None}
            levels["head"] |= {f"attention/{name}/head{head}/{statistic}": value for head, value in found.items()}
            levels["site"] |= _spread(f"attention/{name}/{statistic}", list(found.values()))
            everything += found.values()
        levels["model"] |= _spread(f"attention/{statistic}", everything)
    counts = Counter(alarm.kind for alarm in scan.alarms)
    levels["model"] |= {f"attention/alarms/{kind}": float(counts[kind]) for kind in (*_KINDS, *counts)}
    return levels


def _spread(prefix: str, values: list[float]) -> dict[str, float]:
    """Mean, smallest and largest; nothing where there is no value."""
    if not values:
        return {}
    return {f"{prefix}/mean": sum(values) / len(values), f"{prefix}/min": min(values), f"{prefix}/max": max(values)}


def _unique_names(sites: Iterable[SiteReading]) -> list[str]:
    """Names of sites in characters that every tracker takes; kind and mode are added where a name comes twice."""
    times = Counter(site.name for site in sites)
    full = [site.name if times[site.name] == 1 else f"{site.name}.{site.kind}.{site.mode}" for site in sites]
    return [name.replace("#", ".call") for name in full]


@dataclass
class Budget:
    """Which scalars are sent: those that ``keep`` lets through, by whole levels, at most ``max_keys``.

    Some heads without the others would mislead, so a level is sent with all its names or not at all, and none after
    the first that does not fit. What was left out is said once, as a warning of the logger ``attemper``. Without a
    number of ``max_keys`` nothing is left out; heads are sent only if ``heads``.
    """

    max_keys: int | None
    keep: Keep
    heads: bool = True
    """Whether somebody asked for heads: by a number of names, or by a filter."""
    _warned: set[str] = field(default_factory=set)

    def choose(self, levels: dict[str, dict[str, float]]) -> dict[str, float]:
        """Name -> value of what is sent."""
        sent: dict[str, float] = {}
        wanted = {level: {name: v for name, v in values.items() if self.keep(name)} for level, values in levels.items()}
        if not self.heads:
            del wanted["head"]
        for place, (level, values) in enumerate(wanted.items()):
            if self.max_keys is not None and len(sent) + len(values) > self.max_keys:
                self._warn(level, sum(len(wanted[later]) for later in list(wanted)[place:]))
                break
            sent |= values
        return sent

    def _warn(self, level: str, count: int) -> None:
        if level in self._warned:
            return
        self._warned.add(level)
        left_out = " and ".join(LEVELS[LEVELS.index(level) :])
        logger.warning(
            f"{count} scalars by {left_out} are not sent to trackers: the total would exceed "
            f"max_keys={self.max_keys}. Raise max_keys=, or choose some by filter=."
        )


def budget(max_keys: int | None, filter: Keep | str | Iterable[str] | None) -> Budget:
    """A ``Budget``.

    Args:
        max_keys: at least 1; None for all names of the model and of sites, however many, and for those of heads if
            ``filter`` lets them through.
        filter: None for all; a function of a name that says whether to keep it; or glob patterns, one of which has to
            match the whole name: ``["attention/*/normalized_entropy/min"]``.

    Raises:
        InputError: another kind of argument.
    """
    if max_keys is not None:
        max_keys = whole_number("max_keys", max_keys, none=", or None")
    if filter is None:
        return Budget(max_keys, lambda _: True, heads=max_keys is not None)
    if callable(filter):
        return Budget(max_keys, filter)
    patterns = [filter] if isinstance(filter, str) else list(filter) if isinstance(filter, Iterable) else [filter]
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise InputError(
            f"filter must be a function (name) -> bool or glob patterns such as ['attention/*/max'], got {filter!r}."
        )
    return Budget(max_keys, lambda name: any(fnmatchcase(name, pattern) for pattern in patterns))


def check_statistics(stats: str | Iterable[str]) -> tuple[str, ...]:
    names = (stats,) if isinstance(stats, str) else tuple(stats) if isinstance(stats, Iterable) else ()
    if not names:
        raise InputError(f"stats must be some of {', '.join(STATISTICS)}; got {stats!r}.")
    return tuple(dict.fromkeys(one_of("stats", name, STATISTICS) for name in names))
