"""How far rounding, sampled rows and other texts alone may move a head: what two readings are compared by."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

from attemper.fingerprints.site import MARGIN, ROUNDING
from attemper.readings.reading import HeadReading, Reading, SiteReading
from attemper.statistics import SHOWN_BY_NAME, STATISTIC_OF

SCORES, LARGEST = 0.2, 2.5
"""Roundings of the lower precision, relative to the largest logit, by which means and the largest logit feel an error
of the scores in the first block. Fits to clean pairs, as the constants of ``fingerprints/floor.py``.
"""
CHANCE = 0.05
"""How often texts alone may take any head of a comparison beyond its floor."""
FEWEST_BATCHES = 4
"""A scan of fewer does not tell how batches differ."""

_MOVED: dict[str, Callable[[HeadReading], float]] = {
    "normalized_entropy": lambda head: (head.logit_std or 0.0) * _ratio(head.normalized_entropy, head.entropy_nats),
    "effective_tokens": lambda head: 2 * (head.effective_tokens or 0.0),
    "first_token_mass": lambda head: _of_weight(head.first_token_mass),
    "self_weight": lambda head: _of_weight(head.self_weight),
    "span_mass": lambda head: _of_weight(head.span_mass),
    "score_variance": lambda head: 2 * math.sqrt(head.score_variance or 0.0),
    **dict.fromkeys(("visible_keys", "expected_keys", "leaked_keys"), lambda head: 0.0),
}
"""By how much an error of 1 in every score moves a mean at most, to first order: dH = -sum p (log p + H) dz, of which
the size is at most that of dz times the spread of logits; dp = p (dz - sum p dz), at most 2 p (1 - p) of it.
"""


def _ratio(one: float | None, other: float | None) -> float:
    return (one or 0.0) / other if other else 0.0


def _of_weight(share: float | None) -> float:
    return 2 * (share or 0.0) * (1 - (share or 0.0))


@dataclass(frozen=True)
class Floor:
    """What two readings say of how far their heads may differ without a cause in the model."""

    before: Reading
    after: Reading
    judged: int
    """Numbers that are judged at once."""

    @cached_property
    def rounding(self) -> float | None:
        """Relative error of the lower precision of the two; None where one is not known."""
        names = [name for side in (self.before, self.after) for name in (side.dtype or "?").split(", ")]
        return max(ROUNDING[name] for name in names) if all(name in ROUNDING for name in names) else None

    @cached_property
    def texts(self) -> str:
        """ "same", "other" or "unknown", by the digests of token ids, and by how many there are."""
        one, two = self.before.text_digest, self.after.text_digest
        if one is None or two is None:
            return "other" if self.before.tokens != self.after.tokens else "unknown"
        return "same" if one == two else "other"

    def limits(
        self, place: int, site: SiteReading, before: HeadReading, after: HeadReading, names: tuple[str, ...]
    ) -> dict[str, float | None]:
        """The largest difference of each statistic that has no cause in the model; None where that is not known."""
        return {name: self._limit(name, site, place, before, after) for name in names}

    def _limit(self, name: str, site: SiteReading, place: int, before: HeadReading, after: HeadReading) -> float | None:
        if name not in SHOWN_BY_NAME and (getattr(before, name) is None) != (getattr(after, name) is None):
            return 0.0  # a number came or went
        expected = [self._rounding_of(name, site, place, head) for head in (before, after)]
        errors = self._errors(name, before, after)
        if None in expected or errors is None:
            return None
        return MARGIN * max(one for one in expected if one is not None) + errors

    def _rounding_of(self, name: str, site: SiteReading, place: int, head: HeadReading) -> float | None:
        """As far as rounding is expected to move it. Scores are off by what all blocks before them add, too."""
        value, largest, rounding = getattr(head, name), head.max_logit, self.rounding
        if rounding is None or value is None or largest is None:
            return None
        if site.normalizer != "softmax" or not (name in _MOVED or name == "max_logit"):
            return None
        scores = rounding * abs(largest) * math.sqrt(1 + (place if site.layer is None else site.layer))
        moved = LARGEST * scores if name == "max_logit" else SCORES * scores * _MOVED[name](head)
        return moved + 4 * ROUNDING["float32"] * max(1.0, abs(value))  # the numbers themselves are of float32

    def _errors(self, name: str, before: HeadReading, after: HeadReading) -> float | None:
        """What sampled rows, and other texts, may move it by."""
        one, two = (self._error(side, name, head) for side, head in ((self.before, before), (self.after, after)))
        if one is None or two is None:
            return None
        (first, free), (second, other) = one, two
        size = first**2 + second**2
        if not size:
            return 0.0
        return _quantile(CHANCE / self.judged, size**2 / (first**4 / free + second**4 / other)) * math.sqrt(size)

    def _error(self, side: Reading, name: str, head: HeadReading) -> tuple[float, float] | None:
        """The standard error of a mean, and its degrees of freedom; None where it is not known."""
        if side.sampled_rows is not None:
            return _of_rows(head) if name == "normalized_entropy" and self.texts != "other" else None
        if self.texts != "other":
            return 0.0, 1.0
        error = (head.standard_errors or {}).get(STATISTIC_OF[name])
        known = error is not None and (head.batches or 0) >= FEWEST_BATCHES
        return (error, (head.batches or 0) - 1.0) if known and error is not None else None


def _of_rows(head: HeadReading) -> tuple[float, float] | None:
    """Of normalised entropy over rows that were drawn, by its histogram."""
    counts = head.normalized_entropy_histogram
    rows = sum(counts)
    if rows < 2:
        return None
    middle = [(place + 0.5) / len(counts) for place in range(len(counts))]
    mean = sum(many * at for many, at in zip(counts, middle, strict=True)) / rows
    variance = sum(many * (at - mean) ** 2 for many, at in zip(counts, middle, strict=True)) / (rows - 1)
    return math.sqrt(variance / rows), rows - 1.0


def _quantile(chance: float, freedom: float) -> float:
    """How many standard errors a difference exceeds with this chance: both tails of Student's t, by Cornish, Fisher."""
    z = NormalDist().inv_cdf(1 - chance / 2)
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + sum(term / freedom ** (power + 1) for power, term in enumerate(terms))


def facts_of(side: Reading, name: str) -> Mapping[str, object]:
    """What a comparison says of one side."""
    known = ("dtype", "text", "text_digest", "date", "tokens", "sampled_rows")
    return {"name": name, **{one: getattr(side, one) for one in known}}
