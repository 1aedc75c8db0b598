"""When a training run's curves gave a sign of trouble: the first step, for each sign."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median, pstdev
from typing import Any

from attemper.lab.trained.interventions import THRESHOLD

COLLAPSED = 0.05
"""Normalised entropy of a layer below which its attention has collapsed."""
WINDOW = 50
"""Steps that a loss or a gradient is compared with: those before it."""
GRADIENT_FACTOR = 5.0
"""A gradient norm is a sign above so many medians of those before it."""
LOSS_DEVIATIONS = 5.0
"""A loss is a sign so many standard deviations above the mean of those before it."""

SIGNS = ("max logit", "entropy", "gradient norm", "loss")


def signs(curve: Mapping[str, Any]) -> dict[str, int | None]:
    """Sign -> the first step that gave it, None for never.

    ``max logit``: above 100. ``entropy``: the normalised entropy of a layer under 0.05. ``gradient norm``: above 5
    times the median of the 50 steps before. ``loss``: 5 standard deviations above the mean of the 50 steps before, or
    no number.
    """
    steps = curve["measured"]
    return {
        "max logit": _first(steps, [above(logit, THRESHOLD) for logit in curve["max_logits"]]),
        "entropy": _first(steps, [least(layers) < COLLAPSED for layers in curve["entropies"]]),
        "gradient norm": _first_over(curve["gradient_norms"], lambda before: GRADIENT_FACTOR * median(before)),
        "loss": _first_over(curve["losses"], lambda before: fmean(before) + LOSS_DEVIATIONS * pstdev(before)),
    }


def above(value: float | None, limit: float) -> bool:
    """A value that is no number is above every limit."""
    return value is None or not value <= limit


def least(layers: Sequence[float | None]) -> float:
    """The least of the numbers among ``layers``; inf without any."""
    return min((value for value in layers if value is not None and not math.isnan(value)), default=math.inf)


def _first(steps: Sequence[int], true: Sequence[bool]) -> int | None:
    return next((step for step, holds in zip(steps, true, strict=True) if holds), None)


def _first_over(values: Sequence[float | None], limit: Any) -> int | None:
    """The first value, with ``WINDOW`` before it, that is above what they say, or is no number."""
    for place, value in enumerate(values):
        before = values[max(0, place - WINDOW) : place]
        if value is None or not math.isfinite(value):
            return place
        if len(before) == WINDOW and value > limit(before):
            return place
    return None
