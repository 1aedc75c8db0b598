"""The laws of alarms: what each measures in the latest readings of heads. Pure functions of arrays, numpy only.

Arrays are [W, ...]: the newest of W readings stands last, whatever follows is judged side by side (heads, or samples
and heads). NaN marks what is not known, and gives NaN: not judged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

VERSION = 5
"""Of the laws and of how they are applied. Raise it with each change that gives a run other alarms: a stored run keeps
what was judged, and readers take nothing of another version.
"""
RECENT = 20
"""Readings in a row that a head must be uniform in to be called dead."""
LASTING = 3
"""Readings in a row that a difference between ranks must last."""
FIRST = 5
"""Healthy readings whose median is the baseline of a fall."""
MARKS = 16
"""Earlier values that are remembered, apart by at least ``SPAN / MARKS`` steps; so many make a settled stretch."""
SPAN = 100
"""Steps that they reach back, at least; and the unit of a rate."""
LEAST_FALL = 0.25
"""A rate is measured from values higher by at least so much."""
STEADY = 50
"""Losses whose mean and standard deviation a spike is measured from."""
LATEST = 5
"""Losses behind them, of which three must be high."""
ALONE = 3
"""One loss alone must be so many times as far away as three of the latest."""
LOSSES = STEADY + LATEST
LEAST_NOISE = 1e-3
"""The standard deviation of a loss is at least this share of its mean."""
LEAST_SPREAD = 0.02
"""A baseline of drift has at least this spread, as readings of other batches differ by that much."""
LEAST_SHARE = 0.05
"""The spread that a shift is measured in is at least this share of the median."""


class Window(NamedTuple):
    """What laws may look at: one quantity of many heads, NaN where there is no reading."""

    recent: Array
    """[W, H] readings."""
    steps: Array
    """[M + 1, H] steps of ``marks``."""
    marks: Array
    """[M + 1, H] earlier values, each a median of three readings; the last is now."""
    baseline: Array
    """[H] what a fall is measured from."""
    centre: Array
    """[H] the median of a settled stretch, what drift is measured from; NaN while none has settled."""
    spread: Array
    """[H] the spread of that stretch."""

    def of(self, heads: npt.NDArray[np.bool_]) -> Window:
        return Window(*(part[..., heads] for part in self))


@dataclass(frozen=True)
class Law:
    """One way to judge a quantity."""

    measure: Callable[[Window], Array]
    """[H] what is held against the limit."""
    side: Literal["above", "below"] | None = None
    """On which side of its limit it rings; None: on that of the alarm's kind."""
    depth: int = 1
    """How many readings it needs: with fewer it measures NaN, or is not asked."""
    looks_at: tuple[str, ...] = ()
    """What else of a ``Window`` it looks at."""
    place: Callable[[Window, Array], Array] = lambda window, reading: reading
    """[H] where one reading stands between health and the limit: nothing begins where the latest went back."""


def median_of_three(one: Array, two: Array, three: Array) -> Array:
    """Exact, and the same for one head as for many; NaN if any is."""
    return np.maximum(np.minimum(one, two), np.minimum(np.maximum(one, two), three))


def doubling_time(steps: Array, values: Array) -> Array:
    """Steps in which the value doubles, at the pace since it was last at most half of what it is now.

    With v(t) now and s the latest step at which v(s) <= v(t) / 2: (t - s) / log2(v(t) / v(s)). A value below
    v(t) / 1024 counts as that. inf if it was not half as large at any of the earlier steps.
    """
    now, earlier = values[-1], values[:-1]
    half = (earlier <= now / 2) & (now > 0)
    past = np.where(half, steps[:-1], -np.inf).max(0)
    then = np.where(half & (steps[:-1] == past), earlier, -np.inf).max(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        time = (steps[-1] - past) / (np.log2(now) - np.log2(np.maximum(then, now / 1024)))
    return np.where(np.isnan(now), np.nan, np.where(half.any(0), time, np.inf))


def rate(steps: Array, values: Array) -> Array:
    """How much the value falls in ``SPAN`` steps, at the steepest of its falls of at least ``LEAST_FALL``; else 0."""
    fall = values[:-1] - values[-1]
    pace = np.where(fall >= LEAST_FALL, SPAN * fall / (steps[-1] - steps[:-1]), 0.0).max(0)
    return np.where(np.isnan(values[-1]), np.nan, pace)


def fall_from_baseline(now: Array, baseline: Array) -> Array:
    """The share that is left of the baseline."""
    return now / baseline


def drift(now: Array, centre: Array, spread: Array) -> Array:
    """How far a value has moved from a settled stretch, in spreads of that stretch."""
    return np.abs(now - centre) / spread


def dead(recent: Array) -> Array:
    """The least of all readings in the window; NaN while it is not full."""
    return recent.min(0)


def lasting_level(recent: Array) -> Array:
    """The least of the last three readings."""
    return recent[-LASTING:].min(0)


def outside(before: Array, reading: Array) -> Array:
    """How many times a reading is below the least of those before, or above the largest, less 1; 0 between them.

    A reading below the least / 1024 counts as that.
    """
    least, largest = before.min(0), before.max(0)
    return np.maximum(np.maximum(least / np.maximum(reading, least / 1024), reading / largest) - 1.0, 0.0)


def shift(recent: Array) -> Array:
    """How far the middle one of the latest three readings is outside the range of the 17 before, in spreads of these.

    With c their median: ``outside`` over max(1.4826 median |x - c| / c, ``LEAST_SHARE``). One batch shifts nothing.
    """
    before = recent[-RECENT:-LASTING]
    found = outside(before, median_of_three(*recent[-LASTING:]))
    far = found > 0
    if far.any():
        stretch = before[:, far]
        centre = np.median(stretch, 0)
        spread = 1.4826 * np.median(np.abs(stretch - centre), 0) / centre
        found[far] /= np.maximum(spread, LEAST_SHARE)
    return found


def spike(losses: Array) -> tuple[Array, Array]:
    """How far the latest of [LOSSES, ...] are from those before, in standard deviations of these, and their mean.

    With the deviations d = (x - mean) / std of the five latest from the 50 before: the third largest d, or a third of
    the last |d|, whichever is larger. Losses are skewed, and one batch may be hard: three of five are not. A loss
    that falls as far at once is of other data, too.
    """
    before = losses[:STEADY]
    mean = before.mean(0)
    spread = np.maximum(before.std(0), LEAST_NOISE * np.abs(mean) + np.finfo(np.float32).tiny)
    apart = (losses[STEADY:] - mean) / spread
    return np.maximum(np.sort(apart, 0)[-3], np.abs(apart[-1]) / ALONE), mean


def settle(stretch: Array) -> tuple[Array, Array]:
    """Centre and spread of a stretch of readings; NaN where it moved on from its first half to its second.

    The centre is the median, the spread 1.4826 median |x - centre|, at least ``LEAST_SPREAD``. It moved on if the
    medians of its halves differ by more than the spread.
    """
    centre = np.median(stretch, 0)
    spread = np.maximum(1.4826 * np.median(np.abs(stretch - centre), 0), LEAST_SPREAD)
    half = len(stretch) // 2
    moved = np.abs(np.median(stretch[half:], 0) - np.median(stretch[:half], 0)) > spread
    return np.where(moved, np.nan, centre), np.where(moved, np.nan, spread)


LAWS: dict[str, Law] = {
    "level": Law(lambda window: window.recent[-1]),
    "nonfinite": Law(lambda window: window.recent[-1], side="above"),
    "doubling_time": Law(lambda w: doubling_time(w.steps, w.marks), side="below", depth=3, looks_at=("marks",)),
    "rate": Law(lambda w: rate(w.steps, w.marks), side="above", depth=3, looks_at=("marks",)),
    "fall_from_baseline": Law(
        lambda w: fall_from_baseline(w.recent[-1], w.baseline),
        side="below",
        looks_at=("baseline",),
        place=lambda w, reading: fall_from_baseline(reading, w.baseline),
    ),
    "drift": Law(
        lambda w: drift(w.marks[-1], w.centre, w.spread),
        side="above",
        depth=3,
        looks_at=("marks", "centre"),
        place=lambda w, reading: drift(reading, w.centre, w.spread),
    ),
    "apart": Law(lambda window: np.abs(window.recent[-1]), side="above", place=lambda window, reading: np.abs(reading)),
    "lasting_level": Law(lambda window: lasting_level(window.recent), side="above", depth=LASTING),
    "dead": Law(lambda w: dead(w.recent), side="above", depth=RECENT),
    "shift": Law(
        lambda w: shift(w.recent),
        side="above",
        depth=RECENT,
        looks_at=("marks", "baseline"),
        place=lambda w, reading: np.sign(outside(w.recent[-RECENT:-LASTING], reading)),
    ),
    "spike": Law(lambda w: spike(w.recent)[0], side="above", depth=LOSSES),  # of no head: see ``LossJudge``
}
"""Name -> law. ``docs/alarms.md`` has the formulas."""
