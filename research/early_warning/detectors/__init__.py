"""The detectors that are held against one another, one file a quantity. ``DETECTORS`` is the one list of them."""

from __future__ import annotations

from research.early_warning.detectors import (
    disagreement,
    entropy,
    first_token,
    gradient_norm,
    increment_entropy,
    largest_logit,
    logit_variance,
    loss,
    rank,
    update_norm,
    visible_keys,
)
from research.early_warning.detectors.detector import Detector

LOSS, GRADIENT_NORM = loss.DETECTOR, gradient_norm.DETECTOR
DETECTORS: dict[str, Detector] = {
    detector.name: detector
    for detector in (
        LOSS,
        GRADIENT_NORM,
        update_norm.DETECTOR,
        *largest_logit.DETECTORS,
        logit_variance.DETECTOR,
        *entropy.DETECTORS,
        first_token.DETECTOR,
        disagreement.DETECTOR,
        increment_entropy.DETECTOR,
        rank.DETECTOR,
        visible_keys.DETECTOR,
    )
}
"""Name -> detector."""
