"""What is asked of a scan or a watch: which numbers, of which rows, sites and steps, by which backend."""

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
    observe: str = "auto"
    backend: str = "auto"
    limits: AlarmLimits | Mapping[str, Any] | None = None
    fewest_keys: int = FEWEST_KEYS
    on_alarm: Callable[[Alarm], object] | None = None
    reduce: Any = None
    shadow_batch: int | None = None
    alarm_limits: AlarmLimits = field(init=False)
    """``limits``, checked."""

    def __post_init__(self) -> None:
        for name, number in (("every", self.every), ("rows", self.rows), ("shadow_batch", self.shadow_batch)):
            if name == "every" or number is not None:
                object.__setattr__(self, name, whole_number(f"watch({name}=...)", number))
        if self.store is not None and not isinstance(self.store, Store):
            object.__setattr__(self, "store", Store(self.store))
        if self.on_alarm is not None and not callable(self.on_alarm):
            raise InputError(f"watch(on_alarm=...) must be a function of an Alarm, got {self.on_alarm!r}.")
        object.__setattr__(self, "alarm_limits", AlarmLimits.of(self.limits))
        one_of("watch(observe=...)", self.observe, ("auto", "beside", "shadow", "replace"))
        object.__setattr__(self, "fewest_keys", check_fewest_keys("watch", self.fewest_keys))

    @property
    def scope(self) -> Scope:
        """What is measured on a sampled step."""
        names, sites = reading_names("watch", self.stats), check_sites("watch", self.sites)
        return Scope(names, self.backend, self.observe == "replace", self.rows, sites, self.fewest_keys)


class Schedule:
    """Counts steps (or passes, where these are the steps): one in ``every`` is sampled, the first one included.

    A run that goes on samples the steps that it would have sampled had it never ended. Which these are is known with
    the first number that the loop gives, so its first step is sampled and kept only if it is one of them.
    """

    def __init__(self, every: int, first: int | None, last: int | None, start: int | None = None) -> None:
        """
        Args:
            first, last: steps of the run that goes on; None for a new one.
            start: the number of the step that is running, where the loop knows it before the step ends.
        """
        self._every, self._resumed = every, first
        self.last, self.numbered = last, start is not None
        """``numbered``: whether the loop has given a number."""
        self._again = False
        self._known, self._start = start is not None, (0 if last is None else last + 1) if start is None else start
        self.restart()

    @property
    def sampling(self) -> bool:
        """Whether the step that is running is sampled."""
        return self._again or self.place % self._every == 0

    @property
    def place(self) -> int:
        """Of the step that is running among those of the run, from 0."""
        return self._count + self._shift

    @property
    def plan(self) -> str:
        """What decides which steps are sampled."""
        begun = "a new run" if self._resumed is None else f"a run from step {self._resumed}"
        return f"every={self._every}, step {self.place} of {begun}"

    def again(self) -> None:
        """The step that is running is sampled, too: the one before it could not be seen."""
        self._again = True

    def restart(self) -> None:
        """Counts from the beginning: what was counted were passes of the first step."""
        self._first = self._resumed
        """The number from which others are counted; None until it is known."""
        self._count = 0
        """Steps that have ended."""
        self._shift = self._start - self._first if self._known and self._first is not None else 0
        """How many the run had before this watch."""
        self.number = self._start
        """Of the step that is running."""
        self.sampled = self.kept = True
        """Whether the step that ended last was to be sampled, and whether its number is one of those that are kept."""

    def end(self, number: int | None) -> int:
        """Ends the step that is running; returns its number, by default one more than the last."""
        self.numbered = self.numbered or number is not None
        self.sampled, ended = self.sampling, self.number if number is None else number
        self._first = ended if self._first is None else self._first
        if self._count == 0 or ended < self.number:
            self._shift = ended - self._first - self._count
        self.kept = self.sampling
        self._count, self.number, self._again = self._count + 1, ended + 1, False
        return ended
