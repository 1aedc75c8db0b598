"""What is asked of a scan or a watch: which numbers, of which rows and sites, by which backend."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from attemper.call.spans import Spans
from attemper.checks import one_of, whole_number
from attemper.errors import InputError
from attemper.readings.alarms import DEFAULT_LIMITS
from attemper.readings.limits import AlarmLimits, check_fewest_keys
from attemper.readings.reading import FEWEST_KEYS, Alarm
from attemper.sites.names import check_sites
from attemper.statistics import reading_names
from attemper.store.store import Store

NO_ALARMS = dict.fromkeys(DEFAULT_LIMITS)
"""Limits of a watch that another part of attemper keeps: its user's own watch rings."""


@dataclass(frozen=True)
class Scope:
    """What a collector measures."""

    stats: tuple[str, ...]
    """Names of statistics."""
    backend: str = "auto"
    replace: bool = True
    """Whether models of transformers' registry attend here, output and statistics in one pass."""
    rows: int | None = None
    """How many query rows of each sequence; None for all."""
    sites: tuple[str, ...] | None = None
    """Names of sites, or their beginnings; None for all."""
    fewest_keys: int = FEWEST_KEYS
    """How many keys a row must see before its sharpness is judged."""
    spans: Spans | Callable[[Any], Spans] | None = None
    """The keys whose weight ``span_mass`` sums, or what tells them of a batch."""
    missed_mass: bool = False
    """Whether layers that choose their keys are measured over the others, too."""


@dataclass(frozen=True)
class WatchOptions:
    """The options of :func:`watch`, checked as far as they can be without a model."""

    every: int = 1
    rows: int | None = None
    stats: str | Iterable[str] = "all"
    sites: Iterable[str] | None = None
    store: Store | str | os.PathLike[str] | None = None
    observe: str = "beside"
    backend: str = "auto"
    limits: AlarmLimits | Mapping[str, Any] | None = None
    fewest_keys: int = FEWEST_KEYS
    on_alarm: Callable[[Alarm], object] | None = None
    reduce: Any = None
    alarm_limits: AlarmLimits = field(init=False)
    """``limits``, checked."""

    def __post_init__(self) -> None:
        for name, number in (("every", self.every), ("rows", self.rows)):
            if name == "every" or number is not None:
                object.__setattr__(self, name, whole_number(f"watch({name}=...)", number))
        if self.store is not None and not isinstance(self.store, Store):
            object.__setattr__(self, "store", Store(self.store))
        if self.on_alarm is not None and not callable(self.on_alarm):
            raise InputError(f"watch(on_alarm=...) must be a function of an Alarm, got {self.on_alarm!r}.")
        object.__setattr__(self, "alarm_limits", AlarmLimits.of(self.limits))
        one_of("watch(observe=...)", self.observe, ("beside", "replace"))
        object.__setattr__(self, "fewest_keys", check_fewest_keys("watch", self.fewest_keys))

    @property
    def scope(self) -> Scope:
        """What is measured on a sampled step.

        Raises:
            InputError: ``stats`` or ``sites`` name what cannot be measured.
        """
        names, sites = reading_names("watch", self.stats), check_sites("watch", self.sites)
        return Scope(names, self.backend, self.observe == "replace", self.rows, sites, self.fewest_keys)
