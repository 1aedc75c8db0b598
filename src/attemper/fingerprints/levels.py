"""How far two runs are apart, site after site and stage after stage, beside what rounding explains."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attemper.fingerprints import finite, floor
from attemper.fingerprints.pair import SitePair


@dataclass(frozen=True)
class SiteLevels:
    """A site of two runs.

    Attributes:
        site: its name in run a.
        times: stage -> how many times the difference is the largest that rounding explains; None where it was not
            seen, or is not finite. Visible keys, which do not round, are not among them.
        rows_apart: rows that see other keys.
        rows: how many rows both keep.
    """

    site: str
    times: dict[str, float | None]
    rows_apart: int
    rows: int


STAGES = ("residual", "input", "q and k", "final score", "head output", "attention output")
"""Stages that round."""


def levels(pairs: list[SitePair]) -> tuple[SiteLevels, ...]:
    """Every site of two runs, in the order in which they ran."""
    found, before = [], floor.Before()
    for pair in pairs:
        floor.enter(pair, before)
        with np.errstate(invalid="ignore", over="ignore"):  # stages that are not finite have no level
            found.append(_of(pair, floor.residual(before, pair.eps)))
            before = floor.after(pair, before)
        found[-1].times.update(dict.fromkeys(one.stage for one in finite.every(pair, pairs)))
    return tuple(found)


def _of(pair: SitePair, before: float) -> SiteLevels:
    times: dict[str, float | None] = {
        "residual": _times(pair, pair.residual, before),
        "input": _times(pair, pair.input, floor.entering(pair)),
        "q and k": None,
        "final score": None,
        "head output": None,
        "attention output": _times(pair, pair.states("attended"), floor.states(pair, "attended")),
    }
    if pair.vectors:
        vector, product = floor.vectors(pair), floor.products(pair)
        of_levels = ((pair.query_level, vector), (pair.key_level, vector), (pair.raw_level, product))
        times["q and k"] = max(float(floor.times(level, own).max()) for level, own in of_levels)
        relative = pair.score_level / np.maximum(pair.score_size, 1e-300)
        times["final score"] = float(floor.times(relative, product).max())
    if not np.isnan(pair.output).all():
        times["head output"] = float(floor.times(pair.by_head(pair.output), floor.outputs(pair)).max())
    names = ("visible_keys", "first_visible", "last_visible")
    apart = np.any([pair.a.counts[name] != pair.b.counts[name] for name in names], axis=0)
    return SiteLevels(pair.a.name, times, int(apart.any(0).sum()), apart.shape[1])


def _times(pair: SitePair, rows: np.ndarray, expected: float) -> float | None:
    return None if np.isnan(rows).all() else float(floor.times(pair.level(rows), expected))
