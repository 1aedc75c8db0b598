"""Samples as a watch would make them, with numbers that drift."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from attemper.readings.sample import Sample, SiteLabel

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
