"""Alarms on history: each sample of a run judged in turn, by the laws and by what is remembered of those before."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from sys import byteorder
from typing import Any, NamedTuple

import numpy as np

from attemper.readings.alarm_laws import LAWS, MARKS, SPAN, VERSION, Array
from attemper.readings.alarms import (
    KINDS,
    MEAN_OF,
    OF_HEADS,
    VERDICT_FIELDS,
    AlarmKind,
    rings_above,
    urgency,
    worst_first,
)
from attemper.readings.limits import AlarmLimits
from attemper.readings.loss_judge import MOST_ENDED, LossJudge
from attemper.readings.memory import Columns, Memory, pad
from attemper.readings.reading import FEWEST_KEYS, Alarm, number
from attemper.readings.sample import RANK_DIFFERENCE, Sample
from attemper.text import count

UNIFORM = KINDS["diffuse"]
"""What most heads of an untrained model are."""
LOGITS = KINDS["logits"].quantity
"""What the line that holds an alarm is said in."""
MOST_CLIPPED = 100.0
"""The largest threshold that the line names: that of Kimi K2, which the remedies' table was made with."""
LEAST_CLIPPED = 5.0
"""The least: see ``NO_THRESHOLD``."""
WHOLE_FIRST = sorted(OF_HEADS, key=lambda kind: not kind.whole)
"""In the order of judging: where a whole site rings, its heads raise no alarm of their own."""
COUNTS = ("rows", "judged_rows", "empty_rows", "nonfinite_rows")
BESIDE = tuple(kind.beside for kind in OF_HEADS if kind.beside)
"""Quantities that messages name and nothing judges."""


MEASURE, NOW, BEFORE, TOTAL, LOGIT, STEP = range(FIGURES := 6)
"""What is known of an alarm at a sample: what is held against the limit, the statistic, what it is compared with (if
anything), rows or heads, the largest logit, and the step.
"""
FIRST, WORST, LATEST = range(3)
"""Samples of which that is kept."""


OriginOf = Callable[[slice, str], tuple[float, int] | None]
"""``Memory.origin``, or that of a stretch at a sample."""


class PastAlarm(NamedTuple):
    """An alarm that has ended, as numbers: its texts follow from them."""

    kind: AlarmKind
    column: int
    figures: Array
    """[3, FIGURES]"""
    origin: tuple[float, int] | None
    step: int
    """With which it ended."""


class KindState(NamedTuple):
    """The alarms of one kind, a column a head; of whole sites, the column of the first head."""

    on: np.ndarray
    figures: Array
    """[3, FIGURES, H], ``FIRST`` to ``LATEST`` and ``MEASURE`` to ``STEP``."""
    origins: Mapping[int, tuple[float, int] | None]
    """Column -> an earlier value and its step, of those that are on."""


class State(NamedTuple):
    """What follows from all samples up to one."""

    step: int | None
    kinds: Mapping[str, KindState]
    healthy: np.ndarray
    """[H] no warning stands."""
    untrained: bool = True
    near_uniform: int = 0
    ended: tuple[PastAlarm, ...] = ()
    """Alarms that ended with that sample."""
    changed: tuple[Alarm, ...] = ()
    """Those that began or ended with it, but for heads whose alarms went into that of their site."""


class Judge:
    """Judges the samples of a run in their order, in a memory that does not grow with their number.

    Judging a finished run again gives the same alarms as judging it while it ran.
    """

    def __init__(self, limits: AlarmLimits | Mapping[str, Any] | None = None, fewest_keys: int = FEWEST_KEYS) -> None:
        self.limits, self.fewest_keys = AlarmLimits.of(limits), fewest_keys
        self.loss = LossJudge(self.limits)
        """What it is told of the loss, which comes at other steps than samples."""
        self._columns = Columns()
        self._bounds: dict[str, Array] = {}
        """Kind -> [H] its limits; NaN where it never rings."""
        self._ends: dict[str, Array] = {}
        """Kind -> [H] to where the measure must come back to end an alarm."""
        quantities = dict.fromkeys(kind.quantity for kind in OF_HEADS)
        self._memories = {
            name: Memory(tuple(LAWS[kind.law] for kind in OF_HEADS if kind.quantity == name)) for name in quantities
        }
        self._missing: tuple[str, ...] = ()
        silent = KindState(np.zeros(0, bool), np.empty((3, FIGURES, 0)), {})
        self._before = self._now = State(None, {kind.name: silent for kind in OF_HEADS}, np.empty(0, bool))
        self._ended: deque[PastAlarm] = deque(maxlen=MOST_ENDED)
        self._reported: set[tuple[Any, ...]] = set()
        self._grow()

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
        found = {name: self._columns.spread(sample, name) for name in (*self._memories, *COUNTS, *BESIDE)}
        self._add_means(found)
        known = *sample.quantities, RANK_DIFFERENCE
        self._missing = tuple(name for name in self._memories if name.removeprefix(MEAN_OF) not in known)
        for name, memory in self._memories.items():
            memory.write(sample.step, found[name])
        with np.errstate(all="ignore"):  # a reading may be infinite
            self._now = self._judge(sample.step, found)
        new = [alarm for alarm in self._now.changed if _identity(alarm) not in self._reported]
        self._reported |= {_identity(alarm) for alarm in new}
        return tuple(new)

    @property
    def laws(self) -> int:
        """A number of 63 bits for all that it judges by: version of the laws, kinds of alarms, limits, not texts."""
        kinds = [[getattr(kind, name) for name in VERDICT_FIELDS] for kind in OF_HEADS]
        told = repr((VERSION, byteorder, kinds, self.limits.to_dict(), self.fewest_keys))
        return int.from_bytes(blake2b(told.encode(), digest_size=8).digest(), "big") >> 1

    @property
    def step(self) -> int | None:
        """Of the sample that was fed last; None before the first."""
        return self._now.step

    @property
    def standing(self) -> tuple[Alarm, ...]:
        """The alarms that are on, the worst first."""
        clips = _clips(self._now.kinds, (*self._ended, *self._now.ended))
        found = [
            self._alarm(clips, kind, column, state.figures[:, :, column], state.origins[column])
            for kind in OF_HEADS
            for state in (self._now.kinds[kind.name],)
            for column in np.flatnonzero(state.on).tolist()
        ]
        return tuple(sorted((*self.loss.standing, *found), key=worst_first))

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """Every alarm so far, in the order of ``urgency``; of those that have ended, the latest ``MOST_ENDED``."""
        past = (*self._ended, *self._now.ended)
        clips = _clips(self._now.kinds, past)
        ended = (
            replace(self._alarm(clips, *one), **goes_on) for one, goes_on in zip(past, self._goes_on(past), strict=True)
        )
        found = (*ended, *(one for one in self.loss.alarms if one.ended is not None), *self.standing)
        places = {site.name: place for place, site in enumerate(self._columns.sites)}

        def order(alarm: Alarm) -> tuple[Any, ...]:
            return *urgency(alarm), places.get(alarm.site, -1), -1 if alarm.head is None else alarm.head

        return tuple(sorted(found, key=order))

    def _goes_on(self, past: Sequence[PastAlarm]) -> Iterator[dict[str, Any]]:
        """Of alarms that have ended: the fields of the one of their site that took their place."""
        stood = defaultdict[tuple[str, int], list[tuple[float, float]]](list)
        for one in past:
            stood[one.kind.name, one.column].append((one.figures[FIRST, STEP], one.step))
        for name in {kind.part_of for kind in OF_HEADS if kind.part_of}:
            state = self._now.kinds[name]
            for column in np.flatnonzero(state.on).tolist():
                stood[name, column].append((state.figures[FIRST, STEP, column], math.inf))
        for one in past:
            first = int(self._columns.starts[self._columns.site[one.column]])
            over = [since for since, end in stood.get((one.kind.part_of, first), ()) if since <= one.step < end]
            yield {"continues_as": one.kind.part_of, "continues_since": int(over[-1])} if over else {}

    @property
    def untrained(self) -> bool:
        """Whether the model looks untrained: in each sample so far, more than half of the judged heads in training
        mode were near uniform. Then that is the state of the model and not of a head.
        """
        return self._now.untrained

    @property
    def held_back(self) -> int | None:
        """Near uniform heads that raise no alarm because the model looks untrained; None where there are none."""
        return self._now.near_uniform or None if self.untrained else None

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be judged, and why."""
        found = []
        for quantity in self._missing:
            kinds = ", ".join(kind.name for kind in OF_HEADS if kind.quantity == quantity)
            found.append(f"not judged: {kinds} (needs {quantity}).")
        for kind in OF_HEADS:
            if "centre" in LAWS[kind.law].looks_at and kind.quantity not in self._missing:
                unsettled = int(np.isnan(self._memories[kind.quantity].window.centre).sum())
                of = count(len(self._columns), "head")
                if unsettled:
                    found.append(f"not judged yet: {kind.name} (still changing: {unsettled} of {of}).")
        return (*found, *self.loss.notes)

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
        for kind in OF_HEADS:
            limits = [0.0 if kind.limit is None else one[kind.name] for one in at]
            bounds = [math.nan if limit is None else limit for limit in limits]
            ends = [kind.end(bound, rings_above(kind)) for bound in bounds]
            self._bounds[kind.name] = np.array(bounds)[self._columns.site]
            self._ends[kind.name] = np.array(ends)[self._columns.site]
        speeds = [self._bounds[kind.name] for kind in OF_HEADS if kind.law == "doubling_time"]
        span = np.fmax.reduce([np.full(len(self._columns), float(SPAN)), *speeds])
        for memory in self._memories.values():
            memory.grow(span / MARKS)
        self._before, self._now = (_widen(state, len(self._columns)) for state in (self._before, self._now))

    def _add_means(self, found: dict[str, Array]) -> None:
        """Writes the means over the heads of each site, where all of them have a reading, at the first of them."""
        for name in (name for name in self._memories if name.startswith(MEAN_OF)):
            heads = np.bincount(self._columns.site)[self._columns.site]
            found[name] = self._of_sites(found[name.removeprefix(MEAN_OF)], np.add.reduceat, 1) / heads

    def _judge(self, step: int, found: Mapping[str, Array]) -> State:
        near = int(self._near_uniform(found[UNIFORM.quantity])) if self._before.untrained else 0
        kinds: dict[str, KindState] = {}
        ended: list[PastAlarm] = []
        changed: list[tuple[Any, ...]] = []
        nowhere, healthy = np.zeros(len(self._columns), bool), np.ones(len(self._columns), bool)
        for kind in WHOLE_FIRST:
            old = self._before.kinds[kind.name]
            taken = bool(kind.part_of) and kinds[kind.part_of].on.any()
            whole = self._whole(kinds[kind.part_of].on) if taken else nowhere
            held_back = whole | self._columns.replaced | (kind.trained and near > 0)
            new = kinds[kind.name] = self._follow(kind, old, held_back, found, step)
            if new is old:
                continue
            over, begun = (np.flatnonzero(one).tolist() for one in (old.on & ~new.on, new.on & ~old.on))
            ended += [PastAlarm(kind, at, old.figures[:, :, at].copy(), old.origins[at], step) for at in over]
            gone = ended[len(ended) - len(over) :]
            changed += [one for one in gone if not whole[one.column]]
            changed += [(kind, at, new.figures[:, :, at], new.origins[at]) for at in begun]
            if kind.is_ill:
                healthy &= ~(self._whole(new.on) if kind.whole else new.on)
        clips = _clips(kinds, (*self._ended, *ended) if changed else ())
        alarms = tuple(self._alarm(clips, *one) for one in changed)
        return State(step, kinds, healthy, near > 0, near, tuple(ended), alarms)

    def _near_uniform(self, entropies: Array) -> np.ndarray:
        """[...] how many heads in training mode are near uniform; 0 if not more than half of those that are judged."""
        training = self._columns.in_training
        near = ((entropies > self._bounds[UNIFORM.name]) & training).sum(-1)
        return np.where(2 * near > (~np.isnan(entropies) & training).sum(-1), near, 0)

    def _follow(
        self, kind: AlarmKind, old: KindState, held_back: np.ndarray, found: Mapping[str, Array], step: int
    ) -> KindState:
        """The alarms of a kind after a sample; none where they are held back."""
        measure = self._measure(kind, found, old.on)
        if measure is None:
            return old
        beyond, back = self._beyond(kind, measure)
        if kind.floor is not None:
            beyond &= beyond_floor(kind, self._memories[kind.quantity].window.marks[-1])
        fresh = beyond & ~old.on & ~held_back
        if fresh.any():
            fresh &= ~self._recovers(kind)
        on = fresh | (old.on & ~back & ~held_back)
        if not (on.any() or old.on.any()):
            return old
        window = self._memories[kind.quantity].window
        figures = self._figures(kind, measure, window.recent[-1], (window.baseline, window.centre), found, float(step))
        begins = on & ~old.on
        seen = on & ~np.isnan(measure)
        value, worst = figures[figure_of(kind)], old.figures[WORST, figure_of(kind)]
        further = value > worst if rings_above(kind) else value < worst
        taken = np.stack([begins, begins | (seen & further), seen])
        origins = {column: origin for column, origin in old.origins.items() if on[column]}
        origin = self._memories[kind.quantity].origin
        origins |= {column: self._origin(kind, column, origin) for column in np.flatnonzero(begins).tolist()}
        return KindState(on, np.where(taken[:, None], figures, old.figures), origins)

    def _measure(self, kind: AlarmKind, found: Mapping[str, Array], on: np.ndarray) -> Array | None:
        """[H] what is held against the limit; NaN where it is not judged, and where it cannot ring. None: nowhere."""
        law, window = LAWS[kind.law], self._memories[kind.quantity].window
        few = found["judged_rows" if kind.judged else "rows"] < kind.least_rows
        if kind.floor is None:
            measure = law.measure(window)
            measure = np.where(few, np.nan, measure) if few.any() else measure
            return self._of_sites(measure, np.fmax.reduceat, kind.least_heads) if kind.whole else measure
        possible = (on | beyond_floor(kind, window.marks[-1])) & ~np.isnan(window.recent[-law.depth]) & ~few
        if not possible.any():
            return None
        measure = np.full(len(on), np.nan)
        measure[possible] = law.measure(window.of(possible))
        return measure

    def _beyond(self, kind: AlarmKind, measure: Array) -> tuple[np.ndarray, np.ndarray]:
        """Where the measure is beyond its limit, and where it has come back far enough to end an alarm."""
        bound, end = self._bounds[kind.name], self._ends[kind.name]
        above = rings_above(kind)
        beyond = measure > bound if above else measure < bound
        return beyond, measure <= end if above else measure >= end

    def _recovers(self, kind: AlarmKind) -> np.ndarray:
        """Where the latest reading stands nearer to health than the one before it: of a site, that of all its heads
        which stands nearest.
        """
        law, window = LAWS[kind.law], self._memories[kind.quantity].window
        return self._nearer(kind, *(law.place(window, reading) for reading in (window.recent[-1], window.recent[-2])))

    def _nearer(self, kind: AlarmKind, now: Array, before: Array) -> np.ndarray:
        """[..., H] where the place ``now`` is nearer to health than the one ``before``."""
        if kind.whole:
            unknown = np.isnan(now) | np.isnan(before)
            now, before = (
                self._of_sites(np.where(unknown, np.nan, places), np.fmax.reduceat, 1) for places in (now, before)
            )
        return now < before if kind.side == "above" else now > before

    def _figures(
        self,
        kind: AlarmKind,
        measure: Array,
        now: Array,
        normal: tuple[Array, Array],
        found: Mapping[str, Array],
        step: Any,
    ) -> Array:
        """[FIGURES, ..., H]; ``normal``: baseline and centre, ``step``: [...] of each sample."""
        before = found.get(kind.beside, normal["centre" in LAWS[kind.law].looks_at])
        total, logit = found["rows"] + found["empty_rows"] + found["nonfinite_rows"], found[LOGITS]
        if kind.whole:
            logit = self._of_sites(logit, np.fmax.reduceat, 1)
            known = (~np.isnan(now) & ~np.isnan(before)).astype(float)
            total, *sums = (
                self._of_sites(np.where(known > 0, values, 0.0), np.add.reduceat, kind.least_heads)
                for values in (known, now, before)
            )
            now, before = (one / np.maximum(total, 1.0) for one in sums)
        return np.stack([*np.broadcast_arrays(measure, now, before, total, logit, np.expand_dims(step, -1))])

    def _of_sites(self, values: Array, reduction: Callable[[Array, np.ndarray, int], Array], least: int = 2) -> Array:
        """[..., H] of sites, at their first heads; NaN elsewhere, and where fewer than ``least`` heads have a value."""
        found = np.full(values.shape, np.nan)
        if values.shape[-1]:
            starts = self._columns.starts
            several = np.add.reduceat((~np.isnan(values)).astype(np.int64), starts, -1) >= least
            found[..., starts] = np.where(several, reduction(values, starts, -1), np.nan)
        return found

    def _whole(self, on: np.ndarray) -> np.ndarray:
        """[..., H] of what stands at the first head of each site."""
        return on[..., self._columns.starts][..., self._columns.site] if on.shape[-1] else on

    def _origin(self, kind: AlarmKind, column: int, origin_of: OriginOf) -> tuple[float, int] | None:
        """Where the statistic was before: what says how fast it changed. ``origin_of``: of heads, by a memory."""
        if kind.law in ("dead", "nonfinite"):
            return None
        heads = self._columns.heads(column) if kind.whole else slice(column, column + 1)
        origin = origin_of(heads, kind.side)
        was_so = kind.law == "level" and origin is not None and kind.rings(origin[0], self._bounds[kind.name][column])
        return None if was_so else origin

    def _alarm(
        self,
        clips: tuple[Array, Array],
        kind: AlarmKind,
        column: int,
        figures: Array,
        origin: tuple[float, int] | None,
        ended: int | None = None,
    ) -> Alarm:
        """``figures`` [3, FIGURES] of this column; ``clips``: as ``_clips`` gives them."""
        first, worst, latest = figures.tolist()
        steps, least = clips
        i = steps.searchsorted(first[STEP], "right") - 1
        clip = math.nan if first[LOGIT] < 2 * LEAST_CLIPPED else float(least[i])
        value, limit = figure_of(kind), None if kind.limit is None else float(self._bounds[kind.name][column])
        return kind.alarm(
            self._columns.sites[self._columns.site[column]].name,
            None if kind.whole else self._columns.head(column),
            first[value],
            limit * first[BEFORE] if limit is not None and value == NOW else limit,
            origin,
            {"now": first[NOW], "before": first[BEFORE], "total": first[TOTAL], "threshold": clip},
            step=int(first[STEP]),
            since=int(first[STEP]),
            ended=ended,
            worst=number(worst[value]),
            worst_step=int(worst[STEP]),
            latest=number(latest[value]),
            latest_step=int(latest[STEP]),
        )


def _identity(alarm: Alarm) -> tuple[Any, ...]:
    return alarm.kind, alarm.site, alarm.head, alarm.ended is None


def _clips(kinds: Mapping[str, KindState], past: Iterable[PastAlarm]) -> tuple[Array, Array]:
    """Steps at which alarms began whose lines name a threshold, ascending, and the one that they name from there on:
    half the least of the largest logits so far, so that it acts on every head up to there. NaN while none is known.
    """
    standing = (kinds[kind.name] for kind in OF_HEADS if kind.names_threshold)
    ended = (one.figures[FIRST][:, None] for one in past if one.kind.names_threshold)
    nothing = np.full((FIGURES, 1), -np.inf)
    first = np.concatenate([nothing, *ended, *(one.figures[FIRST][:, one.on] for one in standing)], 1)
    first = first[:, first[STEP].argsort(kind="stable")]
    own = np.where(first[LOGIT] < 2 * LEAST_CLIPPED, np.nan, np.minimum(first[LOGIT] / 2, MOST_CLIPPED))
    return first[STEP], np.fmin.accumulate(own)


def beyond_floor(kind: AlarmKind, now: Array) -> np.ndarray:
    """Where the statistic, as the median of three readings, is harmful at all."""
    assert kind.floor is not None
    return now > kind.floor if kind.side == "above" else now < kind.floor


def figure_of(kind: AlarmKind) -> int:
    """What its alarms give as their value."""
    return NOW if kind.law == "fall_from_baseline" else MEASURE


def _widen(state: State, heads: int) -> State:
    """With columns for more heads, at which nothing rings."""
    more = heads - len(state.healthy)
    kinds = {
        name: KindState(pad(one.on, more), pad(one.figures, more), one.origins) for name, one in state.kinds.items()
    }
    return state._replace(kinds=kinds, healthy=np.concatenate([state.healthy, np.ones(more, bool)]))
