"""Alarms on history: each sample of a run judged in turn, by the laws and by what is remembered of those before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from attemper.readings.alarms import ALARMS, KINDS, SEVERITIES, AlarmKind
from attemper.readings.columns import Columns
from attemper.readings.laws import LAWS, MARKS, SPAN, Array
from attemper.readings.limits import AlarmLimits
from attemper.readings.memory import Memory, padded
from attemper.readings.reading import FEWEST_KEYS, Alarm
from attemper.readings.sample import Sample

UNIFORM = KINDS["diffuse"]
"""What most heads of an untrained model are."""
WHOLE_FIRST = sorted(ALARMS, key=lambda kind: not kind.whole)
"""In the order of judging: heads whose whole site rings are not told one by one."""
COUNTS = ("rows", "judged_rows", "empty_rows", "nonfinite_rows")


class Told(NamedTuple):
    """What is known of alarms of one kind at a sample, each [H]."""

    measure: Array
    """What is held against the limit."""
    now: Array
    """The statistic."""
    before: Array
    """What it is compared with, if anything."""
    total: Array
    step: Array


class Ringing(NamedTuple):
    """The alarms of one kind, a column a head; of whole sites, the column of the first head."""

    on: np.ndarray
    since: Array
    """Step at which each began."""
    latest: Told
    worst: Told
    origins: Mapping[int, tuple[float, int] | None]
    """Column -> an earlier value and its step, of those that are on."""


class State(NamedTuple):
    """What follows from all samples up to one."""

    ringing: Mapping[str, Ringing]
    healthy: np.ndarray
    """[H] no warning stands."""
    untrained: bool = True
    near_uniform: int = 0
    ended: tuple[Alarm, ...] = ()
    """Alarms that ended with that sample."""
    changed: tuple[Alarm, ...] = ()
    """Those that began or ended with it, but for heads whose alarms went into that of their site."""


class Judge:
    """Judges the samples of a run in their order, in a memory that does not grow with their number.

    Judging a finished run again gives the same alarms as judging it while it ran.
    """

    def __init__(self, limits: AlarmLimits | Mapping[str, Any] | None = None, fewest_keys: int = FEWEST_KEYS) -> None:
        self.limits, self.fewest_keys = AlarmLimits.of(limits), fewest_keys
        self._columns = Columns()
        self._bounds: dict[str, Array] = {}
        quantities = dict.fromkeys(kind.quantity for kind in ALARMS)
        self._memories = {
            name: Memory(tuple(LAWS[kind.law] for kind in ALARMS if kind.quantity == name)) for name in quantities
        }
        self._missing: tuple[str, ...] = ()
        self._before = self._now = State({kind.name: _silent(0) for kind in ALARMS}, np.empty(0, bool))
        self._ended: list[Alarm] = []
        self._reported: set[tuple[Any, ...]] = set()

    def feed(self, sample: Sample, *, again: bool = False) -> tuple[Alarm, ...]:
        """Judges one more sample.

        Args:
            sample: later than those before it, unless the run went back.
            again: whether it takes the place of the sample before, of which it is a fuller version.

        Returns:
            The alarms that begin with it, and those that end (``ended``). Of a sample that is fed again, only those
            that were not returned for it before.
        """
        if not again:
            self._keep()
        if self._columns.find(sample.sites):
            self._grow()
        found = {name: self._columns.spread(sample, name) for name in (*self._memories, *COUNTS)}
        self._missing = tuple(name for name in self._memories if name not in sample.quantities)
        for name, memory in self._memories.items():
            memory.write(sample.step, found[name])
        self._now = self._judged(sample.step, found)
        new = [alarm for alarm in self._now.changed if _identity(alarm) not in self._reported]
        self._reported |= {_identity(alarm) for alarm in new}
        return tuple(new)

    @property
    def standing(self) -> tuple[Alarm, ...]:
        """The alarms that are on, the worst first, as their heads were last seen."""
        found = [
            self._alarm(kind, ringing, ringing.latest, column)
            for kind in ALARMS
            for ringing in (self._now.ringing[kind.name],)
            for column in np.flatnonzero(ringing.on)
        ]
        return tuple(sorted(found, key=lambda alarm: -SEVERITIES.index(alarm.severity)))

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """Every alarm so far, in the order in which they began; one that has ended, as it was at its worst."""
        found = (*self._ended, *self._now.ended, *self.standing)
        return tuple(sorted(found, key=lambda alarm: alarm.since or 0))

    @property
    def untrained(self) -> bool:
        """Whether the model looks untrained: in each sample so far, more than half of the judged heads in training
        mode were near uniform. Then that is the state of the model and not of a head.
        """
        return self._now.untrained

    @property
    def untold(self) -> int | None:
        """Near uniform heads that raise no alarm because the model looks untrained; None where there are none."""
        return self._now.near_uniform or None if self.untrained else None

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be judged, and why."""
        return tuple(self._notes())

    def _notes(self) -> Iterator[str]:
        for quantity in self._missing:
            kinds = ", ".join(kind.name for kind in ALARMS if kind.quantity == quantity)
            yield f"not judged: {kinds}; there is no {quantity}."
        for kind in ALARMS:
            if "centre" in LAWS[kind.law].looks_at and kind.quantity not in self._missing:
                unsettled = int(np.isnan(self._memories[kind.quantity].window.centre).sum())
                if unsettled:
                    yield f"not judged yet: {kind.name} of {unsettled} of {len(self._columns)} heads, not settled."

    def _keep(self) -> None:
        """What was judged last stands from now on."""
        self._ended += self._now.ended
        self._before = self._now
        self._reported = set()
        for memory in self._memories.values():
            memory.commit(self._before.healthy & (not self._before.untrained))

    def _grow(self) -> None:
        """Makes room for heads that were never seen before."""
        at = [self.limits.at(site.name) for site in self._columns.sites]
        for kind in ALARMS:
            limits = [0.0 if kind.limit is None else one[kind.name] for one in at]
            bounds = np.array([np.nan if limit is None else limit for limit in limits])
            self._bounds[kind.name] = bounds[self._columns.site]
        speeds = [self._bounds[kind.name] for kind in ALARMS if kind.law == "doubling_time"]
        span = np.fmax.reduce([np.full(len(self._columns), float(SPAN)), *speeds])
        for memory in self._memories.values():
            memory.grow(span / MARKS)
        self._before, self._now = (_grown(state, len(self._columns)) for state in (self._before, self._now))

    def _judged(self, step: int, found: Mapping[str, Array]) -> State:
        near, judged = self._uniform(found[UNIFORM.quantity])
        untrained = self._before.untrained and 2 * near > judged
        ringing: dict[str, Ringing] = {}
        ended: list[Alarm] = []
        changed: list[Alarm] = []
        healthy = np.ones(len(self._columns), bool)
        for kind in WHOLE_FIRST:
            old = self._before.ringing[kind.name]
            told = self._measured(kind, found)._replace(step=np.full(len(healthy), float(step)))
            rings, released = self._beyond(kind, told.measure)
            if kind.trained and untrained:
                rings = np.zeros_like(rings)
            whole = self._whole(ringing[kind.part_of].on) if kind.part_of else np.zeros_like(rings)
            on = (old.on & ~(released | whole)) | (rings & ~whole)
            new = ringing[kind.name] = self._rung(kind, old, on, told, step)
            ends = [self._alarm(kind, old, old.worst, column, step) for column in np.flatnonzero(old.on & ~on)]
            ended += ends
            changed += [
                alarm for alarm, column in zip(ends, np.flatnonzero(old.on & ~on), strict=True) if not whole[column]
            ]
            changed += [self._alarm(kind, new, new.latest, column) for column in np.flatnonzero(on & ~old.on)]
            if kind.severity != SEVERITIES[0]:
                healthy &= ~(self._whole(on) if kind.whole else on)
        return State(ringing, healthy, untrained, near, tuple(ended), tuple(changed))

    def _uniform(self, entropies: Array) -> tuple[int, int]:
        """How many heads in training mode are near uniform, and how many are judged."""
        if not self._bounds:
            return 0, 0
        near = (entropies > self._bounds[UNIFORM.name]) & self._columns.in_training
        return int(near.sum()), int((~np.isnan(entropies) & self._columns.in_training).sum())

    def _measured(self, kind: AlarmKind, found: Mapping[str, Array]) -> Told:
        law, window = LAWS[kind.law], self._memories[kind.quantity].window
        measure, now = law.measure(window), window.recent[-1]
        few = found["judged_rows" if kind.judged else "rows"] < kind.least_rows
        measure = np.where(few | np.isnan(now), np.nan, measure)
        before = window.centre if "centre" in law.looks_at else window.baseline
        if kind.whole:
            return self._of_sites(measure, now, before)
        total = found["rows"] + np.nan_to_num(found["empty_rows"]) + np.nan_to_num(found["nonfinite_rows"])
        return Told(measure, now, before, total, now)

    def _of_sites(self, measure: Array, now: Array, before: Array) -> Told:
        """Of whole sites: the measure of the head that is least alarming, means, and the number of heads judged; NaN
        where fewer than two are.
        """
        starts, found = self._columns.starts, [np.full(len(measure), np.nan) for _ in range(5)]
        if len(measure):
            known = ~np.isnan(measure)
            many = np.add.reduceat(known.astype(float), starts)
            sums = (np.add.reduceat(np.where(known, values, 0.0), starts) for values in (now, before))
            rows = (np.fmax.reduceat(measure, starts), *(one / np.maximum(many, 1.0) for one in sums), many)
            for row, values in zip(found, rows, strict=False):
                row[starts] = np.where(many >= 2, values, np.nan)
        return Told(*found)

    def _beyond(self, kind: AlarmKind, measure: Array) -> tuple[np.ndarray, np.ndarray]:
        """Where the measure is beyond its limit, and where it has come back far enough to end an alarm."""
        bound = self._bounds.get(kind.name, measure)
        margin = kind.release * np.abs(bound)
        above = (LAWS[kind.law].side or kind.side) == "above"
        beyond = measure > bound if above else measure < bound
        if kind.floor is not None:
            now = self._memories[kind.quantity].window.marks[-1]
            beyond &= now > kind.floor if kind.side == "above" else now < kind.floor
        return beyond, measure <= bound - margin if above else measure >= bound + margin

    def _whole(self, on: np.ndarray) -> np.ndarray:
        """[H] of what stands at the first head of each site."""
        return on[self._columns.starts][self._columns.site] if len(on) else on

    def _rung(self, kind: AlarmKind, old: Ringing, on: np.ndarray, told: Told, step: int) -> Ringing:
        """The alarms of a kind after a sample."""
        if not (on.any() or old.on.any()):
            return old
        begins = on & ~old.on
        seen = on & ~np.isnan(told.measure)
        above = (LAWS[kind.law].side or kind.side) == "above"
        further = told.measure > old.worst.measure if above else told.measure < old.worst.measure
        latest, worst = (
            Told(*(np.where(where, new, was) for new, was in zip(told, before, strict=True)))
            for where, before in ((seen, old.latest), (begins | (seen & further), old.worst))
        )
        origins = {column: origin for column, origin in old.origins.items() if on[column]}
        origins |= {int(column): self._origin(kind, int(column)) for column in np.flatnonzero(begins)}
        return Ringing(on, np.where(begins, step, old.since), latest, worst, origins)

    def _origin(self, kind: AlarmKind, column: int) -> tuple[float, int] | None:
        """Where the statistic was before: what says how fast it changed."""
        if kind.law in ("dead", "nonfinite"):
            return None
        heads = self._columns.heads(column) if kind.whole else slice(column, column + 1)
        return self._memories[kind.quantity].origin(heads, above=kind.side == "above")

    def _alarm(self, kind: AlarmKind, ringing: Ringing, told: Told, column: int, ended: int | None = None) -> Alarm:
        measure, now, before, total, step = (float(values[column]) for values in told)
        limit = None if kind.limit is None else float(self._bounds[kind.name][column])
        relative = kind.law == "fall_from_baseline"
        return kind.alarm(
            self._columns.sites[self._columns.site[column]].name,
            None if kind.whole else int(column) - self._columns.heads(column).start,
            now if relative else measure,
            limit * before if limit is not None and relative else limit,
            now=now,
            before=before,
            total=total,
            origin=ringing.origins[int(column)],
            step=int(step),
            since=int(ringing.since[column]),
            ended=ended,
        )


def judge(
    samples: Iterable[Sample], limits: AlarmLimits | Mapping[str, Any] | None = None, fewest_keys: int = FEWEST_KEYS
) -> tuple[Alarm, ...]:
    """All alarms of a finished run, as a judge raised them who saw it: with other limits, if you like."""
    one = Judge(limits, fewest_keys)
    for sample in samples:
        one.feed(sample)
    return one.alarms


def _identity(alarm: Alarm) -> tuple[Any, ...]:
    return alarm.kind, alarm.site, alarm.head, alarm.ended is None


def _silent(heads: int) -> Ringing:
    told = Told(*(np.full(heads, np.nan) for _ in range(5)))
    return Ringing(np.zeros(heads, bool), np.full(heads, np.nan), told, told, {})


def _grown(state: State, heads: int) -> State:
    """With columns for more heads, at which nothing rings."""
    more = heads - len(state.healthy)

    def told(old: Told) -> Told:
        return Told(*(padded(values, more) for values in old))

    ringing = {
        name: Ringing(padded(one.on, more), padded(one.since, more), told(one.latest), told(one.worst), one.origins)
        for name, one in state.ringing.items()
    }
    return state._replace(ringing=ringing, healthy=np.concatenate([state.healthy, np.ones(more, bool)]))
