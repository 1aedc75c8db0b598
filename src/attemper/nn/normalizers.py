"""Normalizers as modules: what ``normalizer=`` takes, and drop-ins for ``torch.nn.Softmax``.

Each holds options and what is learned. Called with scores it gives weights, by its function of ``attemper.functional``.
Given as ``attention(normalizer=...)``, ``MultiheadAttention(normalizer=...)`` or ``temper(normalizer=...)`` it is
computed inside attention, whose n x n weights are never held. A parameter per head has one entry or one for each head;
on scores the heads are the third dimension from the end, [..., heads, queries, keys], whatever ``dim`` is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from attemper.call import normalizer
from attemper.call.normalizer import Normalization
from attemper.checks import whole_number
from attemper.errors import InputError
from attemper.functional import measures, normalizers
from attemper.nn.bounds import bounded_exponential


class Normalizer(nn.Module):
    """Base of all: ``normalization()`` for attention, ``forward(scores)`` for scores.

    A subclass sets ``name`` and ``function``, and ``argument()`` if its function takes more than scores.

    Args:
        dim: the dimension of scores along which weights are found, when it is called.
    """

    name: ClassVar[str]
    """What ``attention(normalizer=...)`` calls it."""
    function: ClassVar[Callable[..., Tensor]]
    """From scores to weights: a function of ``attemper.functional``."""
    options: ClassVar[tuple[str, ...]] = ()
    """The attributes that it is made with again, by ``from_form``."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def argument(self) -> float | Tensor | None:
        """What the function takes beside the scores, a number or a tensor [heads]; None for nothing."""
        return None

    def normalization(self) -> Normalization:
        """The normalizer as attention takes it."""
        return Normalization(self.name, per_head=self.argument())

    def forward(self, scores: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
        """
        Args:
            scores: [..., n] along ``dim``; -inf where hidden.
            temperature: divides the scores, as in the functions.

        Returns:
            Weights of the shape and type of ``scores``.
        """
        value = self.argument()
        arguments = () if value is None else (_on_scores(type(self).__name__, value, scores, self.dim),)
        return self.function(scores, *arguments, dim=self.dim, temperature=temperature)

    @classmethod
    def from_form(cls, options: dict[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """A module for a file's ``options`` and ``tensors``, whose numbers are loaded into it afterwards."""
        return cls(**options)


class Softmax(Normalizer):
    """exp(z) / sum exp(z); a row that sees nothing is 0."""

    name, function = "softmax", staticmethod(measures.softmax)


class SoftmaxPlusOne(Normalizer):
    """exp(z) / (1 + sum exp(z)): a head may give next to nothing. :func:`~attemper.functional.softmax_plus_one`."""

    name, function = "softmax_plus_one", staticmethod(normalizers.softmax_plus_one)


class Sparsemax(Normalizer):
    """The projection on the simplex: few weights are not 0. :func:`~attemper.functional.sparsemax`."""

    name, function = "sparsemax", staticmethod(normalizers.sparsemax)


class Entmax15(Normalizer):
    """Between softmax and sparsemax. :func:`~attemper.functional.entmax15`."""

    name, function = "entmax15", staticmethod(normalizers.entmax15)


class TopK(Normalizer):
    """Softmax over the k largest scores. :func:`~attemper.functional.topk_softmax`.

    Raises:
        InputError: k is not an int of at least 1.
    """

    name, function, options = "topk", staticmethod(normalizers.topk_softmax), ("k",)

    def __init__(self, k: int, dim: int = -1) -> None:
        super().__init__(dim)
        self._normalization = normalizer.topk(k)
        self.k = k

    def argument(self) -> int:
        return self.k

    def normalization(self) -> Normalization:
        return self._normalization

    def extra_repr(self) -> str:
        return f"k={self.k}"


class Threshold(Normalizer):
    """Softmax without the keys below a weight. :func:`~attemper.functional.threshold_softmax`.

    Raises:
        InputError: ``min_weight`` is not a number from 0 to below 1.
    """

    name, function, options = "threshold", staticmethod(normalizers.threshold_softmax), ("min_weight",)

    def __init__(self, min_weight: float, dim: int = -1) -> None:
        super().__init__(dim)
        self._normalization = normalizer.threshold(min_weight)
        self.min_weight = min_weight

    def argument(self) -> float:
        return self.min_weight

    def normalization(self) -> Normalization:
        return self._normalization

    def extra_repr(self) -> str:
        return f"min_weight={self.min_weight:g}"


class _PerHead(Normalizer):
    """A normalizer with a parameter that is a number or one per head, fixed or learned."""

    options = ("value",)
    argument_name: ClassVar[str]
    parameter: ClassVar[str] = "learned"
    """The attribute that holds what is learned; None where nothing is."""
    fixed: Tensor

    def __init__(self, initial: float | Tensor, learned: bool, num_heads: int, dim: int) -> None:
        super().__init__(dim)
        start = _start(type(self).__name__, self.argument_name, initial, learned, num_heads)
        self._number = None if isinstance(initial, Tensor) or learned else float(initial)
        setattr(self, self.parameter, nn.Parameter(start) if learned else None)
        self.register_buffer("fixed", start if isinstance(initial, Tensor) and not learned else None)

    @property
    def value(self) -> float | Tensor:
        """The number, or the tensor [num_heads]."""
        learned = getattr(self, self.parameter)
        if learned is not None:
            return learned
        return self.fixed if self._number is None else self._number

    def argument(self) -> float | Tensor:
        return self.value

    @classmethod
    def from_form(cls, options: dict[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        if cls.parameter in tensors:
            return cls(learned=True, num_heads=len(tensors[cls.parameter]))  # pyright: ignore[reportCallIssue]
        return cls(tensors["fixed"] if "fixed" in tensors else options[cls.options[0]])  # pyright: ignore[reportCallIssue]

    def extra_repr(self) -> str:
        learned = getattr(self, self.parameter)
        if learned is not None:
            return f"learned, heads={len(learned)}"
        return f"heads={len(self.fixed)}" if self._number is None else f"{self.argument_name}={self._number:g}"


class Entmax(_PerHead):
    r"""alpha-entmax, alpha fixed or learned: 1 is softmax, 2 sparsemax. :func:`~attemper.functional.entmax`.

    What is learned is log(alpha - 1), so that no optimizer step leaves [1 + 1e-3, 10]; its gradient is exact. Above
    alpha = 2 a weight near the edge of the support is a steep root of its score: ``backend="triton"``, which finds
    thresholds in float32, knows it to about 3e-4 at alpha = 3 and 5e-3 at 4; the other backends to 1e-5.

    Args:
        alpha: at least 1, a number or a tensor [heads]; where a learned one starts, above 1.
        learned: whether alpha is a parameter.
        num_heads: how many are learned from a number: 1, or the number of query heads.

    Raises:
        InputError: alpha is below 1, or a learned one does not start between 1 + 1e-3 and 10.
    """

    name, function, options = "entmax", staticmethod(normalizers.entmax), ("alpha",)
    argument_name, parameter = "alpha", "log_excess"
    FLOOR, CEILING = 1e-3, 9.0
    log_excess: nn.Parameter | None

    def __init__(
        self, alpha: float | Tensor = 1.5, *, learned: bool = False, num_heads: int = 1, dim: int = -1
    ) -> None:
        given = alpha.tolist() if isinstance(alpha, Tensor) and alpha.dim() == 1 else [alpha]
        for one in given:
            normalizer.entmax(one)
        super().__init__(alpha, learned, num_heads, dim)
        if self.log_excess is not None:
            low, high = 1 + self.FLOOR, 1 + self.CEILING
            if not all(low <= one <= high for one in given):
                raise InputError(
                    f"Entmax(alpha={alpha}, learned=True) must start between {low} and {high}: at 1 it is softmax, "
                    "which alpha leaves by no step of its logarithm."
                )
            self.log_excess.data = (self.log_excess.data - 1).clamp(min=self.FLOOR).log()

    @property
    def alpha(self) -> float | Tensor:
        """The number, or the tensor [num_heads], float32 at least: 1 + 1e-3 is 1 in half precision."""
        if self.log_excess is None:
            return super().value
        wide = torch.promote_types(self.log_excess.dtype, torch.float32)
        return 1 + bounded_exponential(self.log_excess.to(wide), self.FLOOR, self.CEILING)

    @property
    def value(self) -> float | Tensor:
        """``alpha``."""
        return self.alpha

    def normalization(self) -> Normalization:
        return normalizer.entmax(self.alpha)


class Sigmoid(_PerHead):
    """sigmoid(z + bias), every key for itself: weights do not sum to 1. :func:`~attemper.functional.sigmoid`.

    A bias of -log n starts n keys at a sum of about 1 (Ramapuram et al. 2024, "Theory, Analysis, and Best Practices for
    Sigmoid Self-Attention").

    Args:
        bias: a number or a tensor [heads]; where a learned one starts.
        learned: whether it is a parameter.
        num_heads: how many there are: 1, or the number of query heads.
    """

    name, function, argument_name = "sigmoid", staticmethod(normalizers.sigmoid), "bias"

    def __init__(self, bias: float | Tensor = 0.0, *, learned: bool = False, num_heads: int = 1, dim: int = -1) -> None:
        super().__init__(bias, learned, num_heads, dim)


class Sink(_PerHead):
    """Softmax with a learned logit per head that takes weight and gives no value.
    :func:`~attemper.functional.softmax_with_sink`.

    Args:
        num_heads: the number of query heads, or 1 for one logit for all.
        initial: where the logits start; 0 is ``SoftmaxPlusOne``.
    """

    name, function, options = "sink", staticmethod(normalizers.softmax_with_sink), ()
    argument_name = "logit"

    def __init__(self, num_heads: int = 1, *, initial: float = 0.0, dim: int = -1) -> None:
        super().__init__(initial, True, num_heads, dim)

    @classmethod
    def from_form(cls, options: dict[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        return cls(len(tensors["learned"]))


class ScalableSoftmax(_PerHead):
    """softmax(s log(n) z), n the visible keys of the row: as sharp on long texts as on short ones.
    :func:`~attemper.functional.scalable_softmax`. In attention s log n acts on q.k and not on a
    bias, as a temperature does.

    Args:
        s: a number or a tensor [heads]; where a learned one starts.
            Nakanishi 2025, "Scalable-Softmax Is Superior for Attention".
        learned: whether it is a parameter.
        num_heads: how many there are: 1, or the number of query heads.
    """

    name, function, argument_name = "scalable_softmax", staticmethod(normalizers.scalable_softmax), "s"

    def __init__(self, s: float | Tensor = 1.0, *, learned: bool = False, num_heads: int = 1, dim: int = -1) -> None:
        super().__init__(s, learned, num_heads, dim)


MODULES: tuple[type[Normalizer], ...] = (
    Softmax,
    SoftmaxPlusOne,
    ScalableSoftmax,
    Sigmoid,
    Sparsemax,
    Entmax15,
    Entmax,
    TopK,
    Threshold,
    Sink,
)
"""Every normalizer: tempering by name and forms in files follow from it."""


def _start(where: str, name: str, given: Any, learned: bool, num_heads: int) -> Tensor:
    """Where the parameter of a module starts, [heads], float32 at least.

    Raises:
        InputError: it is no finite number and no tensor [heads] of them; or ``num_heads`` says something else, or is
            given where nothing is learned.
    """
    whole_number(f"{where}(num_heads=...)", num_heads)
    if isinstance(given, Tensor):
        fits = given.dim() == 1 and len(given) > 0 and given.dtype.is_floating_point
        if not fits or num_heads not in (1, len(given)) or not torch.isfinite(given).all():
            raise InputError(
                f"{where}({name}=...) must be a number or a floating tensor [heads] of finite numbers, and num_heads, "
                f"if given, its length; got {given.dtype} {list(given.shape)} and num_heads={num_heads}."
            )
        return given.detach().clone().to(torch.promote_types(given.dtype, torch.float32))
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not math.isfinite(given):
        raise InputError(f"{where}({name}=...) must be a finite number or a tensor [heads], got {given!r}.")
    if num_heads > 1 and not learned:
        raise InputError(f"{where}(num_heads={num_heads}) needs learned=True: pass it too, or leave num_heads out.")
    return torch.full((num_heads,), float(given))


def _on_scores(where: str, value: float | Tensor, scores: Tensor, dim: int) -> float | Tensor:
    """A value per head where heads stand in scores, without the dimension ``dim``."""
    if not isinstance(value, Tensor) or value.numel() == 1:
        return value if not isinstance(value, Tensor) else value.reshape(())
    if scores.dim() < 3 or scores.shape[-3] != len(value):
        raise InputError(
            f"{where} has {len(value)} heads: scores must be [..., {len(value)}, queries, keys], got "
            f"{list(scores.shape)}."
        )
    place = dim if dim < 0 else dim - scores.dim()
    if place == -3:
        raise InputError(f"{where} has a value per head: weights cannot be found along the heads.")
    return value[:, None] if place > -3 else value[:, None, None]
