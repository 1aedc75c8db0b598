"""Runs on disk, as processes write them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from attemper.readings.sample import Sample
from attemper.store.fragment import Fragment
from tests.support.samples import sites


def written(folder: Path, taken: Iterable[Sample], *, rank: int = 0, **options: object) -> list[Sample]:
    """Writes samples as one process does; what it wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    fragment = Fragment(folder / f"fragment-{rank}.sqlite", rank=rank, **options)  # type: ignore[arg-type]
    kept = []
    for one in taken:
        fragment.append(one)
        fragment.fold()
        kept.append(one)
    fragment.close()
    return kept


def collapsing(many: int, *, falls: int = 200) -> Iterator[Sample]:
    """Two layers of three heads; from step ``falls`` on the second one collapses in 20 steps. Of the first one, the
    logits of a head are large from step 100 to 150.
    """
    labels = sites(2, 3)
    names = ("normalized_entropy", "judged_normalized_entropy", "judged_first_token_mass", "max_logit", "logit_std")
    for step in range(many):
        noise = 1 + 0.01 * np.random.default_rng(step).standard_normal(6)
        entropy = 0.6 * noise
        entropy[3:] *= max(0.01, 1 - max(0, step - falls) / 20)
        logits = 12 * noise
        logits[0] = 120 if 100 <= step < 150 else logits[0]
        counts = np.full((2, 6), 512.0)
        rows = (entropy, entropy, 0.1 * noise, logits, noise, *counts, *np.zeros((2, 6)))
        quantities = (*names, "rows", "judged_rows", "empty_rows", "nonfinite_rows")
        yield Sample(step, 1000.0 + step, labels, quantities, np.array(rows, np.float32))
