"""Loss z-score: how many standard deviations the training loss is above the mean of the 50 steps before.

It costs nothing: the loss is there.
"""

from __future__ import annotations

import numpy as np

from research.early_warning.detectors.detector import (
    Array,
    Detector,
    Signals,
    after_window,
    windows_before,
)


def score(signals: Signals) -> Array:
    """[T]: (loss_t - mean) / standard deviation, of the 50 steps before."""
    before, now = windows_before(signals["loss"])
    deviation = np.maximum(before.std(1), 1e-12)
    return after_window(signals["loss"], (now - before.mean(1)) / deviation)


DETECTOR = Detector("loss z-score", score, signal="loss")
