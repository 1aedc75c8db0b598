"""What a detector is: a score for each step of a run, larger for more alarming. Its limit is fitted elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attemper.lab.trained.summary import WINDOW
from attemper.readings.laws import Array
from research.early_warning.spacing import ATTENTION, SPACING

Signals = Mapping[str, npt.NDArray[np.float32]]


@dataclass(frozen=True)
class Detector:
    """One way to look at a training run."""

    name: str
    score: Callable[[Signals], Array]
    """Signals of a run -> [T], from what is known at each measurement. NaN: nothing to say yet; inf: no number."""
    signal: str
    """The signal that it needs."""

    @property
    def spacing(self) -> int:
        """Steps between two measurements of its signal."""
        return SPACING.get(self.signal, ATTENTION)


def heads(values: npt.NDArray[np.float32]) -> Array:
    """[T, L, H] -> [T, L H], with inf in the place of what is no number."""
    flat = values.reshape(len(values), -1).astype(np.float64)
    return np.where(np.isnan(flat), np.inf, flat)


def least(values: npt.NDArray[np.floating]) -> Array:
    """[T, ...] -> [T] the least, negated: the lower, the more alarming; inf where one is no number."""
    flat = values.reshape(len(values), -1).astype(np.float64)
    return -np.where(np.isnan(flat), -np.inf, flat).min(1)


def windows_before(values: npt.NDArray[np.float32]) -> tuple[Array, Array]:
    """The ``WINDOW`` values before each step [T - WINDOW, WINDOW], and those steps' own values [T - WINDOW]."""
    if len(values) <= WINDOW:
        return np.empty((0, WINDOW)), np.empty(0)
    before = np.lib.stride_tricks.sliding_window_view(values.astype(np.float64), WINDOW)[:-1]
    return before, values[WINDOW:].astype(np.float64)


def after_window(values: npt.NDArray[np.float32], scores: Array) -> Array:
    """Scores of the steps behind the first window, [T]: NaN before it, inf where the value is no number."""
    found = np.full(len(values), np.nan)
    found[WINDOW:] = scores
    return np.where(np.isfinite(values), found, np.inf)


def times_median(values: npt.NDArray[np.float32]) -> Array:
    """[T] as multiples of the median of the ``WINDOW`` values before; NaN and inf as by :func:`after_window`."""
    before, now = windows_before(values)
    return after_window(values, now / np.median(before, 1))
