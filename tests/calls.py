"""Calls of attention whose statistics are known to be there, and whose arguments tests may make up as they go."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

import attemper
from attemper import AttentionOutput, AttentionStats


def attended(backend: str, *args: Any, stats: Any = "all", **options: Any) -> Result:
    """Output and statistics of ``attemper.attention``."""
    output, measured = attemper.attention(*args, stats=stats, backend=backend, **options)
    return Result(output, known(measured))


def packed(backend: str, *args: Any, stats: Any = "all", **options: Any) -> Result:
    """Output and statistics of ``attemper.varlen_attention``."""
    output, measured = attemper.varlen_attention(*args, stats=stats, backend=backend, **options)
    return Result(output, known(measured))


class Result(NamedTuple):
    """An ``AttentionOutput`` whose statistics are there."""

    output: Tensor
    stats: AttentionStats

    def merge(self, other: Result) -> Result:
        """The same law, by ``AttentionOutput.merge``."""
        output, stats = AttentionOutput(*self).merge(AttentionOutput(*other))
        return Result(output, known(stats))


def known(stats: AttentionStats | None) -> AttentionStats:
    """Statistics that were asked for."""
    assert stats is not None
    return stats
