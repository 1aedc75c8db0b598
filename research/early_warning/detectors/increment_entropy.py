"""Spectral entropy of the change of each head's query-key matrix within 10 steps: the least mean of a layer.

A change in few directions is the sign. It needs the weights alone: two small QR and one SVD a head, and no data.

Source: the signal of arXiv 2606.28116.
"""

from __future__ import annotations

import numpy as np

from research.early_warning.detectors.detector import Array, Detector, Signals


def score(signals: Signals) -> Array:
    """NaN at the first step, where nothing has changed yet."""
    return -signals["increment_entropy"].astype(np.float64).mean(2).min(1)


DETECTOR = Detector("increment entropy", score, signal="increment_entropy")
