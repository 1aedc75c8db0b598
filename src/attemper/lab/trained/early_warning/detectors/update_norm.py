"""Norm of the change of all weights at a step, as a multiple of the median of the 50 steps before.

It costs a copy of the weights and a pass over them at each step.
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
    before, now = windows_before(signals["update_norm"])
    return after_window(signals["update_norm"], now / np.median(before, 1))


DETECTOR = Detector("update norm", score, group="update_norm")
