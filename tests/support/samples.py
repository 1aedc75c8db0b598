"""Samples as a watch would make them, with numbers that drift."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from attemper.readings.judge import Judge
from attemper.readings.reading import Alarm
from attemper.readings.sample import QUANTITIES, Sample, SiteLabel
from attemper.store.compaction import round_bits
from attemper.store.run import StoredRun

NAMES = ("entropy_nats", "normalized_entropy", "max_logit", "nonfinite_rows")


def sites(many: int = 2, heads: int = 3, mode: str = "train") -> tuple[SiteLabel, ...]:
    return tuple(
        SiteLabel(f"layers.{place}.attn", "self", mode, place, "full", "softmax", heads) for place in range(many)
    )


def values(step: int, many: int, *, names: Sequence[str] = NAMES, noise: float = 0.02, seed: int = 0) -> np.ndarray:
    """[quantities, heads] that change slowly, with noise of 2%; the same for the same step."""
    base = np.random.default_rng(seed).uniform(1.0, 5.0, (len(names), many))
    drawn = np.random.default_rng((seed, step)).standard_normal(base.shape)
    found = base * (1 + 0.1 * np.sin(step / 500 + base)) * (1 + noise * drawn)
    counts = [row for row, name in enumerate(names) if name.endswith("rows")]
    found[counts] = np.random.default_rng((seed, step, 1)).integers(0, 2**23, (len(counts), many))
    return found.astype(np.float32)


@lru_cache(4096)
def _few(step: int, many: int, names: tuple[str, ...]) -> np.ndarray:
    """``values`` that tests have together."""
    found = values(step, many, names=names)
    found.flags.writeable = False
    return found


def sample(step: int, labels: tuple[SiteLabel, ...] | None = None, names: tuple[str, ...] = NAMES) -> Sample:
    labels = sites() if labels is None else labels
    heads = sum(label.heads for label in labels)
    drawn = _few(step, heads, names) if heads <= 64 else values(step, heads, names=names)
    return Sample(step, 1000.0 + step, labels, names, drawn, tokens=64)


def samples(many: int, every: int = 1, labels: tuple[SiteLabel, ...] | None = None) -> Iterator[Sample]:
    return (sample(step * every, labels) for step in range(many))


def samples_of(run: StoredRun, names: Container[str] = QUANTITIES) -> Iterator[Sample]:
    """What a run holds, one by one."""
    for block in run.ranks.blocks(run.ranks.moments, names):
        yield from block.each()


def judge(samples: Iterable[Sample], limits: Any = None, fewest_keys: int = 32) -> tuple[Alarm, ...]:
    """All alarms of samples, which are judged one by one."""
    one = Judge(limits, fewest_keys)
    for sample in samples:
        one.feed(sample)
    return one.alarms


def assert_same(found: Iterable[Sample], taken: Sequence[Sample], bits: int | None = 15) -> None:
    """Whether samples came back with so many bits, and all bits of counts."""
    for one, expected in zip(found, taken, strict=True):
        for name in ("step", "time", "tokens", "sites", "quantities"):
            assert getattr(one, name) == getattr(expected, name), name
        for name, kept, row in zip(one.quantities, one.values, expected.values, strict=True):
            assert np.array_equal(kept, round_bits(row, None if name.endswith("rows") else bits), equal_nan=True), name
