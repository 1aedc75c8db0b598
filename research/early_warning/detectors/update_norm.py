"""Norm of the change of all weights at a step, as a multiple of the median of the 50 steps before.

It costs a copy of the weights and a pass over them at each step.
"""

from __future__ import annotations

from research.early_warning.detectors.detector import Array, Detector, Signals, times_median


def score(signals: Signals) -> Array:
    """[T]: |dw_t| / median(|dw| of the 50 steps before)."""
    return times_median(signals["update_norm"])


DETECTOR = Detector("update norm", score, signal="update_norm")
