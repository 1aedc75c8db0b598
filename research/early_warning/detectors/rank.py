"""Loss of rank: the effective rank of what a layer's attention adds, of the layer where it is least.

It costs a Gram matrix of width x width and its eigenvalues.
"""

from __future__ import annotations

from research.early_warning.detectors.detector import Array, Detector, Signals, least


def score(signals: Signals) -> Array:
    """[T]: -min over layers of (effective rank / number of heads)."""
    return least(signals["output_rank"] / max(1, signals["head_rank"].shape[2]))


DETECTOR = Detector("loss of rank", score, signal="output_rank")
