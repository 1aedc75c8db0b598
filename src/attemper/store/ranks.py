"""The fragments of a run as one: what every rank wrote, by step and by site."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from attemper.readings.sample import Sample, SiteKey, SiteLabel
from attemper.store.series import FragmentReader, Lost, Segment, between

Array = np.ndarray


class Ranks:
    """Fragments in the order of their ranks. Where several have a site at a step, the first one counts."""

    def __init__(self, readers: Sequence[FragmentReader]) -> None:
        self.readers = tuple(readers)

    def close(self) -> None:
        for reader in self.readers:
            reader.close()

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Answers to all questions within belong together, whatever the writers do meanwhile."""
        with ExitStack() as open_snapshots:
            for reader in self.readers:
                open_snapshots.enter_context(reader.snapshot())
            yield

    @property
    def about(self) -> dict[str, Any]:
        """What the first rank tells of the run, and of what it does not tell the next one."""
        return {name: value for reader in reversed(self.readers) for name, value in reader.about.items()}

    @property
    def sites(self) -> dict[SiteKey, SiteLabel]:
        found: dict[SiteKey, SiteLabel] = {}
        for reader in self.readers:
            found |= {key: label for key, label in reader.sites.items() if key not in found}
        return found

    @property
    def shared_sites(self) -> list[SiteKey]:
        """Sites that more than one rank has written."""
        ranks = Counter(key for reader in self.readers for key in reader.sites)
        return [key for key, many in ranks.items() if many > 1]

    @property
    def statistics(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for reader in self.readers for name in reader.statistics))

    @property
    def segments(self) -> list[Segment]:
        return [segment for reader in self.readers for segment in reader.segments]

    @property
    def coverage(self) -> dict[SiteKey, str | None]:
        """Every site that was expected -> None where any rank reads it, else the reason of the first that does not."""
        found: dict[SiteKey, str | None] = {}
        for reader in self.readers:
            for key, reason in reader.coverage.items():
                first = found.get(key, reason)
                found[key] = None if reason is None else first
        return found

    @property
    def lost(self) -> list[Lost]:
        return [lost for reader in self.readers for lost in reader.lost]

    def moments(self, start: int | None = None, stop: int | None = None) -> Array:
        """[steps] of ``MOMENT``, of the first rank that has each step."""
        found = [between(reader.moments, start, stop) for reader in self.readers]
        if len(found) == 1:
            return found[0]
        joined = np.concatenate(found)
        return joined[np.unique(joined["step"], return_index=True)[1]]

    def values(self, statistic: str, keys: Sequence[SiteKey], steps: Array) -> Iterator[Array]:
        """Of each site [steps, heads] float32, NaN where no rank has a number. ``steps`` ascend."""
        if len(self.readers) == 1:
            reader = self.readers[0]
            yield from reader.values(statistic, keys, _of_steps(reader, steps))
            return
        for key in keys:
            yield self._join(statistic, key, steps)

    def _join(self, statistic: str, key: SiteKey, steps: Array) -> Array:
        heads = max((reader.sites[key].heads for reader in self.readers if key in reader.sites), default=0)
        found = np.full((len(steps), heads), np.nan, np.float32)
        missing = np.ones(len(steps), bool)
        for reader in self.readers:
            moments = _of_steps(reader, steps[missing])
            if key in reader.sites and len(moments):
                (values,) = reader.values(statistic, [key], moments)
                found[np.isin(steps, moments["step"]), : values.shape[1]] = values
                missing = np.isnan(found).all(1)
        return found

    def sample(self, step: int) -> Sample:
        """Every number of one step, which was sampled."""
        samples = [
            reader.sample(moments) for reader in self.readers if len(moments := between(reader.moments, step, step + 1))
        ]
        return samples[0] if len(samples) == 1 else _join_samples(samples)


def _of_steps(reader: FragmentReader, steps: Array) -> Array:
    moments = reader.moments
    if len(steps) == len(moments) and np.array_equal(moments["step"], steps):
        return moments
    return moments[np.isin(moments["step"], steps)]


def _join_samples(samples: Sequence[Sample]) -> Sample:
    """One sample of several ranks' samples of a step."""
    names = tuple(dict.fromkeys(name for sample in samples for name in sample.quantities))
    values, labels = [], {}
    for sample in samples:
        rows = [sample.of(name) for name in names]
        nothing = np.full(sample.values.shape[1], np.nan, np.float32)
        numbers = np.stack([nothing if row is None else row for row in rows])
        for label in sample.sites:
            if label.key not in labels:
                labels[label.key] = label
                values.append(numbers[:, sample.places[label.key]])
    first = samples[0]
    tokens = max(sample.tokens for sample in samples)
    return Sample(first.step, first.time, tuple(labels.values()), names, np.concatenate(values, 1), tokens)
