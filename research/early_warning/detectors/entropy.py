"""Normalised entropy: the least of all heads, the deepest fall of a head, the widest spread between heads of a layer.

A fall is what is left of the head's baseline, the median of its first five readings, as in the alarm ``fallen``. Each
costs one sum over the weights.
"""

from __future__ import annotations

import numpy as np

from attemper.readings.laws import FIRST, fall_from_baseline
from research.early_warning.detectors.detector import Array, Detector, Signals, least


def level(signals: Signals) -> Array:
    """[T]: -min_h (H_h / log n), of all heads."""
    return least(signals["normalized_entropy"])


def fall(signals: Signals) -> Array:
    """[T]: -min_h of what is left of the head's baseline; NaN while the baseline is read."""
    values = signals["normalized_entropy"].astype(np.float64)
    found = least(fall_from_baseline(values, np.median(values[:FIRST], 0)))
    found[:FIRST] = np.nan
    return found


def spread(signals: Signals) -> Array:
    """[T]: the standard deviation of H / log n between heads, of the layer where it is widest."""
    values = signals["normalized_entropy"].astype(np.float64)
    found = values.std(2).max(1)
    return np.where(np.isnan(found), np.inf, found)


SCORES = {"entropy": level, "entropy fall": fall, "entropy spread": spread}
DETECTORS = tuple(Detector(name, score, signal="normalized_entropy") for name, score in SCORES.items())
