"""One call as every kernel takes it, and what a kernel's backward pass takes and gives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from attemper.statistics import Column

LETTERS = dict(zip(Column, "mznxwspahvcftguy", strict=True))
"""Column -> its letter in ``fields``."""


def letters_of(columns: Iterable[Column]) -> str:
    return "".join(LETTERS[column] for column in columns)


UNBOUNDED = 1 << 62
"""A window side without a limit."""

ROW_NORMALIZERS = ("sigmoid", "sparsemax", "entmax15", "entmax", "topk", "threshold")
"""Maps that are computed on whole rows (docs/design/0008), by kernels of their own. Their state begins with "mnx"."""


@dataclass(frozen=True)
class Problem:
    """One call: tensors as [B, H, Q, D], [B, G, K, D], [B, G, K, E]; nothing is copied that a view can show."""

    query: Tensor
    key: Tensor
    value: Tensor | None
    mask: Tensor | None
    """Bool (True = visible) or floating bias; 4-D, every dimension full or 1."""
    multiplier: Tensor
    """scale / T, [B|1, H|1, Q|1], float32 (float64 for float64)."""
    sink: Tensor | None = None
    """[H], what is given per head: under softmax one more logit that takes weight and gives no value; the bias of
    "sigmoid"; alpha of "entmax".
    """
    positions: Tensor | None = None
    """[Q], ascending: where the rows stand among all queries; None for 0, 1, 2, ... On the CPU for ``blocked``."""
    first_keys: Tensor | None = None
    """[B|1, K] bool: which keys count as first tokens; None for the first ``first_tokens``."""
    left: int = UNBOUNDED
    right: int = UNBOUNDED
    offset: int = 0
    """The key that stands on the diagonal of query 0."""
    softcap: float = 0.0
    dropout_p: float = 0.0
    seed: int = 0
    first_tokens: int = 1
    fields: str = "mzn"
    """Letters of the state, in order; "m", "z" and "n" are always among them, "m" first."""
    key_mass: bool = False
    maximum_gradient: bool = False
    """Whether backward must place a gradient on the maximum itself (max_logit, max_weight)."""
    packing: Packing | None = None
    """Where documents stand, for kernels that read them on the device; ``blocked`` gets one document at a time."""
    tile_rows: int | None = None
    tile_keys: int | None = None
    tile_elements: int | None = None
    normalizer: str = "softmax"
    """The map from scores to weights: "softmax", or one of ``ROW_NORMALIZERS``."""
    number: float = 0.0
    """k of "topk", the smallest weight of "threshold"."""

    @property
    def repeats(self) -> int:
        """Query heads per key head."""
        return self.query.shape[1] // max(self.key.shape[1], 1)

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32

    @property
    def sum_dtype(self) -> torch.dtype:
        """Row sums are float64 wherever the device has it."""
        return torch.float32 if self.query.device.type == "mps" else torch.float64

    @property
    def whole_rows(self) -> bool:
        """Whether a tile must hold all keys of its rows at once (gini sorts them; key_mass needs their sum; a threshold
        is found on them).
        """
        return self.key_mass or "g" in self.fields or self.normalizer != "softmax"


@dataclass(frozen=True)
class Packing:
    """Documents that stand one after another: offsets [documents + 1], int, on the device."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    bottom_right: bool = False
    """Whether the diagonal of each document ends at its last key."""


@dataclass
class Gradients:
    """Gradients of a call, [shape of the tensor]; None where they were not asked for."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    mask: Tensor | None
    multiplier: Tensor | None
    sink: Tensor | None


@dataclass(frozen=True)
class Upstream:
    """What comes from above: gradients of the output, of the state, and of key_mass."""

    output: Tensor
    state: Tensor
    key_mass: Tensor
