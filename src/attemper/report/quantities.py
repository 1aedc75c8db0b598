"""The numbers of a head that the page can colour by: their names, units, ranges and what they mean."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Quantity:
    """One number of ``HeadReading`` and how to show it."""

    key: str
    title: str
    unit: str
    """Empty where there is none."""
    meaning: str
    low: float | None = None
    """Least value that the colours stand for; None: the least found."""
    high: float | None = None
    logarithmic: bool = False
    superlative: str = "largest"
    """What the first in the ranking is: ``7th sharpest of 72``."""
    ascending: bool = False
    """Whether the first in the ranking is the smallest."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


QUANTITIES = (
    Quantity(
        "normalized_entropy", "Normalised entropy", "of log n",
        "Entropy divided by the entropy of equal weights: 0 is one-hot, 1 is uniform.",
        0.0, 1.0, superlative="sharpest", ascending=True,
    ),
    Quantity(
        "entropy_nats", "Entropy", "nats",
        "How spread the weights are: 0 when one key takes all, log n when n keys share equally.",
        0.0, superlative="lowest", ascending=True,
    ),
    Quantity(
        "effective_tokens", "Effective tokens", "tokens",
        "exp(entropy): as many keys with equal weight would be as spread.",
        1.0, logarithmic=True, superlative="fewest", ascending=True,
    ),
    Quantity(
        "max_weight", "Largest weight", "of the weight", "Weight of the key that gets most, mean over rows.", 0.0, 1.0,
    ),
    Quantity("max_logit", "Largest logit", "", "The largest score before softmax, over all rows."),
    Quantity(
        "logit_std", "Logit spread under the weights", "",
        "sqrt of the mean variance of the scores, each counted by its weight: 0 where one key takes all, however far "
        "the other scores are.", 0.0,
    ),
    Quantity(
        "mass", "Mass", "",
        "Sum of the weights: below 1 where a sink takes a part, above 1 only without normalisation.", 0.0, 1.0,
    ),
    Quantity(
        "first_token_mass", "First-token weight", "of the weight", "Weight on the first key: near 1 is a sink.",
        0.0, 1.0,
    ),
    Quantity(
        "support_size", "Support", "keys",
        "Keys whose weight is not 0, mean over rows: sparse normalizers leave keys out, softmax none.",
        1.0, logarithmic=True, superlative="fewest", ascending=True,
    ),
    Quantity(
        "mean_distance", "Mean distance", "positions",
        "How far away the keys are that get the weight, mean under the weights: near 0 is local.", 0.0,
    ),
    Quantity("gini", "Gini coefficient", "", "Inequality of the weights: 0 is uniform, 1 is one-hot.", 0.0, 1.0),
    Quantity(
        "entropy_with_sink_nats", "Entropy with the sink", "nats",
        "Entropy of the weights where the learned sink counts as one more key.",
        0.0, superlative="lowest", ascending=True,
    ),
    Quantity(
        "score_variance", "Score variance", "logit^2",
        "Variance of the visible scores, mean over rows: every key counts alike, whatever its weight.", 0.0,
    ),
)  # fmt: skip


def of_sample(quantity: Quantity) -> Quantity:
    """The quantity where only a sample of the rows was measured: their largest score bounds that of all from below."""
    if quantity.key != "max_logit":
        return quantity
    meaning = (
        "The largest score before softmax over the rows that were measured; that of all rows is at least as large."
    )
    return replace(quantity, title="Largest logit, at least", meaning=meaning)
