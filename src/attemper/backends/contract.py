"""One call as every kernel takes it, and what a kernel's backward pass takes and gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from attemper.statistics import SOFTMAX_BASE, Column

UNBOUNDED = 1 << 62
"""A window side without a limit."""

Size: TypeAlias = int
"""A number that may be a size: symbolic in a graph that serves many shapes."""


@dataclass(eq=False)  # not frozen: that would triple the time to make one
class Problem:
    """One call: tensors as [B, H, Q, D], [B, G, K, D], [B, G, K, E]; nothing is copied that a view can show.

    The operators' schemas are made from these fields, in their order. The first seven are differentiable.
    """

    query: Tensor
    key: Tensor
    value: Tensor | None
    mask: Tensor | None
    """Bool (True = visible) or floating bias; 4-D, every dimension full or 1."""
    multiplier: Tensor
    """scale / T, [B|1, H|1, Q|1], float32 (float64 for float64)."""
    sink: Tensor | None = None
    """[H], one more logit of softmax, which takes weight and gives no value."""
    per_head: Tensor | None = None
    """[H], the parameter of a rowwise normalizer: the bias of "sigmoid", alpha of "entmax"."""
    positions: Tensor | None = None
    """[Q], ascending: where the rows stand among all queries; None for 0, 1, 2, ... On the CPU for ``blocked``."""
    first_keys: Tensor | None = None
    """[B|1, K] bool: which keys count as first tokens; None for the first ``first_tokens``."""
    span_keys: Tensor | None = None
    """[B|1, K] bool: the keys whose weight ``Column.SPAN`` sums."""
    cu_seqlens_q: Tensor | None = None
    """Of packed documents: where each starts among the queries, [documents + 1] int; ``blocked`` and ``native`` get one
    document at a time.
    """
    cu_seqlens_k: Tensor | None = None
    """The same among the keys."""
    seed: Tensor | None = None
    """Of dropout: one int64 on the CPU."""
    rows: Tensor | None = None
    """[R] int: the rows of the query to compute, taken as they are loaded. Only for a backend that gathers rows, and
    without a gradient.
    """
    left: int = UNBOUNDED
    right: int = UNBOUNDED
    bottom_right: bool = False
    """Whether the diagonal ends at the last key, in each document; it starts at the first key otherwise."""
    softcap: float = 0.0
    dropout_p: float = 0.0
    first_tokens: Size = 1
    columns: tuple[Column, ...] = SOFTMAX_BASE
    """State columns to leave, in their order; ``SOFTMAX_BASE`` or ``ROWWISE_BASE`` are the first of them."""
    key_mass: bool = False
    maximum_gradient: bool = False
    """Whether backward must place a gradient on the maximum itself (max_logit, max_weight)."""
    tile_rows: int = 0
    """Rows of a tile, for tests; 0 for the kernel's own choice, as in the next two."""
    tile_keys: int = 0
    tile_elements: int = 0
    backend: str = "blocked"
    """Which backend computes it: a compiled graph keeps the choice that was made for it."""
    normalizer: str = "softmax"
    """From scores to weights: "softmax", or one of ``backends.normalizers.NORMALIZERS``."""
    number: float = 0.0
    """k of "topk", the smallest weight of "threshold"."""

    def with_fields(self, **changes: Any) -> Problem:
        """The problem with other fields: ``dataclasses.replace``, which takes as long as checking a whole call."""
        made = object.__new__(Problem)
        vars(made).update(vars(self), **changes)
        return made

    def values(self) -> tuple[Any, ...]:
        """The fields as the operators take them."""
        # Not vars(self).values(), through which the compiler of torch 2.11 cannot look.
        return tuple([getattr(self, name) for name in NAMES])

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        return self.query, self.key, self.value, self.mask, self.multiplier, self.sink, self.per_head

    @property
    def marks(self) -> tuple[Tensor | None, ...]:
        """The tensors that say which rows and keys are meant, of a call that is not packed."""
        return self.positions, self.first_keys, self.span_keys

    @property
    def packed(self) -> bool:
        """Whether the sequence is documents one after another."""
        return self.cu_seqlens_q is not None

    @property
    def offset(self) -> int:
        """The key that stands on the diagonal of query 0."""
        return self.key.shape[2] - self.query.shape[2] if self.bottom_right else 0

    @property
    def rowwise(self) -> bool:
        """Whether a weight needs all keys of its row: the normalizer is not softmax."""
        return self.normalizer != "softmax"

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
        return self.key_mass or Column.GINI in self.columns or self.rowwise


NAMES = tuple(Problem.__dataclass_fields__)


@dataclass
class Gradients:
    """Gradients of a call, [shape of the tensor]; None where they were not asked for."""

    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    mask: Tensor | None = None
    multiplier: Tensor | None = None
    sink: Tensor | None = None
    per_head: Tensor | None = None


DIFFERENTIABLE = tuple(Gradients.__dataclass_fields__)


class Upstream(NamedTuple):
    """What comes from above: gradients of the output, of the state, and of key_mass."""

    output: Tensor
    state: Tensor
    key_mass: Tensor
