"""How far two runs are apart by rounding alone, stage after stage, in units of the lower precision's relative error.

Each stage adds a few roundings of its own to what the stage before it brings. The constants are fits to clean pairs:
bfloat16 beside float32, and two kernels in float32, of the models of ``benchmarks/faults_named.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from attemper.fingerprints.pair import SitePair, sketch_difference
from attemper.fingerprints.site import MARGIN, ROUNDING

EDGE = 0.7
"""From so many times what rounding explains on, a stage is near its edge."""
ADDED = 0.1
"""What sums over n features in float32 round by, of sqrt(n) roundings: kernels add up in other orders."""


@dataclass(frozen=True)
class Before:
    """How far two runs are apart when a block begins: at the first, not at all."""

    residual: float = 0.0
    output: float = 0.0
    """Of the head outputs of the block before."""
    most: float = 0.0
    """The largest of any block before, of which an encoder's is one."""


def enter(pair: SitePair, before: Before) -> None:
    """Takes note of what cross attention may read."""
    if pair.a.kind == "cross":
        pair.source = before.most


def after(pair: SitePair, before: Before) -> Before:
    """How far they are apart when the next block begins."""
    heads = float(pair.by_head(pair.output).mean())
    entered, gave = (
        max(pair.level(pair.residual), input_level(pair)),
        _unless_more(heads, float(outputs(pair).mean())),
    )
    return Before(entered, gave, max(before.most, math.hypot(entered, gave)))


def residual(before: Before, eps: float) -> float:
    """What enters a block: as the block before it."""
    return eps * math.hypot(before.residual / eps, before.output / eps, 2.0)


def entering(pair: SitePair) -> float:
    """What enters the attention: a norm of the block's input."""
    return pair.eps * math.hypot(pair.level(pair.residual) / pair.eps, 0.9)


def input_level(pair: SitePair) -> float:
    """What enters the attention, as far as rounding."""
    return _unless_more(pair.level(pair.input), entering(pair))


def _unless_more(level: float, expected: float) -> float:
    """A level; what is expected where it is more than rounding: a fault, or weights behind it take it back."""
    return expected if times(level, expected) > 1 else level


def vectors(pair: SitePair) -> float:
    """Queries and keys, by what enters the attention."""
    added = ADDED * math.sqrt(pair.a.width or 1) * ROUNDING["float32"]
    return 1.25 * pair.eps * math.hypot(max(input_level(pair), pair.source) / pair.eps, 1.1, added / pair.eps)


def products(pair: SitePair) -> float:
    """q.k relative to |q| |k|: errors of D features average out."""
    return 1.2 * math.sqrt(2 / pair.a.head_dim) * vectors(pair)


def outputs(pair: SitePair) -> np.ndarray:
    """[H]: head outputs, by what enters the attention, by how far scores are apart and by what kernels round."""
    entering = math.hypot(max(input_level(pair), pair.source) / pair.eps, 2.0)
    return pair.eps * np.hypot(entering, np.hypot(0.7 * pair.score_level, kernels(pair)) / pair.eps)


def kernels(pair: SitePair) -> np.ndarray:
    """[H]: how far the outputs of both runs are from those of their own queries, keys and values, as far as rounding of
    their scores takes them; 0 where that was not seen.
    """
    apart = (pair.by_head(sketch_difference(site.output, site.recomputed)) for site in (pair.a, pair.b))
    return np.hypot(*map(np.minimum, apart, pair.score_rounding))


def states(pair: SitePair, name: str) -> float:
    """What the module that attends gives, or its block adds: as head outputs; the sum with what enters rounds, too."""
    sizes = [np.median(part[:, 0]) for part in (pair.a.residual, getattr(pair.a, name))]
    return math.hypot(float(outputs(pair).mean()), pair.eps * sizes[0] / sizes[1] if name == "change" else 0.0)


def times(level: float | np.ndarray, expected: float | np.ndarray) -> np.ndarray:
    """How many times a level is the largest that rounding explains."""
    return np.asarray(level) / (MARGIN * np.asarray(expected))
