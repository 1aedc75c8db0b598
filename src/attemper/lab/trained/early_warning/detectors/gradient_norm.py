"""Norm of the whole gradient before clipping, as a multiple of the median of the 50 steps before.

It costs one pass over the gradients, which clipping needs anyway.
"""

from __future__ import annotations

import numpy as np

from attemper.lab.trained.early_warning.detectors.detector import (
    Array,
    Detector,
    Signals,
    after_window,
    windows_before,
)


def score(signals: Signals) -> Array:
    before, now = windows_before(signals["gradient_norm"])
    return after_window(signals["gradient_norm"], now / np.median(before, 1))


DETECTOR = Detector("gradient norm", score, group="gradient_norm")
