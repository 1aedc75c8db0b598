"""What a cause finds in a site, what is said of it, and how near run b comes to what it predicts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attemper.fingerprints import floor
from attemper.fingerprints.pair import SitePair
from attemper.fingerprints.site import MARGIN

ACCEPTED = 0.25
"""A cause explains a difference only if it leaves at most so much of its square."""


@dataclass(frozen=True)
class Finding:
    """One cause that explains how a site differs."""

    kind: str
    stage: str
    residual: float
    """What is left of the squared difference, 0 to 1."""
    value: float | None = None
    """Its number, of run b where the two have one each."""
    heads: tuple[int, ...] | None = None
    """Where it is seen; None for all heads."""
    message: str = ""
    """How the runs differ, as the end of a sentence."""
    before: float | None = None
    """The number of run a, where it has one."""
    own: bool = False
    """Whether each run shows it by itself, so that what differs before it is without effect on it."""
    reproduced: bool = True
    """Whether it makes run b of run a, up to rounding."""
    advice: str = ""
    """What to do, if it is not what its kind says."""
    parts: tuple[str, ...] = ()
    """Which of queries and keys differ, where that is all that is known of them."""

    @property
    def left(self) -> str:
        """What it leaves as a cause that is not the first, and why it was rejected if it was."""
        words = f"it leaves {self.residual:.0%} of the squared difference"
        if not self.reproduced:
            return f"tried and rejected: {words}, and more than {REPRODUCED:g} times what rounding explains"
        return words if self.residual <= ACCEPTED else f"tried and rejected: {words}, more than {ACCEPTED:.0%}"


def in_words(heads: tuple[int, ...] | None) -> str:
    """ "head 3", "heads 1, 2", or nothing for all."""
    if heads is None:
        return ""
    listed = f"{', '.join(map(str, heads[:8]))}{', ...' if len(heads) > 8 else ''}"
    return f"{'head' if len(heads) == 1 else 'heads'} {listed}: "


def short(value: float) -> str:
    """A number as it stands in a message."""
    return f"{value:.5g}"


REPRODUCED = 2.0
"""A cause reproduces a run if it leaves at most so many times the largest difference that rounding explains."""


def finding_of(
    pair: SitePair,
    kind: str,
    query: np.ndarray,
    key: np.ndarray,
    words: str,
    *,
    value: float | None = None,
    heads: tuple[int, ...] | None = None,
    fitted: float = 1.0,
) -> Finding:
    """A cause by the queries [H, P, D] and keys [G, P, D] that run b must have if it is right.

    What it leaves is of heads that are beyond rounding: the share of their squared difference, or of run a or b itself,
    whichever is least. What is much smaller than its twin is not explained by a factor of 0. ``fitted``: by how much
    what is left must be raised for the numbers that were fitted to it.
    """
    limit = MARGIN * floor.vectors(pair)
    left = total = worst = 0.0
    for expected, (a, b), level in ((query, pair.query, pair.query_level), (key, pair.key, pair.key_level)):
        apart = np.linalg.norm(b - expected, axis=-1)
        size = np.minimum(np.linalg.norm(b, axis=-1), np.linalg.norm(expected, axis=-1))
        relative = apart / np.maximum(np.maximum(size, 1e-9 * apart), 1e-300)
        worst = max(worst, *map(pair.level, relative))
        left += fitted * float((apart[level > limit] ** 2).sum())
        total += min(float((part[level > limit] ** 2).sum()) for part in (b - a, a, b))
    residual, reproduced = left / total if total else 1.0, worst <= REPRODUCED * limit
    return Finding(kind, "q and k", residual, value, heads, words, reproduced=reproduced)


def slope(aa: np.ndarray, ab: np.ndarray, bb: np.ndarray, pair: SitePair) -> np.ndarray:
    """The factor from numbers of run a to those of run b, by their sums of squares and products. Each run's rounding
    counts, so that the other way round the factor is the inverse.
    """
    ratio = (pair.rounding[1] / pair.rounding[0]) ** 2
    size = np.sqrt(np.maximum(aa * bb, 1e-300))
    r = ab / size
    steep = (1 - ratio + np.sqrt((1 - ratio) ** 2 + 4 * ratio * r**2)) / np.where(r == 0, np.inf, 2 * r)
    return steep * np.sqrt(bb / np.maximum(aa, 1e-300))
