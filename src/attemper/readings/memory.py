"""What a judge remembers after one sample or many: where the heads of the run stand, and of each quantity the latest
readings, earlier values, and what was normal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from attemper.readings.alarm_laws import FIRST, MARKS, Array, Law, Window, median_of_three, settle
from attemper.readings.labels import apart, first_call
from attemper.readings.sample import Sample, Samples, SiteKey, SiteLabel

PAIRS = 1 << 16
"""Windows of so many readings are made at a time: 9 MB of earlier values."""
_OF_HEADS = ("_recent", "_marks", "_steps", "_first", "_baseline", "_centre", "_spread", "_kept", "_calm")
"""What a memory has, a column a head."""


class Columns:
    """Where the heads of every site of a run stand: each gets a column when it is first seen, and keeps it. A site that
    comes back with other heads is another site. So is one that comes back as a call of its module where it was the mean
    over all calls, or the other way round.
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


class Memory:
    """Readings of one quantity, a column a head. Its size does not grow with the number of samples.

    The reading that was written last is provisional: it can be written again, until ``commit`` keeps it.
    """

    def __init__(self, laws: tuple[Law, ...]) -> None:
        """``laws``: those that look at this quantity."""
        looks_at = {part for law in laws for part in law.looks_at}
        self._recent = np.empty((max(2, *(law.depth for law in laws)), 0))  # with the one before
        self._marks, self._steps = (np.empty((MARKS + 1 if "marks" in looks_at else 0, 0)) for _ in range(2))
        self._first = np.empty((FIRST if "baseline" in looks_at else 0, 0))
        self._baseline, self._centre, self._spread, self._spacing = (np.empty(0) for _ in range(4))
        self._settles = "centre" in looks_at
        self._step = -np.inf
        self._kept, self._calm = (np.empty(0, np.int64) for _ in range(2))
        """How many readings stand in ``_first``, and how many marks came in a row while the head was healthy."""

    @property
    def numbers(self) -> list[np.ndarray]:
        """All that it remembers but for the spacing, as arrays. It takes others of the same shapes."""
        return [np.array([self._step]), *(getattr(self, name) for name in _OF_HEADS)]

    @numbers.setter
    def numbers(self, numbers: list[np.ndarray]) -> None:
        self._step = float(numbers[0][0])
        for name, one in zip(_OF_HEADS, numbers[1:], strict=True):
            setattr(self, name, one)
        if not ((self._kept >= 0) & (self._kept <= FIRST)).all():
            raise ValueError("more first readings than there can be")
        if not np.isfinite(self._steps[~np.isnan(self._marks)]).all() or np.isinf(self._steps).any():
            raise ValueError("earlier values without a step")

    def grow(self, spacing: Array) -> None:
        """Makes room for more heads. ``spacing`` [H]: the least steps between two earlier values of each."""
        more = len(spacing) - len(self._spacing)
        for name in _OF_HEADS:
            setattr(self, name, pad(getattr(self, name), more))
        self._spacing = spacing

    def commit(self, healthy: np.ndarray) -> None:
        """Keeps what was written last. ``healthy`` [H]: whether it may be part of what is normal for the head."""
        present = ~np.isnan(self._recent[-1])
        if len(self._first):
            self._baseline = np.where(np.isnan(self._baseline), self._recent[-1], self._baseline)
            self._keep_first(present & healthy, self._recent[-1])
        if len(self._marks):
            due = present & ~(self._steps[-1] - self._steps[-2] < self._spacing)
            for rows in (self._marks, self._steps):
                _shift(rows, due)
            if self._settles:
                self._find_stretch(due, present & ~healthy)
        _shift(self._recent, present)

    def write(self, step: int, values: Array) -> None:
        """Puts the readings of a sample, NaN where there are none, in the place of those not yet kept."""
        self._recent[-1] = values
        if not len(self._marks):
            return
        self._marks[-1] = mark(self._recent)
        self._steps[-1] = np.where(np.isnan(values), np.nan, step)
        if step <= self._step:  # the loop may have gone back
            later = (self._steps[:-1] >= step) & ~np.isnan(values)
            self._marks[:-1][later] = self._steps[:-1][later] = np.nan
        self._step = step

    @property
    def window(self) -> Window:
        return Window(self._recent, self._steps, self._marks, self._baseline, self._centre, self._spread)

    def origin(self, heads: slice, side: str) -> tuple[float, int] | None:
        """As the function ``origin``, of these heads."""
        return origin(self._marks[:, heads], self._steps[:, heads], self._recent[-1, heads], side)

    def _keep_first(self, fit: np.ndarray, readings: Array) -> None:
        columns = np.flatnonzero(fit & (self._kept < FIRST))
        if len(columns):
            self._first[self._kept[columns], columns] = readings[columns]
            self._kept[columns] += 1
            full = columns[self._kept[columns] == FIRST]
            self._baseline[full] = np.median(self._first[:, full], 0)

    def _find_stretch(self, more: np.ndarray, ill: np.ndarray) -> None:
        """Looks at each healthy stretch of ``MARKS`` earlier values until one has settled."""
        self._calm = np.where(ill, 0, self._calm + more)
        full = np.flatnonzero((self._calm >= MARKS) & np.isnan(self._centre))
        if len(full):
            self._centre[full], self._spread[full] = settle(self._marks[:-1, full])
            self._calm[full] = 0


class Stretch:
    """Readings of a stretch of samples behind those of a memory: rows are samples, or readings, which stand without
    gaps for each head. All are written, and all but the last committed, once the stretch is kept.

    Reading j of a head has the ``depth`` - 1 before it in the rows from j on of ``_values``, and the ``MARKS`` earlier
    values before it in the rows from ``_marked[j]`` on of ``_marks``.
    """

    def __init__(self, memory: Memory, steps: Array, values: Array) -> None:
        """
        Args:
            memory: whose last reading is committed.
            steps: [samples] ascending for each head.
            values: [samples, H], NaN where there is no reading.
        """
        self._memory, self.values, self._steps = memory, values, steps
        self.present = ~np.isnan(values)
        self._whole = bool(self.present.all())
        rows = np.broadcast_to(np.arange(len(values))[:, None], values.shape)
        self.before = rows if self._whole else self.present.cumsum(0) - self.present
        """[samples, H] how many readings of the stretch a head has before each sample."""
        self._depth, baseline = len(memory._recent), memory._baseline
        readings = self.readings_of(values, np.nan)
        self._values = np.concatenate([memory._recent[:-1], readings])
        self._recent = np.moveaxis(sliding_window_view(self._values, self._depth, 0), -1, 0)
        self.shape = readings.shape
        self._later_baseline = np.where(np.isnan(baseline), readings[0], baseline)
        """[H] after the first reading."""
        self._baseline = np.broadcast_to(self._later_baseline, self.shape)
        if np.isnan(baseline).any():
            self._baseline = np.concatenate([baseline[None], self._baseline[1:]])
        self._centre = self._spread = np.broadcast_to(np.nan, self.shape)
        self._marks = self._marked_steps = np.empty((0, 0))
        self._due = np.zeros(self.shape, bool)
        if len(memory._marks):
            self._mark(memory._marks, memory._steps, memory._spacing)

    def _mark(self, marks: Array, steps: Array, spacing: Array) -> None:
        """Finds the readings that become earlier values."""
        self._now = mark(self._recent)
        at = self.readings_of(np.broadcast_to(self._steps[:, None], self.values.shape), np.nan)
        due, alike = self._find_due(at, steps[-2], spacing)
        marked = np.concatenate([np.zeros((1, due.shape[1]), np.int64), due.cumsum(0)])
        self._due, self._marked = due[:, alike], marked[:, alike]
        more = np.full((int(self._marked[-1].max(initial=0)), self.shape[1]), np.nan)
        self._marks, self._marked_steps = (np.concatenate([rows[:-1], more]) for rows in (marks, steps))
        row, head = np.nonzero(self._due)
        place = MARKS + self._marked[row, head], head
        self._marks[place], self._marked_steps[place] = self._now[row, head], at[row, head]

    def _find_due(self, steps: Array, last: Array, spacing: Array) -> tuple[np.ndarray, np.ndarray]:
        """[readings, kinds] which stand at least ``spacing`` steps after the one before, and [H] the kind of each head:
        heads that are read at the same steps are alike.
        """
        read = [b""] * len(last) if self._whole else [one.tobytes() for one in np.packbits(self.present, 0).T]
        keys = list(zip(read, np.where(np.isnan(last), -np.inf, last).tolist(), spacing.tolist(), strict=True))
        firsts = {key: head for head, key in reversed(list(enumerate(keys)))}
        found = np.zeros((len(steps), len(firsts)), bool)
        for kind, ((_, before, least), head) in enumerate(firsts.items()):
            for row, step in enumerate(steps[~np.isnan(steps[:, head]), head].tolist()):
                if not step - before < least:
                    found[row, kind], before = True, step
        order = {key: kind for kind, key in enumerate(firsts)}
        return found, np.array([order[key] for key in keys], np.int64)

    def first_full(self, healthy: np.ndarray) -> int:
        """After so many samples a baseline changes; more than there are if none does. ``healthy`` [samples, H]."""
        memory = self._memory
        heads = np.flatnonzero(memory._kept < FIRST) if len(memory._first) else np.empty(0, np.int64)
        kept = memory._kept[heads] + (self.present & healthy)[:, heads].cumsum(0)
        full = np.flatnonzero((kept >= FIRST).any(1))
        return int(full[0]) + 1 if len(full) else len(healthy)

    def settle(self, healthy: np.ndarray) -> None:
        """Finds the settled stretch of each head, from which drift is measured. ``healthy`` [samples, H]."""
        centre, spread, calm = self._settled = self._memory._centre, self._memory._spread, self._memory._calm
        self._centre, self._spread = (np.broadcast_to(one, self.shape) for one in (centre, spread))
        if not self._memory._settles:
            return
        fit = self.readings_of(healthy, True)
        marked = self._marked[1:]
        ill_since = np.maximum.accumulate(np.where(fit, 0, marked), 0)
        stretch = marked - ill_since + np.where(np.logical_and.accumulate(fit, 0), calm, 0)
        committed = self.before[-1]
        tries = self._due & fit & (stretch % MARKS == 0) & np.isnan(centre)
        tries &= np.arange(len(tries))[:, None] < committed
        row, head = np.nonzero(tries)
        found = settle(self._marks[marked[row, head] + np.arange(MARKS)[:, None], head])
        settled = np.flatnonzero(~np.isnan(found[0])).tolist()
        if settled:
            centre, spread = centre.copy(), spread.copy()
            self._centre, self._spread = self._centre.copy(), self._spread.copy()
        for at in settled:
            column = head[at]
            if np.isnan(centre[column]):
                centre[column], spread[column] = found[0][at], found[1][at]
                self._centre[row[at] + 1 :, column], self._spread[row[at] + 1 :, column] = found[0][at], found[1][at]
        last = np.take_along_axis(stretch, np.maximum(committed - 1, 0)[None], 0)[0] % MARKS
        self._settled = centre, spread, np.where(committed > 0, last, calm)

    def keep(self, healthy: np.ndarray) -> None:
        """Takes the stretch into the memory, after ``settle``; its last sample is provisional."""
        memory, last = self._memory, len(self.values) - 1
        if len(memory._first):
            fit = (self.present & healthy)[:-1] & (memory._kept < FIRST)
            for row in np.flatnonzero(fit.any(1)).tolist():
                memory._keep_first(fit[row], self.values[row])
            memory._baseline = np.where(self.before[-1] > 0, self._later_baseline, memory._baseline)
        memory._centre, memory._spread, memory._calm = self._settled
        heads = np.arange(self.shape[1])
        kept = self._values[self.before[-1] + np.arange(self._depth - 1)[:, None], heads]
        memory._recent = np.concatenate([kept, self.values[-1:]])
        if len(memory._marks):
            memory._marks, memory._steps = self._marks_at(last, heads)
            memory._step = int(self._steps[-1])

    # --- between samples and readings ---

    def readings_of(self, rows: np.ndarray, missing: float) -> np.ndarray:
        """[readings, H] of [samples, H]."""
        if self._whole:
            return rows
        found = np.full((max(1, int(self.present.sum(0).max(initial=0))), rows.shape[1]), missing, rows.dtype)
        row, head = np.nonzero(self.present)
        found[self.before[row, head], head] = rows[row, head]
        return found

    def samples_of(self, rows: Array) -> Array:
        """[samples, H] of [readings, H]; NaN where a sample has no reading."""
        if self._whole:
            return rows
        return np.where(self.present, np.take_along_axis(rows, np.minimum(self.before, len(rows) - 1), 0), np.nan)

    # --- what is judged ---

    @property
    def window(self) -> Window:
        """[..., readings, H]: as laws without a floor look at it, of earlier values only the last."""
        now = self._now[None] if len(self._marks) else np.empty((0, *self.shape))
        return Window(self._recent, now, now, self._baseline, self._centre, self._spread)

    @property
    def latest(self) -> Array:
        """[samples, H] the last of the earlier values, which is now."""
        return self.samples_of(self._now)

    @property
    def normal(self) -> tuple[Array, Array]:
        """[samples, H] baseline and centre."""
        return self.samples_of(self._baseline), self.samples_of(self._centre)

    def earlier(self, back: int) -> Array:
        """[samples, H] so many readings before that of the sample, or before the one that it lacks."""
        return np.take_along_axis(self._values, self.before + self._depth - 1 - back, 0) if back else self.values

    def measure(self, law: Law, where: np.ndarray) -> Array:
        """[samples, H] what the law measures at some of the readings; NaN elsewhere."""
        found = np.full(where.shape, np.nan)
        rows, heads = np.nonzero(where & self.present)
        for start in range(0, len(rows), PAIRS):
            row, head = rows[start : start + PAIRS], heads[start : start + PAIRS]
            at = self.before[row, head], head
            recent = self._values[at[0] + np.arange(self._depth)[:, None], head]
            marks, steps = self._marks_at(row, head)
            normal = self._baseline[at], self._centre[at], self._spread[at]
            found[row, head] = law.measure(Window(recent, steps, marks, *normal))
        return found

    def _marks_at(self, row: np.ndarray | int, head: np.ndarray) -> tuple[Array, Array]:
        """[MARKS + 1, ...] earlier values of heads at a sample, and their steps."""
        if not len(self._marks):
            return self._marks, self._marks
        at, here = self.before[row, head], self.present[row, head]
        place = self._marked[at, head] + np.arange(MARKS)[:, None], head
        now = np.where(here, self._now[np.minimum(at, len(self._now) - 1), head], np.nan)
        step = np.where(here, self._steps[row], np.nan)
        return np.concatenate([self._marks[place], now[None]]), np.concatenate([self._marked_steps[place], step[None]])

    def origin(self, row: int, heads: slice, side: str) -> tuple[float, int] | None:
        """As ``Memory.origin``, at a sample."""
        marks, steps = self._marks_at(row, np.arange(heads.start, heads.stop))
        return origin(marks, steps, self.values[row, heads], side)


def mark(recent: Array) -> Array:
    """The earlier value that the last of the readings becomes: the median of three, and before that the reading."""
    middle = median_of_three(recent[-3], recent[-2], recent[-1])
    return np.where(np.isnan(middle), recent[-1], middle)


def origin(marks: Array, steps: Array, now: Array, side: str) -> tuple[float, int] | None:
    """The latest earlier value, and its step, that was at most half of what is now ("above"), or at least twice that
    ("below"); else the earliest known. Of several heads their mean. None if there is nothing earlier.
    """
    known = ~np.isnan(marks)
    mean = np.where(known, marks, 0.0).sum(1) / np.maximum(known.sum(1), 1)
    earlier = np.flatnonzero(known[:-1].any(1))
    if not len(earlier):
        return None
    middle = np.nanmean(now)
    far = earlier[mean[earlier] <= middle / 2 if side == "above" else mean[earlier] >= middle * 2]
    row = far[-1] if len(far) else earlier[0]
    return float(mean[row]), int(np.nanmax(steps[row]))


def pad(rows: np.ndarray, more: int) -> np.ndarray:
    """With ``more`` columns: NaN, or 0 where there is no NaN."""
    missing = np.nan if rows.dtype.kind == "f" else 0
    return np.concatenate([rows, np.full((*rows.shape[:-1], more), missing, rows.dtype)], -1)


def _shift(rows: np.ndarray, columns: np.ndarray) -> None:
    """Moves every row one up, where ``columns``; the last is to be written anew."""
    if columns.all():
        rows[:-1] = rows[1:]
    elif columns.any():
        np.copyto(rows[:-1], rows[1:], where=columns)
