"""The largest share of its weight that a head puts on the first token.

It costs a mean over one column of the weights.
"""

from __future__ import annotations

from research.early_warning.detectors.detector import Array, Detector, Signals, heads


def score(signals: Signals) -> Array:
    """[T]: the largest of all heads, from 0 to 1."""
    return heads(signals["first_token_mass"]).max(1)


DETECTOR = Detector("first-token mass", score, signal="first_token_mass")
