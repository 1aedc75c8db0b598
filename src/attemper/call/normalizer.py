"""The normalizers: what ``normalizer=`` may be, what each one takes, and what it is to the kernels."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from attemper.backends.contract import Problem
from attemper.backends.normalizers import NORMALIZERS
from attemper.backends.normalizers.simplex import Signature
from attemper.call.visible_keys import structured_visible_keys
from attemper.checks import did_you_mean, whole_number
from attemper.errors import InputError
from attemper.statistics import add_kept, asked_names

FORMS_OF_SOFTMAX = {
    "softmax": Signature(mergeable=True),
    "softmax_plus_one": Signature(mergeable=True),
    "scalable_softmax": Signature(parameter="s", default=1.0, module="ScalableSoftmax(s)"),
    "sink": Signature(parameter="the sink's logit", module="Sink(num_heads)", mergeable=True),
}
"""Softmax itself, with a sink, or with another multiplier. All others are ``backends.normalizers.NORMALIZERS``."""


def signatures() -> dict[str, Signature]:
    """Every normalizer by its name, with what it takes."""
    return {**FORMS_OF_SOFTMAX, **NORMALIZERS}


def names() -> tuple[str, ...]:
    """The normalizers that a name says. The others are objects of ``attemper.nn``."""
    return tuple(name for name, takes in signatures().items() if takes.by_name)


def is_rowwise(name: str) -> bool:
    """Whether a weight needs all keys of its row: not softmax, with or without a sink or a scale."""
    return name in NORMALIZERS


def is_plain(name: str) -> bool:
    """Whether it is softmax itself, without a sink or a scale."""
    return name == "softmax"


def is_mergeable(name: str) -> bool:
    """Whether results over two parts of the keys determine that over all: no weight depends on how many keys there are,
    but through the sum.
    """
    return signatures()[name].mergeable


@dataclass(frozen=True)
class Normalization:
    """How scores become weights, with the numbers it takes."""

    name: str
    """One of ``signatures``."""
    number: float = 0.0
    """k of "topk", the smallest weight of "threshold"."""
    per_head: float | Tensor | None = None
    """The parameter: a number, or a tensor [heads] or with one element, differentiated."""

    @property
    def rowwise(self) -> bool:
        """Whether a weight needs all keys of its row: :func:`is_rowwise`."""
        return is_rowwise(self.name)

    @property
    def plain(self) -> bool:
        """Whether it is softmax itself: :func:`is_plain`."""
        return is_plain(self.name)

    @property
    def kernel(self) -> str:
        """The kernel that computes it: "softmax" also with a sink or a scale, else its own."""
        return self.name if self.rowwise else "softmax"

    def statistics(self, where: str, stats: str | Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The statistics that ``stats=`` asks for, and these with what is always kept beside them."""
        asked = asked_names(where, stats, rowwise=self.name if self.rowwise else None)
        return asked, asked if self.rowwise else add_kept(asked)

    def parameter(self, where: str, query: Tensor) -> Tensor | None:
        """The parameter as [H], float32 at least."""
        value, heads = self.per_head, query.shape[1]
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        if value is None:
            return None
        if not isinstance(value, Tensor):
            return torch.full((heads,), value, dtype=dtype, device=query.device)
        if not value.dtype.is_floating_point or not (value.numel() == 1 or value.shape == (heads,)):
            name = signatures()[self.name].parameter
            raise InputError(
                f"{where}(normalizer=...): {name} must be a number, or a floating tensor [heads] = [{heads}] or of one "
                f"element, got {value.dtype} {list(value.shape)}."
            )
        return value.reshape(-1).to(dtype).expand(heads)

    def sink(self, where: str, query: Tensor, given: Tensor | None) -> Tensor | None:
        """The logit [H] that takes weight and gives no value: its own, ``given`` (sink_logits), or both together.
        ``InputError``: it is rowwise, and so has no sink, but one is given.
        """
        if given is not None and self.rowwise:
            raise InputError(
                f"{where}(sink_logits=...) is a logit of softmax; normalizer={self.name!r} has no sink. Leave it out; "
                "a model that brings one (gpt-oss) takes forms of softmax only: softmax_plus_one, Sink, "
                "scalable_softmax."
            )
        if self.name == "softmax_plus_one":
            own = query.new_zeros(query.shape[1], dtype=torch.promote_types(query.dtype, torch.float32))
        elif self.name == "sink":
            own = self.parameter(where, query)
        else:
            return given
        return own if given is None or own is None else torch.logaddexp(given.to(own.dtype), own)

    def multiplier(self, where: str, problem: Problem) -> Tensor:
        """The multiplier of each row; for scalable softmax times s log n, n the visible keys of the row."""
        if self.name != "scalable_softmax":
            return problem.multiplier
        s, counts = self.parameter(where, problem.query), structured_visible_keys(problem)
        assert s is not None
        factor = s[:, None] * counts.clamp(min=1).to(s.dtype).log()
        return problem.multiplier * factor.to(problem.multiplier.dtype)

    def check_temperature(self, where: str, temperature: float | Tensor) -> None:
        """``InputError`` for an infinite temperature, under which top-k would lose the order of the scores."""
        if self.name == "topk" and not isinstance(temperature, Tensor) and temperature == math.inf:
            raise InputError(
                f"{where}(temperature=inf) makes all scores equal, so that top-k would take the first keys, not the "
                "largest. Use a large number such as 1e6, which keeps their order."
            )


def rowwise_of(given: object) -> str | None:
    """The name of the normalizer that is meant, if it needs all keys of a row; None for softmax in all its forms."""
    chosen = normalization("attention", given)
    return chosen.name if chosen.rowwise else None


@runtime_checkable
class Normalizer(Protocol):
    """An object that ``normalizer=`` takes: the modules of ``attemper.nn``."""

    def normalization(self) -> Normalization: ...


def normalization(where: str, given: object) -> Normalization:
    """What is meant by ``normalizer=``: a name, an object of ``attemper.nn``, or what one says."""
    if isinstance(given, Normalization):
        return given
    takes = (FORMS_OF_SOFTMAX.get(given) or NORMALIZERS.get(given)) if isinstance(given, str) else None
    if isinstance(given, str) and takes is not None and takes.by_name:
        return Normalization(given, per_head=takes.default)
    if isinstance(given, Normalizer) and not isinstance(given, type):
        return given.normalization()
    objects = ", ".join(takes.module for takes in signatures().values() if takes.module)
    raise InputError(
        f"{where}(normalizer=...) must be one of {', '.join(map(repr, names()))}, or an object of attemper.nn: "
        f"{objects}; got {given!r}.{did_you_mean(given, names())}"
    )


def topk(k: Any, where: str = "TopK") -> Normalization:
    """Softmax over the k largest scores. ``where``: what was called with ``k``."""
    keys = "It is the number of keys that keep a weight; above the number of visible keys all do, as in softmax."
    return Normalization("topk", float(whole_number(f"{where}(k=...)", k, f" {keys}")))


def threshold(min_weight: Any, where: str = "Threshold") -> Normalization:
    """Softmax over the keys that have at least this weight. ``where``: what was called with it."""
    if isinstance(min_weight, bool) or not isinstance(min_weight, (int, float)) or not 0 <= min_weight < 1:
        raise InputError(
            f"{where}(min_weight=...) must be a number from 0 to below 1, got {min_weight!r}. It is the softmax weight "
            "from which a key keeps its share: 0 keeps all, 0.01 those of at least 1%."
        )
    return Normalization("threshold", float(min_weight))


def entmax(alpha: float | Tensor) -> Normalization:
    """alpha-entmax. A number is checked, a tensor is not (that would sync the device)."""
    if not isinstance(alpha, Tensor) and (
        isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 1 <= alpha < math.inf
    ):
        raise InputError(
            f"Entmax(alpha=...) must be a finite number of at least 1, or a tensor, got {alpha!r}. 1 is softmax, 1.5 "
            "entmax15, 2 sparsemax; larger is sparser."
        )
    if isinstance(alpha, Tensor):
        return Normalization("entmax", per_head=alpha)
    named = {1.0: "softmax", 1.5: "entmax15", 2.0: "sparsemax"}.get(float(alpha))
    return Normalization(named) if named else Normalization("entmax", per_head=float(alpha))
