"""One site in two fingerprints: how far its stages are apart, relative to their size, and what rounding explains."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from attemper.fingerprints.site import GRAMS, ROUNDING, SiteFingerprint, scaled_products

TRIMMED = 0.15
"""Share of rows, the worst, that a level leaves out: routers of experts flip on a few tokens."""
_FINE = 2.0**-20
"""Up to this relative error they do not."""


@dataclass(eq=False)
class SitePair:
    """A site of two runs with the same rows. H heads, R rows, P places of vectors."""

    number: int
    a: SiteFingerprint
    b: SiteFingerprint
    order: tuple[int, ...] | None = None
    """Which heads of run b stand in place of its own; None: its own."""
    source: float = 0.0
    """How far apart rounding may bring what keys of cross attention are made of."""
    weights: float = 0.0
    """What rounding of weights adds to that of numbers."""

    @cached_property
    def rounding(self) -> tuple[float, float]:
        """The relative error of each run's precision."""
        return ROUNDING.get(self.a.dtype, 2.0**-8), ROUNDING.get(self.b.dtype, 2.0**-8)

    @cached_property
    def eps(self) -> float:
        """Of the lower precision of the two."""
        return max(self.weights, *self.rounding)

    @cached_property
    def places(self) -> np.ndarray:
        """[R]: the place of each row among the tokens of its sequence."""
        return self.a.rows[:, 1]

    @cached_property
    def vectors(self) -> bool:
        """Whether queries and keys were seen in both runs."""
        return self.a.head_dim == self.b.head_dim > 1 and not np.isnan(self.a.raw).all()

    def heads(self, marked: np.ndarray) -> tuple[int, ...] | None:
        """The numbers of the heads that are marked, [H] or of keys [G]; None for all that both runs keep."""
        if marked.all():
            return None
        return tuple(number for number, mark in zip(self.numbers(len(marked)), marked, strict=True) if mark)

    def numbers(self, count: int) -> tuple[int, ...]:
        """The numbers of so many heads: of queries, or of keys."""
        return self.a.numbers if count == len(self.a.query) else self.a.key_numbers

    @cached_property
    def query(self) -> tuple[np.ndarray, np.ndarray]:
        """[H, P, D] of both runs, float64."""
        return self.a.query.astype(np.float64), self.b.query.astype(np.float64)

    @cached_property
    def key(self) -> tuple[np.ndarray, np.ndarray]:
        """[G, P, D] of both runs in float64; of as many heads as there are queries where the two differ in G."""
        keys = self.a.key.astype(np.float64), self.b.key.astype(np.float64)
        if len(keys[0]) == len(keys[1]):
            return keys
        return tuple(np.repeat(key, len(self.a.query) // len(key), 0) for key in keys)  # type: ignore[return-value]

    @cached_property
    def residual(self) -> np.ndarray:
        """[R]: relative difference of what enters the block."""
        return self.states("residual")

    def states(self, name: str) -> np.ndarray:
        """[R]: relative difference of one of ``GRAMS``, less what ``stretch`` makes; by inner products, if these say
        that the residual stream was rotated.
        """
        turned = name == "residual" or self.rotation in ("rotated", "centred")
        return self._states(name, self.stretch, turned)

    def _states(self, name: str, stretch: float, turned: bool = True) -> np.ndarray:
        place, width = GRAMS.index(name), self.a.width or 1
        own = sketch_difference(stretch * getattr(self.a, name), getattr(self.b, name))
        if not turned:
            return own
        return _unless_rotated(own, stretch * self.a.grams[:, place], self.b.grams[:, place], width)

    @cached_property
    def stretch(self) -> float:
        """By what the residual stream of run b is longer, if what the block adds is, too; norms divide it again."""
        sizes = self.a.residual[:, 0], self.b.residual[:, 0]
        known = (sizes[0] > 0) & (sizes[1] > 0)
        if not known.any():
            return 1.0
        factor = float(np.median(sizes[1][known].astype(np.float64) / sizes[0][known]))
        levels = [[self.level(self._states(name, one)) for name in ("residual", "change")] for one in (1.0, factor)]
        return factor if all(after < ROTATED * before for before, after in zip(*levels, strict=True)) else 1.0

    @cached_property
    def rotation(self) -> str | None:
        """What was done to the residual stream of the one run: "rotated", "centred", "rescaled", or None."""
        level = self.level(sketch_difference(self.stretch * self.a.residual, self.b.residual))
        if self.level(self.residual) == level:
            return None if self.stretch == 1.0 else "rescaled"
        return "rotated" if level > _TURNED else "centred"

    @cached_property
    def input(self) -> np.ndarray:
        """[R]: relative difference of what enters the attention."""
        return sketch_difference(self.a.input, self.b.input)

    @cached_property
    def output(self) -> np.ndarray:
        """[H, R]: relative difference of head outputs."""
        return sketch_difference(self.a.output, self.b.output)

    @cached_property
    def query_level(self) -> np.ndarray:
        """[H]: relative difference of queries."""
        return vector_level(*self.query)

    @cached_property
    def key_level(self) -> np.ndarray:
        """[G]: relative difference of keys."""
        return vector_level(*self.key)

    @cached_property
    def raw_level(self) -> np.ndarray:
        """[H]: difference of q.k, relative to the larger |q| |k|, over all rows."""
        change = np.nan_to_num(self.b.raw.astype(np.float64) - self.a.raw)
        rows = np.sqrt((change**2).mean(-1))
        # Of float32, whose squares are of float64.
        return self.by_head(rows / np.maximum(np.maximum(*self.lengths), 1e-30))

    @cached_property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """[H, R] of both runs: |q| |k|, by the median of keys."""
        statistics = (site.statistics for site in (self.a, self.b))
        one, two = (part["q_norm"] * np.median(part["k_norm"], 1, keepdims=True) for part in statistics)
        return one, two

    @cached_property
    def score_level(self) -> np.ndarray:
        """[H]: difference of final scores in the pairs that both see, less the mean of each row: what moves weights."""
        return self._distance(self.a.final, self.b.final)

    @cached_property
    def product_level(self) -> np.ndarray:
        """[H]: the same of products q.k, in units of scores."""
        hidden = ~np.isfinite(self.a.final)
        middle = np.median(np.abs(self.a.statistics["multiplier"]), 1)
        return middle * self._distance(*(np.where(hidden, np.nan, site.raw) for site in (self.a, self.b)))

    @cached_property
    def score_size(self) -> np.ndarray:
        """[H]: what a relative error 1 of queries and keys would be in scores: median of m |q| |k|, the larger."""
        names = ("multiplier", "q_norm", "k_norm")
        parts = (np.prod([np.abs(site.statistics[name]) for name in names], 0) for site in (self.a, self.b))
        return np.maximum(*(np.median(part, 1).astype(np.float64) for part in parts))

    @cached_property
    def score_rounding(self) -> tuple[np.ndarray, np.ndarray]:
        """[H] of both runs: what rounding once changes the largest score of a row by. A number that all keys of a row
        share moves no weight, and is rounded with the rest.
        """
        sites = self.a, self.b
        scores = (scaled_products(site.raw, site.statistics["multiplier"], site.softcap) for site in sites)
        one, two = (self.by_head(np.fmax.reduce(np.abs(part), -1)) for part in scores)
        return self.rounding[0] * one, self.rounding[1] * two

    def _distance(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """[H]: difference of the numbers of rows [H, R, PAIRS] that both have, less the mean of each row."""
        both = np.isfinite(a) & np.isfinite(b)
        change = np.where(both, np.where(both, b, 0.0).astype(np.float64) - np.where(both, a, 0.0), 0.0)
        count = both.sum(-1, keepdims=True)
        change = np.where(both, change - change.sum(-1, keepdims=True) / np.maximum(count, 1), 0.0)
        rows = np.sqrt((change**2).sum(-1) / np.maximum(count[..., 0], 1))
        return self.by_head(rows)

    def by_head(self, rows: np.ndarray) -> np.ndarray:
        """[H]: the level of each head's rows [H, R]."""
        return np.array([self.level(row) for row in rows])

    def level(self, rows: np.ndarray) -> float:
        """``level_of_rows``; of all rows where both runs are in float32, in which no router changes its mind."""
        return level_of_rows(rows, TRIMMED if self.eps > _FINE else 0.0)

    @cached_property
    def identical(self) -> bool:
        """Whether every number is the same."""
        a, b = self.a, self.b
        names = ["raw", "final", "query", "key", "residual", "input", "output"]
        for name in ("attended", "change", "grams"):  # files of before version 3 do not have these
            if not any(np.isnan(getattr(site, name)).all() for site in (a, b)):
                names.append(name)
        same = all(np.array_equal(getattr(a, name), getattr(b, name), equal_nan=True) for name in names)
        return same and all(np.array_equal(a.counts[name], b.counts[name]) for name in a.counts)


ROTATED = 0.4
"""States were rotated if inner products say that they differ by so much less than they do as they are ..."""
_TURNED = 0.5
"""... and they do by more than this: states with much in common are nearly rotated by a fault, too."""
_CENTRED, _LESS = 0.02, 0.6
"""The mean of features of states was taken off if they differ by more than the first, and, less that mean, by at most
the second of what they do with it.
"""


def _unless_rotated(own: np.ndarray, a: np.ndarray, b: np.ndarray, width: int) -> np.ndarray:
    """[R]: the difference of states ``own``, or by their inner products [R, 2, 1 + ANCHORS] if these differ less.

    An error of each vector by itself shows in a product of two as sqrt(2 / width) of its relative size; those of two
    runs in other weights are sqrt(2) times as large. The one run may have lost the mean of features that LayerNorm
    takes off.
    """

    def difference(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        change = np.median(np.abs(one[:, 1:].astype(np.float64) - other[:, 1:]), -1) / 0.6745
        size = np.maximum(one[:, 0], other[:, 0])
        return change / np.where(size > 0, size, 1.0) * np.sqrt(width) / 2

    level, turned = level_of_rows(own), difference(a[:, 0], b[:, 0])
    if np.isnan(turned).all() or level <= _CENTRED:
        return own
    most = ROTATED * level if level > _TURNED else _LESS * min(level, level_of_rows(turned))
    found = [turned, difference(a[:, 1], b[:, 0]), difference(a[:, 0], b[:, 1])]
    return min((rows for rows in found if level_of_rows(rows) <= most), key=level_of_rows, default=own)


def sketch_difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Relative difference of the vectors of two sketches [..., 1 + PROJECTIONS]; NaN where one was not seen."""
    change = np.sqrt(((b[..., 1:].astype(np.float64) - a[..., 1:]) ** 2).mean(-1))
    size = np.maximum(a[..., 0], b[..., 0]).astype(np.float64)
    return np.where(size == 0, 0.0, change / np.where(size == 0, 1.0, size))


def vector_level(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[H]: relative difference of vectors [H, P, D], by the median of places."""
    change = np.linalg.norm(b - a, axis=-1)
    size = np.maximum(np.linalg.norm(a, axis=-1), np.linalg.norm(b, axis=-1))
    return np.median(np.where(size > 0, change / np.where(size > 0, size, 1.0), 0.0), 1)


def level_of_rows(rows: np.ndarray, trimmed: float = TRIMMED) -> float:
    """Root mean square of what is left without the worst rows; 0 where nothing was seen."""
    known = np.sort(rows[~np.isnan(rows)])
    if not len(known):
        return 0.0
    kept = known[: max(len(known) - int(np.ceil(trimmed * len(known))), 1)]
    return float(np.sqrt((kept**2).mean()))
