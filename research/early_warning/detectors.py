"""The detectors that are held against one another. ``DETECTORS`` is the one list of them.

Each is a score for each step of a run, larger for more alarming: of the signals of a run [T] of what is known at each
measurement. NaN: nothing to say yet; inf: no number. Its limit is fitted elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attemper.lab.trained.summary import WINDOW
from attemper.readings.alarm_laws import FIRST, SPAN, Array, doubling_time, fall_from_baseline, median_of_three
from attemper.readings.alarms import KINDS
from research.early_warning.spacing import ATTENTION, SPACING

Signals = Mapping[str, npt.NDArray[np.float32]]


@dataclass(frozen=True)
class Detector:
    """One way to look at a training run."""

    name: str
    score: Callable[[Signals], Array]
    signal: str
    """The signal that it needs."""

    @property
    def spacing(self) -> int:
        """Steps between two measurements of its signal."""
        return SPACING.get(self.signal, ATTENTION)


def loss_deviations(signals: Signals) -> Array:
    """(loss_t - mean) / standard deviation, of the 50 steps before. It costs nothing: the loss is there."""
    before, now = _windows_before(signals["loss"])
    deviation = np.maximum(before.std(1), 1e-12)
    return _after_window(signals["loss"], (now - before.mean(1)) / deviation)


def gradient_norm(signals: Signals) -> Array:
    """|g_t| / median(|g| of the 50 steps before), of the whole gradient before clipping, which needs it anyway."""
    return _times_median(signals["gradient_norm"])


def update_norm(signals: Signals) -> Array:
    """|dw_t| / median(|dw| of the 50 steps before), of all weights. It costs a copy of them and a pass at each step."""
    return _times_median(signals["update_norm"])


def largest_logit(signals: Signals) -> Array:
    """The largest score q.k / sqrt(d) of all heads. It costs one maximum over the scores; a fused kernel leaves it at
    no cost.
    """
    return _heads(signals["max_logit"]).max(1)


LOGIT_FLOOR = KINDS["logit_growth"].floor or 0.0
"""Speed says nothing of smaller logits."""


def logit_growth(signals: Signals) -> Array:
    """Doublings a step of the fastest head above ``LOGIT_FLOOR``, within the last ``SPAN`` steps, by the law of the
    alarm of this name. Of medians of three.
    """
    values = _heads(signals["max_logit"])
    found = np.full(len(values), np.nan)
    smooth = median_of_three(values[2:], values[1:-1], values[:-2])
    for now in range(1, len(smooth)):
        marks = smooth[max(0, now - SPAN // ATTENTION) : now + 1]
        steps = np.broadcast_to(ATTENTION * np.arange(len(marks), dtype=np.float64)[:, None], marks.shape)
        fast = np.where(marks[-1] > LOGIT_FLOOR, 1 / doubling_time(steps, marks), 0.0)
        found[now + 2] = np.where(np.isinf(marks[-1]), np.inf, fast).max()
    return found


def logit_variance(signals: Signals) -> Array:
    """The largest standard deviation of the scores of a head (it orders runs as the variance does). Two sums over the
    scores.
    """
    return _heads(signals["score_std"]).max(1)


def entropy(signals: Signals) -> Array:
    """-min_h (H_h / log n), of all heads: one sum over the weights, as the next two."""
    return _least(signals["normalized_entropy"])


def entropy_fall(signals: Signals) -> Array:
    """-min_h of what is left of the head's baseline, the median of its first five readings, as in the alarm ``fallen``;
    NaN while the baseline is read.
    """
    values = signals["normalized_entropy"].astype(np.float64)
    found = _least(fall_from_baseline(values, np.median(values[:FIRST], 0)))
    found[:FIRST] = np.nan
    return found


def entropy_spread(signals: Signals) -> Array:
    """The standard deviation of H / log n between heads, of the layer where it is widest."""
    values = signals["normalized_entropy"].astype(np.float64)
    found = values.std(2).max(1)
    return np.where(np.isnan(found), np.inf, found)


def first_token_mass(signals: Signals) -> Array:
    """The largest share of its weight that a head puts on the first token: a mean over one column of the weights."""
    return _heads(signals["first_token_mass"]).max(1)


def disagreement(signals: Signals) -> Array:
    """The mean over a layer's heads of KL(p_h || mean of all heads) in nats, of the layer where it is largest.

    It costs a mixture and a second sum over the weights, and needs the weights themselves.
    """
    found = signals["disagreement"].astype(np.float64).mean(2).max(1)
    return np.where(np.isnan(found), np.inf, found)


def increment_entropy(signals: Signals) -> Array:
    """Spectral entropy of the change of each head's query-key matrix within 10 steps: the least mean of a layer,
    negated. NaN at the first step, where nothing has changed yet.

    A change in few directions is the sign. It needs the weights alone: two small QR and one SVD a head, and no data.

    Source: the signal of arXiv 2606.28116.
    """
    return -signals["increment_entropy"].astype(np.float64).mean(2).min(1)


def rank_loss(signals: Signals) -> Array:
    """-min over layers of (effective rank of what its attention adds / number of heads).

    It costs a Gram matrix of width x width and its eigenvalues.
    """
    return _least(signals["output_rank"] / max(1, signals["head_rank"].shape[2]))


def visible_keys(signals: Signals) -> Array:
    """By how many keys the mean count that a head's rows see has moved from its first reading; the largest of all.

    Where lengths are fixed, as here, no healthy step moves it: what rings is the mask. It costs one sum over the mask.
    """
    counts = _heads(signals["visible_keys"])
    return np.abs(counts - counts[:1]).max(1)


def _heads(values: npt.NDArray[np.float32]) -> Array:
    """[T, L, H] -> [T, L H], with inf in the place of what is no number."""
    flat = values.reshape(len(values), -1).astype(np.float64)
    return np.where(np.isnan(flat), np.inf, flat)


def _least(values: npt.NDArray[np.floating]) -> Array:
    """[T, ...] -> [T] the least, negated: the lower, the more alarming; inf where one is no number."""
    flat = values.reshape(len(values), -1).astype(np.float64)
    return -np.where(np.isnan(flat), -np.inf, flat).min(1)


def _windows_before(values: npt.NDArray[np.float32]) -> tuple[Array, Array]:
    """The ``WINDOW`` values before each step [T - WINDOW, WINDOW], and those steps' own values [T - WINDOW]."""
    if len(values) <= WINDOW:
        return np.empty((0, WINDOW)), np.empty(0)
    before = np.lib.stride_tricks.sliding_window_view(values.astype(np.float64), WINDOW)[:-1]
    return before, values[WINDOW:].astype(np.float64)


def _after_window(values: npt.NDArray[np.float32], scores: Array) -> Array:
    """Scores of the steps behind the first window, [T]: NaN before it, inf where the value is no number."""
    found = np.full(len(values), np.nan)
    found[WINDOW:] = scores
    return np.where(np.isfinite(values), found, np.inf)


def _times_median(values: npt.NDArray[np.float32]) -> Array:
    """[T] as multiples of the median of the ``WINDOW`` values before; NaN and inf as by :func:`_after_window`."""
    before, now = _windows_before(values)
    return _after_window(values, now / np.median(before, 1))


LOSS = Detector("loss z-score", loss_deviations, "loss")
GRADIENT_NORM = Detector("gradient norm", gradient_norm, "gradient_norm")
DETECTORS: dict[str, Detector] = {
    detector.name: detector
    for detector in (
        LOSS,
        GRADIENT_NORM,
        Detector("update norm", update_norm, "update_norm"),
        Detector("largest logit", largest_logit, "max_logit"),
        Detector("logit growth", logit_growth, "max_logit"),
        Detector("logit variance", logit_variance, "score_std"),
        Detector("entropy", entropy, "normalized_entropy"),
        Detector("entropy fall", entropy_fall, "normalized_entropy"),
        Detector("entropy spread", entropy_spread, "normalized_entropy"),
        Detector("first-token mass", first_token_mass, "first_token_mass"),
        Detector("disagreement", disagreement, "disagreement"),
        Detector("increment entropy", increment_entropy, "increment_entropy"),
        Detector("loss of rank", rank_loss, "output_rank"),
        Detector("visible keys", visible_keys, "visible_keys"),
    )
}
"""Name -> detector."""
