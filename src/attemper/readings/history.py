"""A statistic over training: its numbers by step, their mean, spread and trend. NumPy, without torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from attemper.readings.sample import SiteLabel
from attemper.text import count

MOST_BLOCKS = 200
"""A trend is taken from at most so many medians of neighbouring samples: 19,900 slopes a head."""
HEADS_AT_ONCE = 64
"""Heads whose slopes are sorted together: 5 MB of them."""
QUANTILE = 1.959964
"""Of the normal distribution, at 97.5%: for intervals of 95%."""
MOST_LIKENESS = 0.95
"""At most this correlation of neighbours is believed: with 1, nothing would follow from any number of samples."""

Array = np.ndarray


@dataclass(frozen=True, eq=False, repr=False)
class History:
    """The numbers of one statistic at the steps that were sampled; NaN where a sample has none. Or what the loop gave
    with each step, such as its loss.

    ``values`` is [steps] for one head and for what has no site, [steps, heads] for one site, and [steps, sites, heads]
    for several, where NaN stands for the heads that a site does not have.
    """

    statistic: str
    steps: Array
    """[steps] whole numbers, ascending."""
    values: Array
    """float32; of counts above 2^24 float64."""
    sites: tuple[SiteLabel, ...]
    """The sites of ``values``, in their order; one where a site was asked for; none of what the loop gave."""
    site: str | None = None
    """The name that was asked for; None for all sites."""
    head: int | None = None

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        steps = count(len(self), "step") + (f" from {self.steps[0]} to {self.steps[-1]}" if len(self) else "")
        of = f"site={self.site!r}" if self.site else count(len(self.sites), "site")
        place = f", {of}, head={self.head}" if self.sites else ""
        return f"History({self.statistic!r}{place}: {steps}, values {list(self.values.shape)})"


@dataclass(frozen=True, eq=False)
class Trend:
    """Change of a statistic per 1,000 steps, with the ends of its 95% interval; NaN where there are no two samples.

    Each is a number, [heads] or [sites, heads]. The ends are infinite where there are too few samples to tell.
    """

    slope: Any
    low: Any
    high: Any

    @property
    def certain(self) -> Any:
        """Whether the interval leaves out 0."""
        return (self.low > 0) | (self.high < 0)


def mean(values: Array) -> Array:
    """[samples, ...] -> [...] float64, the samples without a number left out; NaN where none has one."""
    known = ~np.isnan(values)
    many = known.sum(0)
    total = np.where(known, values, 0.0).sum(0, dtype=np.float64)
    return np.where(many > 0, total / np.maximum(many, 1), np.nan)


def std(values: Array) -> Array:
    """The standard deviation of [samples, ...] over samples, of the population, as ``mean``."""
    return np.sqrt(mean(np.square(values - mean(values))))


def trend(steps: Array, values: Array) -> Trend:
    r"""The slope of [samples, ...] over steps by Theil and Sen, per 1,000 steps, with a 95% interval.

    .. math:: \beta = \operatorname{median}_{i<j} \frac{y_j - y_i}{x_j - x_i}

    over the samples, or where there are more than ``MOST_BLOCKS``, over medians of neighbouring ones, of an odd number
    each. The slope follows wrong samples only from 29% on, whether they stand in a row or are spread at random; half of
    that can do if they are placed so that they have the majority in 29% of the medians. The interval is Sen's, between
    two ranks of the slopes. Where neighbours are alike, with a correlation r > 0 around the line, the variance behind
    it is :math:`(1 + r) / (1 - r)` times as large.

    Source:
        Sen 1968, "Estimates of the regression coefficient based on Kendall's tau"; for r, Hamed and Rao 1998.
    """
    middles, medians = block_medians(steps, values)
    shape = medians.shape[1:]
    medians = medians.reshape(len(medians), math.prod(shape))
    heads = range(0, medians.shape[1], HEADS_AT_ONCE)
    parts = [_sen(middles, medians[:, start : start + HEADS_AT_ONCE].T) for start in heads]
    if not parts:
        parts = [np.full((3, 0), np.nan)]
    slope, low, high = (1000.0 * number.reshape(shape) for number in np.concatenate(parts, 1))
    return Trend(slope, low, high)


def is_telling(found: Trend, span: float, room: float) -> bool:
    """Whether one head's trend says something: it speaks of no more steps than the ``span`` that was seen, and its
    interval holds no change beyond ``room``, the size of the statistic's range.
    """
    return span >= 1000 and max(abs(found.low), abs(found.high)) <= room and math.isfinite(found.high - found.low)


def block_means(steps: Array, values: Array, most: int) -> tuple[Array, Array]:
    """[blocks] the mean step of each block of neighbouring samples, and [blocks, ...] the mean of their numbers."""
    return _blocks(steps, values, max(1, -(-len(steps) // most)), mean)


def block_medians(steps: Array, values: Array) -> tuple[Array, Array]:
    """[blocks] the median step of each of at most ``MOST_BLOCKS`` blocks of an odd number of neighbouring samples, and
    [blocks, ...] the median of their numbers: of two numbers it would be no better than a mean.
    """
    return _blocks(steps, values, max(1, -(-len(steps) // MOST_BLOCKS)) | 1, _median)


def _blocks(steps: Array, values: Array, size: int, middle: Callable[[Array], Array]) -> tuple[Array, Array]:
    if size == 1:
        return steps.astype(np.float64), values.astype(np.float64)
    starts = range(0, len(steps), size)
    middles = np.array([middle(steps[start : start + size]) for start in starts])
    return middles, np.array([middle(values[start : start + size]) for start in starts])


def _median(values: Array) -> Array:
    """[samples, ...] -> [...] float64, the samples without a number left out; NaN where none has one."""
    ranked = np.sort(values, 0)  # NaN last
    many = np.maximum((~np.isnan(values)).sum(0), 1)
    low, high = (np.take_along_axis(ranked, rank[None], 0)[0] for rank in ((many - 1) // 2, many // 2))
    return (low.astype(np.float64) + high) / 2


def _sen(x: Array, y: Array) -> Array:
    """[3, heads]: median slope per step and both ends of its interval, of x [blocks] and y [heads, blocks]."""
    known = (~np.isnan(y)).sum(1)
    pairs = known * (known - 1) // 2
    slopes = np.sort(_slopes(x, y), axis=1)  # NaN last
    slope = (_at(slopes, (pairs - 1) // 2, pairs) + _at(slopes, pairs // 2, pairs)) / 2
    alike = np.clip(_likeness(y - slope[:, None] * (x - x.mean() if len(x) else x)), 0.0, MOST_LIKENESS)
    spread = known * (known - 1) * (2 * known + 5) / 18.0 * (1 + alike) / (1 - alike)
    half = QUANTILE * np.sqrt(spread)
    low = np.floor((pairs - half) / 2).astype(np.int64) - 1
    high = np.ceil((pairs + half) / 2).astype(np.int64)
    ends = (
        np.where(low >= 0, _at(slopes, low, pairs), -np.inf),
        np.where(high < pairs, _at(slopes, high, pairs), np.inf),
    )
    return np.stack([slope, *(np.where(pairs > 0, end, np.nan) for end in ends)])


def _slopes(x: Array, y: Array) -> Array:
    """[heads, pairs] float32, NaN where a block of the pair has no number."""
    blocks, heads = len(x), len(y)
    slopes, start = np.empty((heads, blocks * (blocks - 1) // 2), np.float32), 0
    for apart in range(1, blocks):
        there = slopes[:, start : start + blocks - apart]
        np.divide(y[:, apart:] - y[:, :-apart], x[apart:] - x[:-apart], out=there, casting="same_kind")
        start += blocks - apart
    return slopes


def _at(ranked: Array, rank: Array, many: Array) -> Array:
    """[heads]: of each row the number of that rank, of ``many`` that are known; NaN where there is none."""
    if not ranked.shape[1]:
        return np.full(len(ranked), np.nan)
    found = np.take_along_axis(ranked, np.clip(rank, 0, np.maximum(many - 1, 0))[:, None], 1)[:, 0]
    return np.where(many > 0, found, np.nan).astype(np.float64)


def _likeness(rest: Array) -> Array:
    """[heads]: correlation of each number of [heads, blocks] with the one after it; 0 where nothing varies."""
    centred = rest - mean(rest.T)[:, None]
    square = mean(np.square(centred).T)
    product = mean((centred[:, 1:] * centred[:, :-1]).T) if rest.shape[1] > 1 else np.zeros(len(rest))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.nan_to_num(product / square, nan=0.0, posinf=0.0, neginf=0.0)
