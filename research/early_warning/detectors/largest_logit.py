"""The largest score of any head: its level, and how fast it doubles by the law of the alarm ``logit_growth``.

It costs one maximum over the scores; a fused kernel leaves it at no cost.
"""

from __future__ import annotations

import numpy as np

from attemper.readings.alarms import KINDS
from attemper.readings.laws import SPAN, doubling_time, median_of_three
from research.early_warning.detectors.detector import Array, Detector, Signals, heads
from research.early_warning.spacing import ATTENTION

FLOOR = KINDS["logit_growth"].floor or 0.0
"""Speed says nothing of smaller logits."""


def level(signals: Signals) -> Array:
    """[T]: the largest score q.k / sqrt(d) of all heads."""
    return heads(signals["max_logit"]).max(1)


def growth(signals: Signals) -> Array:
    """Doublings a step of the fastest head above ``FLOOR``, within the last ``SPAN`` steps. Of medians of three."""
    values = heads(signals["max_logit"])
    found = np.full(len(values), np.nan)
    smooth = median_of_three(values[2:], values[1:-1], values[:-2])
    for now in range(1, len(smooth)):
        marks = smooth[max(0, now - SPAN // ATTENTION) : now + 1]
        steps = np.broadcast_to(ATTENTION * np.arange(len(marks), dtype=np.float64)[:, None], marks.shape)
        fast = np.where(marks[-1] > FLOOR, 1 / doubling_time(steps, marks), 0.0)
        found[now + 2] = np.where(np.isinf(marks[-1]), np.inf, fast).max()
    return found


DETECTORS = (
    Detector("largest logit", level, signal="max_logit"),
    Detector("logit growth", growth, signal="max_logit"),
)
