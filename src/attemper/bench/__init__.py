"""Attention with statistics beside what people run without them, measured on this machine.

``measure`` checks that both sides compute the same, then times them in turns; ``attemper bench`` and
``benchmarks/native.py`` print what it finds.
"""

from __future__ import annotations

from attemper.bench.hardware import Machine, machine
from attemper.bench.memory import peak_extra_bytes
from attemper.bench.normalizers import NORMALIZERS, NormalizerRow, measure_normalizer
from attemper.bench.shape import Shape, parsed
from attemper.bench.timing import Row, measure

__all__ = [
    "NORMALIZERS",
    "Machine",
    "NormalizerRow",
    "Row",
    "Shape",
    "machine",
    "measure",
    "measure_normalizer",
    "parsed",
    "peak_extra_bytes",
]
