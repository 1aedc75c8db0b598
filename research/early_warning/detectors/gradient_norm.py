"""Norm of the whole gradient before clipping, as a multiple of the median of the 50 steps before.

It costs one pass over the gradients, which clipping needs anyway.
"""

from __future__ import annotations

from research.early_warning.detectors.detector import Array, Detector, Signals, times_median


def score(signals: Signals) -> Array:
    """[T]: |g_t| / median(|g| of the 50 steps before)."""
    return times_median(signals["gradient_norm"])


DETECTOR = Detector("gradient norm", score, signal="gradient_norm")
