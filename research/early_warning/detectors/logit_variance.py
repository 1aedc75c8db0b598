"""Plain variance of the scores of the head where it is largest (as its root, which orders runs alike).

It costs two sums over the scores.
"""

from __future__ import annotations

from research.early_warning.detectors.detector import Array, Detector, Signals, heads


def score(signals: Signals) -> Array:
    """[T]: the largest standard deviation of all heads."""
    return heads(signals["score_std"]).max(1)


DETECTOR = Detector("logit variance", score, signal="score_std")
