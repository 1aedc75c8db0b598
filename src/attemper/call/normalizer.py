"""What ``normalizer=`` says: its names, its objects, and what the kernels are told."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from attemper.backends.contract import ROW_NORMALIZERS
from attemper.checks import did_you_mean
from attemper.errors import InputError
from attemper.statistics import asked_names, with_kept

NAMES = ("softmax", "softmax_plus_one", "scalable_softmax", "sigmoid", "sparsemax", "entmax15")
"""What needs no number. The rest comes as an object of ``attemper.nn``."""


@dataclass(frozen=True)
class Normalization:
    """How scores become weights, with the numbers it takes.

    ``kind`` is a name of ``NAMES``, or "sink", "topk", "threshold", "entmax". ``number``: k or the smallest weight.
    ``per_head``: sink logits, bias (sigmoid), s (scalable softmax) or alpha (entmax): a number, or a tensor [heads] or
    with one element, differentiated.
    """

    kind: str
    number: float = 0.0
    per_head: float | Tensor | None = None

    @property
    def rowwise(self) -> bool:
        """Whether a weight needs all keys of its row: it is not softmax, with or without a sink or a scale."""
        return self.kind in ROW_NORMALIZERS

    @property
    def plain(self) -> bool:
        """Whether it is softmax itself, without a sink or a scale."""
        return self.kind == "softmax"

    @property
    def kernel(self) -> str:
        """The kernel that computes it: "softmax" also with a sink or a scale, else its own."""
        return self.kind if self.rowwise else "softmax"

    def statistics(self, where: str, stats: str | Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The statistics that ``stats=`` asks for, and these with what is always kept beside them.

        Raises:
            InputError: one is unknown, or belongs to softmax alone.
        """
        asked = asked_names(where, stats, rowwise=self.kind if self.rowwise else None)
        return asked, asked if self.rowwise else with_kept(asked)


def rowwise_of(given: object) -> str | None:
    """The name of the normalizer that is meant, if it needs all keys of a row; None for softmax in all its forms."""
    chosen = normalization("attention", given)
    return chosen.kind if chosen.rowwise else None


@runtime_checkable
class Normalizer(Protocol):
    """An object that ``normalizer=`` takes: the modules of ``attemper.nn``."""

    def normalization(self) -> Normalization: ...


def normalization(where: str, given: object) -> Normalization:
    """What is meant by ``normalizer=``: a name, an object of ``attemper.nn``, or what one says.

    Raises:
        InputError: it is none of them.
    """
    if isinstance(given, Normalization):
        return given
    if isinstance(given, str) and given in NAMES:
        return Normalization(given, per_head={"sigmoid": 0.0, "scalable_softmax": 1.0}.get(given))
    if isinstance(given, Normalizer) and not isinstance(given, type):
        return given.normalization()
    raise InputError(
        f"{where}(normalizer=...) must be one of {', '.join(map(repr, NAMES))}, or an object of attemper.nn: TopK(k), "
        f"Threshold(min_weight), Entmax(alpha), Sigmoid(bias), Sink(num_heads), ScalableSoftmax(s); got {given!r}."
        f"{did_you_mean(given, NAMES)}"
    )


def topk(k: Any, where: str = "TopK") -> Normalization:
    """Softmax over the k largest scores. ``where``: who was given ``k``.

    Raises:
        InputError: k is not an int of at least 1.
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise InputError(
            f"{where}(k=...) must be an int of at least 1, got {k!r}. It is the number of keys that keep a weight; "
            "above the number of visible keys all do, as in softmax."
        )
    return Normalization("topk", float(k))


def threshold(min_weight: Any, where: str = "Threshold") -> Normalization:
    """Softmax over the keys that have at least this weight. ``where``: who was given it.

    Raises:
        InputError: it is not a number from 0 to below 1.
    """
    if isinstance(min_weight, bool) or not isinstance(min_weight, int | float) or not 0 <= min_weight < 1:
        raise InputError(
            f"{where}(min_weight=...) must be a number from 0 to below 1, got {min_weight!r}. It is the softmax weight "
            "from which a key keeps its share: 0 keeps all, 0.01 those of at least 1%."
        )
    return Normalization("threshold", float(min_weight))


def entmax(alpha: float | Tensor) -> Normalization:
    """alpha-entmax. A number is checked, a tensor is not (that would sync the device).

    Raises:
        InputError: alpha is a number below 1, or not finite.
    """
    if not isinstance(alpha, Tensor) and (
        isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 1 <= alpha < math.inf
    ):
        raise InputError(
            f"Entmax(alpha=...) must be a finite number of at least 1, or a tensor, got {alpha!r}. 1 is softmax, 1.5 "
            "entmax15, 2 sparsemax; larger is sparser."
        )
    if isinstance(alpha, Tensor):
        return Normalization("entmax", per_head=alpha)
    named = {1.0: "softmax", 1.5: "entmax15", 2.0: "sparsemax"}.get(float(alpha))
    return Normalization(named) if named else Normalization("entmax", per_head=float(alpha))


def per_head(where: str, name: str, given: float | Tensor, query: Tensor) -> Tensor:
    """A number or tensor of the normalizer as [H], float32 at least.

    Raises:
        InputError: a tensor that is neither [heads] nor one element, or not floating.
    """
    heads = query.shape[1]
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    if not isinstance(given, Tensor):
        return torch.full((heads,), given, dtype=dtype, device=query.device)
    if not given.dtype.is_floating_point or not (given.numel() == 1 or given.shape == (heads,)):
        raise InputError(
            f"{where}(normalizer=...): {name} must be a number, or a floating tensor [heads] = [{heads}] or of one "
            f"element, got {given.dtype} {list(given.shape)}."
        )
    return given.reshape(-1).to(dtype).expand(heads)
