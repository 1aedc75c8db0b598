"""How far heads of a layer are from one another: mean KL to their mixture, of the layer where it is largest.

It costs a mixture and a second sum over the weights, and needs the weights themselves.
"""

from __future__ import annotations

import numpy as np

from research.early_warning.detectors.detector import Array, Detector, Signals


def score(signals: Signals) -> Array:
    """[T], nats: the mean over a layer's heads of KL(p_h || mean of all heads), of the layer where it is largest."""
    found = signals["disagreement"].astype(np.float64).mean(2).max(1)
    return np.where(np.isnan(found), np.inf, found)


DETECTOR = Detector("disagreement", score, signal="disagreement")
