"""Normalizers that need all keys of a row: from scores to weights and back, in PyTorch on any device.

The table says everything that ``blocked`` and the operators on rows of scores have to know of one. To add one, write a
file beside ``sigmoid.py`` and a row here; a compiled backend needs a function of its own, found by the code.
"""

from __future__ import annotations

from attemper.backends.normalizers.entmax import ENTMAX
from attemper.backends.normalizers.sigmoid import SIGMOID
from attemper.backends.normalizers.simplex import Normalizer
from attemper.backends.normalizers.sparsemax import ENTMAX15, SPARSEMAX
from attemper.backends.normalizers.topk import THRESHOLD, TOPK

NORMALIZERS: dict[str, Normalizer] = {
    "sparsemax": SPARSEMAX,
    "entmax15": ENTMAX15,
    "entmax": ENTMAX,
    "topk": TOPK,
    "threshold": THRESHOLD,
    "sigmoid": SIGMOID,
}

CODES = {name: code for code, name in enumerate(("softmax", *NORMALIZERS))}
"""Name -> its number in compiled kernels (``native/source/solve.h``, ``triton/rowwise/normalizers.py``)."""
