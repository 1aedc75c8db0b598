"""Runs on disk, as processes write them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from attemper.readings.sample import Sample
from attemper.store.fragment import Fragment


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
