"""The same function in other weights: what a block gives agrees, though what stands inside it does not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from attemper.fingerprints import floor
from attemper.fingerprints.finding import Finding
from attemper.fingerprints.pair import SitePair, sketch_difference

CANCELLED = {"attended": 0.5, "change": 0.25}
"""What the attending module, or a block, gives agrees if it differs by at most so much of what the difference inside
would make it. A block's MLP and its stream make that less.
"""
EPSILON = 1e-3
"""What the epsilon of norms may change in a longer stream to be no other function."""
NOTHING = 1e-5
"""A difference is none if it is so little of that inside: larger weights that cancel each other round more."""
MATCHED = 0.5
"""Heads are the same in another order if so little of their difference is left in it."""
ALIKE = 0.02
"""Norms, and channels by a factor each, are the same if so little of them differs, rounding aside."""


def agrees(pair: SitePair) -> bool:
    """Whether what the attending module gives, or its block adds, is the same in spite of other head outputs."""
    apart = _head_level(pair)
    return follows(pair, apart) or any(level < NOTHING * apart for level in _levels(pair).values())


def follows(pair: SitePair, inside: float = np.inf) -> bool:
    """Whether one of the two is the same, rounding aside; and less than what a difference ``inside`` makes of it."""
    levels = _levels(pair).items()
    return any(lv < CANCELLED[name] * inside and floor.times(lv, floor.states(pair, name)) <= 1 for name, lv in levels)


def is_known(pair: SitePair) -> bool:
    """Whether it can be told; files of before version 3 do not."""
    return bool(_levels(pair))


def _levels(pair: SitePair) -> dict[str, float]:
    levels = {name: pair.states(name) for name in ("attended", "change")}
    return {name: pair.level(rows) for name, rows in levels.items() if not np.isnan(rows).all()}


def _head_level(pair: SitePair) -> float:
    """How far head outputs are apart, all together; 1 where they were not seen."""
    if np.isnan(pair.output).all():
        return 1.0
    size = np.nan_to_num(np.median(pair.a.output[..., 0], 1)) ** 2
    return float(np.sqrt((size * pair.by_head(pair.output) ** 2).sum() / max(size.sum(), 1e-300)))


def in_order(pair: SitePair) -> SitePair:
    """The site with the heads of run b in the order of run a, if their scores say so, and the columns of the output
    projection follow them.
    """
    a, b = (np.where(np.isfinite(site.final), site.final, 0.0).astype(np.float64) for site in (pair.a, pair.b))
    a, b = (part - part.mean(-1, keepdims=True) for part in (a, b))
    cost = np.array([((b - head) ** 2).sum((1, 2)) for head in a])
    order, least = cost.argmin(1), cost.min(1)
    moved, most = order != np.arange(len(order)), np.minimum((a**2).sum((1, 2)), cost.diagonal())
    if not moved.any() or len({*order.tolist()}) != len(order) or (least > MATCHED * most)[moved].any():
        return pair
    if not any(level < CANCELLED[name] * _head_level(pair) for name, level in _levels(pair).items()):
        return pair
    turned = pair.b.of_heads(order, np.repeat(pair.b.key, len(order) // len(pair.b.key), 0)[order])
    return SitePair(pair.number, pair.a, turned, tuple(order.tolist()))


def of_input(pair: SitePair) -> tuple[str, str]:
    """The transform behind another input of the attention, and what is said of it."""
    level = pair.level(pair.input)
    words = f"what enters the attention differs by {level:.2g} of its size, and projections take it back"
    constant = [np.ptp(site.input[:, 0]) < 1e-2 * site.input[:, 0].max() for site in (pair.a, pair.b)]
    return "folded" if constant[0] != constant[1] else "rescaled", words


def of_vectors(pair: SitePair) -> str:
    """The transform that makes other queries and keys of which the same scores come; "equivalent" for none known."""
    both = [pair.query, pair.key]
    norms = [[np.linalg.norm(part, axis=-1) for part in vectors] for vectors in both]
    if all(_is_alike(pair, *one) for one in norms):
        return "rotated"
    factors = [(a * b).sum(1) / np.maximum((a * a).sum(1), 1e-300) for a, b in both]
    if all(_is_alike(pair, a * factor[:, None], b) for (a, b), factor in zip(both, factors, strict=True)):
        return "rescaled"
    shifts = [b - a for a, b in both]
    still = [_is_alike(pair, b - change.mean(1, keepdims=True), a) for (a, b), change in zip(both, shifts, strict=True)]
    return "shifted" if all(still) else "equivalent"


def of_outputs(pair: SitePair) -> str:
    """The transform that makes other head outputs of which the block makes the same."""
    return "rotated" if _is_alike(pair, pair.a.output[..., 0], pair.b.output[..., 0]) else "rescaled"


def _is_alike(pair: SitePair, a: np.ndarray, b: np.ndarray) -> bool:
    size = np.sqrt((b.astype(np.float64) ** 2).sum())
    return bool(np.sqrt(((b - a.astype(np.float64)) ** 2).sum()) <= (ALIKE + 4 * floor.vectors(pair)) * size)


def with_rounding(pair: SitePair) -> SitePair:
    """The site with what rounding of weights explains, if they stand on different grids in the two runs."""
    errors = (pair.a.weight_error or 0.0, pair.b.weight_error or 0.0)
    more = max(errors) if pair.a.weight_bits != pair.b.weight_bits else 0.0
    return replace(pair, weights=max(pair.weights, more))


def with_epsilon(pairs: list[SitePair]) -> list[SitePair]:
    """The sites with what the epsilon of norms explains, if the residual stream of one run is longer."""
    level = pairs[0].level(pairs[0].input)
    small = pairs[0].stretch != 1.0 and level <= EPSILON
    return [replace(pair, weights=level) for pair in pairs] if small else pairs


def is_longer(pair: SitePair) -> bool:
    """Whether what enters the attention differs by its length alone, rounding aside."""
    a, b = pair.a.input.astype(np.float64), pair.b.input.astype(np.float64)
    length = b[:, :1] / np.maximum(a[:, :1], 1e-300)
    return pair.level(sketch_difference(a * length, b)) <= ALIKE * pair.level(pair.input) + floor.entering(pair)


def of_rounding(pair: SitePair) -> Finding:
    """What is said of weights on different grids."""
    run, site = max(("a", pair.a), ("b", pair.b), key=lambda one: one[1].weight_error or 0.0)
    words = f"weights of run {run} are rounded to {site.weight_bits} bits"
    return Finding("rounded", "q and k", 0.0, float(site.weight_bits or 0), message=words)
