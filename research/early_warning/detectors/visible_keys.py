"""Visible keys: by how many keys the mean count that a head's rows see has moved from its first reading.

Where lengths are fixed, as here, no healthy step moves it: what rings is the mask. It costs one sum over the mask.
"""

from __future__ import annotations

import numpy as np

from research.early_warning.detectors.detector import Array, Detector, Signals, heads


def score(signals: Signals) -> Array:
    """[T]: the largest of all heads, keys."""
    counts = heads(signals["visible_keys"])
    return np.abs(counts - counts[:1]).max(1)


DETECTOR = Detector("visible keys", score, signal="visible_keys")
