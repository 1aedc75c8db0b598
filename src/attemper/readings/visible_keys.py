"""How many keys too many, or too few, rows see: by what is declared, else by earlier samples of like lengths."""

from __future__ import annotations

import numpy as np

from attemper.readings.alarm_laws import Array
from attemper.readings.sample import SURPLUS, Sample, SiteKey

LIKE = 5
"""Samples of like lengths that a site needs before one more is judged by them."""
MOST_LENGTHS = 64
"""Lengths that are remembered of a site: the latest."""


class Surplus:
    """Takes the samples of a run in their order, and remembers what rows saw at which lengths.

    Where keys are expected, the surplus is exact and has a sign. Else a head that sees at most h keys and at least l in
    ``LIKE`` or more samples of as many queries and keys may see up to h + (h - l): padding and packing vary. What it
    sees beyond that is a surplus over h. Fewer keys are none, as they may be padding that nobody declares.
    """

    def __init__(self) -> None:
        self._seen: dict[SiteKey, dict[tuple[float, float], list[Array]]] = {}
        """Site -> lengths -> how many samples, [H] least and [H] most visible keys."""
        self._step: int | None = None
        self._found: list[tuple[SiteKey, tuple[float, float], Array]] = []
        """What the sample of that step adds: it may be measured again."""

    def with_surplus(self, sample: Sample) -> Sample:
        """The sample with the quantity ``SURPLUS``, NaN where it cannot be told."""
        if sample.step != self._step:
            for found in self._found:
                self._keep(*found)
        self._step, self._found = sample.step, []
        visible, expected = (sample.of(name).astype(np.float64) for name in ("visible_keys", "expected_keys"))
        surplus = visible - expected
        lengths = sample.of("queries"), sample.of("keys")
        for key, heads in sample.places.items():
            if np.isnan(surplus[heads]).any() and not np.isnan(visible[heads]).any():
                at = float(lengths[0][heads.start]), float(lengths[1][heads.start])
                surplus[heads] = self._of_site(key, at, visible[heads])
        return sample.plus((SURPLUS,), surplus[None])

    def _of_site(self, key: SiteKey, lengths: tuple[float, float], visible: Array) -> Array:
        many, least, most = self._seen.get(key, {}).get(lengths, (np.zeros(()), visible, visible))
        known = many >= LIKE and least.shape == visible.shape
        beyond = visible > most + (most - least) if known else np.zeros(len(visible), bool)
        if not beyond.any():
            self._found.append((key, lengths, visible))
        return np.where(beyond, visible - most, 0.0 if known else np.nan)

    def _keep(self, key: SiteKey, lengths: tuple[float, float], visible: Array) -> None:
        seen = self._seen.setdefault(key, {})
        many, least, most = seen.pop(lengths, (np.zeros(()), visible, visible))
        if least.shape != visible.shape:
            many, least, most = np.zeros(()), visible, visible
        seen[lengths] = [many + 1, np.minimum(least, visible), np.maximum(most, visible)]
        if len(seen) > MOST_LENGTHS:
            del seen[next(iter(seen))]
