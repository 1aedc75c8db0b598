"""What a judge remembers of one quantity: the latest readings of every head, earlier values, and what was normal."""

from __future__ import annotations

import numpy as np

from attemper.readings.alarm_laws import FIRST, MARKS, Array, Law, Window, settle
from attemper.readings.many_samples import Stretch, mark, origin

_OF_HEADS = ("_recent", "_marks", "_steps", "_first", "_baseline", "_centre", "_spread", "_kept", "_calm")
"""What a memory has, a column a head."""


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

    def origin(self, heads: slice, *, above: bool) -> tuple[float, int] | None:
        """The latest earlier value, and its step, that was at most half of what is now (``above``), or at least twice
        that; else the earliest known. Of several heads their mean. None if there is nothing earlier.
        """
        return origin(self._marks[:, heads], self._steps[:, heads], self._recent[-1, heads], above=above)

    def follow(self, steps: Array, values: Array) -> Stretch:
        """The readings [samples, H] of a stretch of samples whose steps ascend for each head, all written and all but
        the last of them committed. ``keep`` takes them into the memory.
        """
        return Stretch(self._recent, self._marks, self._steps, self._spacing, self._baseline, steps, values)

    def first_full(self, stretch: Stretch, healthy: np.ndarray) -> int:
        """After so many samples of a stretch a baseline changes; more than there are if none does."""
        heads = np.flatnonzero(self._kept < FIRST) if len(self._first) else np.empty(0, np.int64)
        kept = self._kept[heads] + (stretch.present & healthy)[:, heads].cumsum(0)
        full = np.flatnonzero((kept >= FIRST).any(1))
        return int(full[0]) + 1 if len(full) else len(healthy)

    def settle(self, stretch: Stretch, healthy: np.ndarray) -> None:
        """Finds what is normal for each head in a stretch. ``healthy`` [samples, H]."""
        stretch.settle(self._centre, self._spread, self._calm, healthy if self._settles else None)

    def keep(self, stretch: Stretch, healthy: np.ndarray, step: int) -> None:
        """Takes a stretch in, after ``settle``; its last sample, of this step, is provisional."""
        if len(self._first):
            fit = (stretch.present & healthy)[:-1] & (self._kept < FIRST)
            for row in np.flatnonzero(fit.any(1)).tolist():
                self._keep_first(fit[row], stretch.values[row])
            self._baseline = np.where(stretch.before[-1] > 0, stretch.later_baseline, self._baseline)
        self._centre, self._spread, self._calm = stretch.settled
        self._recent = stretch.recent
        if len(self._marks):
            self._marks, self._steps = stretch.marks(len(stretch.values) - 1, np.arange(len(healthy[0])))
            self._step = step

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
