"""How far two runs are apart by rounding alone, stage after stage, in units of the lower precision's relative error.

Each stage adds a few roundings of its own to what the stage before it brings. The constants are fits to clean pairs:
bfloat16 beside float32, and two kernels in float32, of the models of ``benchmarks/faults_named.py``.
"""

from __future__ import annotations

import math

import numpy as np

from attemper.fingerprints.pair import SitePair, level_of_rows

MARGIN = 2.0
"""A stage is beyond rounding if its level is so many times the expected one."""


def residual(before: float, output: float, eps: float) -> float:
    """What enters a block: as the block before it, whose head outputs were ``output`` apart."""
    return eps * math.hypot(before / eps, output / eps, 2.0)


def entering(pair: SitePair) -> float:
    """What enters the attention: a norm of the block's input."""
    return pair.eps * math.hypot(level_of_rows(pair.residual) / pair.eps, 0.9)


def vectors(pair: SitePair) -> float:
    """Queries and keys, by what enters the attention."""
    return 1.25 * pair.eps * math.hypot(level_of_rows(pair.input) / pair.eps, 1.1)


def products(pair: SitePair) -> float:
    """q.k relative to |q| |k|: errors of D features average out."""
    return 1.2 * math.sqrt(2 / pair.a.head_dim) * vectors(pair)


def outputs(pair: SitePair) -> np.ndarray:
    """[H]: head outputs, by what enters the attention and by how far scores are apart."""
    entering = math.hypot(level_of_rows(pair.input) / pair.eps, 2.0)
    return pair.eps * np.hypot(entering, 0.7 * pair.score_level / pair.eps)


def times(level: float | np.ndarray, expected: float | np.ndarray) -> np.ndarray:
    """How many times a level is the largest that rounding explains."""
    return np.asarray(level) / (MARGIN * np.asarray(expected))
