"""Normalizers that need all keys of a row: from scores to weights and back, in PyTorch on any device.

How to add one:

1. A file beside ``sigmoid.py`` and a row in ``NORMALIZERS``: ``blocked`` computes it, statistics and gradients too, and
   ``attention(normalizer=...)`` knows its name. ``tests/docs/test_add_a_normalizer.py`` does this.
2. Its definition in ``backends/reference/rowwise.py``, against which every backend is tested.
3. A function for a compiled backend, in ``native/source/solve.h`` and ``triton/rowwise/normalizers.py``: "auto" takes
   these backends where they can run, once ``COMPILED_NORMALIZERS`` in ``backends/table.py`` names it.
4. For scores and models, a function in ``functional/normalizers.py`` and a class in ``nn/normalizers.py``. Tempering by
   name and files of tempered models follow from the class.
"""

from __future__ import annotations

from attemper.backends.normalizers.entmax import ENTMAX
from attemper.backends.normalizers.sigmoid import SIGMOID
from attemper.backends.normalizers.simplex import Normalizer
from attemper.backends.normalizers.sparsemax import ENTMAX15, SPARSEMAX
from attemper.backends.normalizers.topk import THRESHOLD, TOPK
from attemper.backends.table import COMPILED_NORMALIZERS

NORMALIZERS: dict[str, Normalizer] = {
    "sparsemax": SPARSEMAX,
    "entmax15": ENTMAX15,
    "entmax": ENTMAX,
    "topk": TOPK,
    "threshold": THRESHOLD,
    "sigmoid": SIGMOID,
}

CODES = {name: code for code, name in enumerate(COMPILED_NORMALIZERS)}
"""Name -> its number in compiled kernels (``native/source/solve.h``, ``triton/rowwise/normalizers.py``)."""
