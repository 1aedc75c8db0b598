"""Calls of attention whose statistics are known to be there, and whose arguments tests may make up as they go."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
from torch import Tensor

import attemper
from attemper.backends.table import BACKENDS
from attemper.types import AttentionOutput, AttentionStats

PRESENT = tuple(backend.name for backend in BACKENDS if backend.missing is None)
FEATURES = {backend.name: backend.features for backend in BACKENDS}
DTYPES = {backend.name: backend.dtypes for backend in BACKENDS}


def had(backend: str, names: Iterable[str]) -> tuple[str, ...]:
    """Those of the statistics that the backend has."""
    needs = {"gini": "second_pass", "key_mass": "second_pass"}
    needs |= {name: name for name in ("score_variance", "self_weight", "span_mass")}
    return tuple(name for name in names if name not in needs or needs[name] in FEATURES[backend])


def skip_without(backend: str, *needed: object) -> None:
    """Skips a test on a backend that refuses a feature or a type, as ``tests/test_backends.py`` shows."""
    missing = [str(n) for n in needed if str(n).removeprefix("torch.") not in FEATURES[backend] | set(DTYPES[backend])]
    if missing:
        pytest.skip(f"{backend} refuses {', '.join(missing)}")


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
