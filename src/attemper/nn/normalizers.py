"""Maps from scores to weights as modules: what ``normalizer=`` takes, and drop-ins for ``torch.nn.Softmax``.

Each holds options and what is learned. Called with scores it gives weights, by the function of ``attemper.functional``;
given as ``attention(normalizer=...)``, ``MultiheadAttention(normalizer=...)`` or ``temper(normalizer=...)`` it is
computed inside attention, whose n x n weights are never held. What is per head has one entry or one for each; on scores
it stands at the third dimension from the end, [..., heads, queries, keys], whatever ``dim`` is.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attemper.errors import InputError
from attemper.functional import normalization, normalizers, truncated
from attemper.functional.entmax import entmax, entmax15, sparsemax
from attemper.functional.measures import softmax
from attemper.functional.normalization import Normalization
from attemper.nn.bounded import bounded_exponential


class Normalizer(nn.Module):
    """Base of all: ``normalization()`` for attention, ``forward(scores)`` for scores.

    Args:
        dim: the dimension of scores along which weights are found, when it is called.
    """

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def normalization(self) -> Normalization:
        """What the kernels are told."""
        raise NotImplementedError

    def forward(self, scores: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
        """
        Args:
            scores: [..., n] along ``dim``; -inf where hidden.
            temperature: divides the scores, as in the functions.

        Returns:
            Weights of the shape and type of ``scores``.
        """
        raise NotImplementedError


class Softmax(Normalizer):
    """exp(z) / sum exp(z), with rows that see nothing at 0."""

    def normalization(self) -> Normalization:
        return Normalization("softmax")

    def forward(self, scores: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
        return softmax(scores, dim=self.dim, temperature=temperature)


class SoftmaxPlusOne(Normalizer):
    """exp(z) / (1 + sum exp(z)): a head may give next to nothing. :func:`~attemper.functional.softmax_plus_one`."""

    def normalization(self) -> Normalization:
        return Normalization("softmax_plus_one")

    def forward(self, scores: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
        return normalizers.softmax_plus_one(scores, dim=self.dim, temperature=temperature)


class Sparsemax(Normalizer):
    """The projection on the simplex: few weights are not 0. :func:`~attemper.functional.sparsemax`."""

    def normalization(self) -> Normalization:
        return Normalization("sparsemax")

    def forward(self, scores: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
        return sparsemax(scores, dim=self.dim, temperature=temperature)


class Entmax15(Normalizer):
    """Between softmax and sparsemax. :func:`~attemper.functional.entmax15`."""

    def normalization(self) -> Normalization:
        return Normalization("entmax15")

    def forward(self, scores: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
        return entmax15(scores, dim=self.dim, temperature=temperature)


class TopK(Normalizer):
    """Softmax over the k largest scores. :func:`~attemper.functional.topk_softmax`.

    Raises:
        InputError: k is not an int of at least 1.
    """

    def __init__(self, k: int, dim: int = -1) -> None:
        super().__init__(dim)
        self._normalization = normalization.topk(k)
        self.k = k

    def normalization(self) -> Normalization:
        return self._normalization

    def forward(self, scores: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
        return truncated.topk_softmax(scores, self.k, dim=self.dim, temperature=temperature)

    def extra_repr(self) -> str:
        return f"k={self.k}"


class Threshold(Normalizer):
    """Softmax without the keys below a weight. :func:`~attemper.functional.threshold_softmax`.

    Raises:
        InputError: ``min_weight`` is not a number from 0 to below 1.
    """

    def __init__(self, min_weight: float, dim: int = -1) -> None:
        super().__init__(dim)
        self._normalization = normalization.threshold(min_weight)
        self.min_weight = min_weight

    def normalization(self) -> Normalization:
        return self._normalization

    def forward(self, scores: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
        return truncated.threshold_softmax(scores, self.min_weight, dim=self.dim, temperature=temperature)

    def extra_repr(self) -> str:
        return f"min_weight={self.min_weight:g}"


class Entmax(Normalizer):
    r"""alpha-entmax, alpha fixed or learned: 1 is softmax, 2 sparsemax. :func:`~attemper.functional.entmax`.

    What is learned is log(alpha - 1), so that no optimizer step leaves [1 + 1e-3, 10]; its gradient is exact.

    Args:
        alpha: at least 1; where a learned one starts, above 1.
        learned: whether alpha is a parameter.
        num_heads: how many there are: 1, or the number of query heads.

    Raises:
        InputError: alpha is below 1, or a learned one does not start between 1 + 1e-3 and 10.
    """

    FLOOR, CEILING = 1e-3, 9.0

    def __init__(self, alpha: float = 1.5, *, learned: bool = False, num_heads: int = 1, dim: int = -1) -> None:
        super().__init__(dim)
        self._fixed = normalization.entmax(float(alpha))
        self._alpha = float(alpha)
        self.log_excess: nn.Parameter | None = None
        if learned:
            if not self.FLOOR <= alpha - 1 <= self.CEILING:
                raise InputError(
                    f"Entmax(alpha={alpha}, learned=True) must start between {1 + self.FLOOR} and {1 + self.CEILING}: "
                    "at 1 it is softmax, which alpha leaves by no step of its logarithm."
                )
            self.log_excess = nn.Parameter(torch.full((_heads("Entmax", num_heads),), alpha - 1.0).log())

    @property
    def alpha(self) -> float | Tensor:
        """The number, or the learned tensor [num_heads]."""
        if self.log_excess is None:
            return self._alpha
        return 1 + bounded_exponential(self.log_excess, self.FLOOR, self.CEILING)

    def normalization(self) -> Normalization:
        alpha = self.alpha
        return self._fixed if not isinstance(alpha, Tensor) else normalization.entmax(alpha)

    def forward(self, scores: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
        alpha = _on_scores("Entmax", self.alpha, scores, self.dim)
        return entmax(scores, alpha, dim=self.dim, temperature=temperature)

    def extra_repr(self) -> str:
        return f"alpha={self._alpha:g}" if self.log_excess is None else f"learned, heads={len(self.log_excess)}"


class _PerHead(Normalizer):
    """A number, or a learned one per head."""

    def __init__(self, name: str, initial: float, learned: bool, num_heads: int, dim: int) -> None:
        super().__init__(dim)
        self._initial = float(initial)
        given = torch.full((_heads(type(self).__name__, num_heads),), float(initial))
        self.learned = nn.Parameter(given) if learned else None
        self._name = name

    @property
    def value(self) -> float | Tensor:
        """The number, or the learned tensor [num_heads]."""
        return self._initial if self.learned is None else self.learned

    def extra_repr(self) -> str:
        return f"{self._name}={self._initial:g}" if self.learned is None else f"learned, heads={len(self.learned)}"


class Sigmoid(_PerHead):
    """sigmoid(z + bias), every key for itself: weights do not sum to 1. :func:`~attemper.functional.sigmoid`.

    A bias of -log n starts n keys at a sum of about 1 (Ramapuram et al. 2024, "Theory, Analysis, and Best Practices for
    Sigmoid Self-Attention").

    Args:
        bias: where a learned one starts.
        learned: whether it is a parameter.
        num_heads: how many there are: 1, or the number of query heads.
    """

    def __init__(self, bias: float = 0.0, *, learned: bool = False, num_heads: int = 1, dim: int = -1) -> None:
        super().__init__("bias", bias, learned, num_heads, dim)

    def normalization(self) -> Normalization:
        return Normalization("sigmoid", per_head=self.value)

    def forward(self, scores: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
        bias = _on_scores("Sigmoid", self.value, scores, self.dim)
        return normalizers.sigmoid(scores, bias, dim=self.dim, temperature=temperature)


class Sink(_PerHead):
    """Softmax with a learned logit per head that takes weight and gives no value.
    :func:`~attemper.functional.softmax_with_sink`.

    Args:
        num_heads: the number of query heads, or 1 for one logit for all.
        initial: where the logits start; 0 is ``SoftmaxPlusOne``.
    """

    def __init__(self, num_heads: int = 1, *, initial: float = 0.0, dim: int = -1) -> None:
        super().__init__("logit", initial, True, num_heads, dim)

    def normalization(self) -> Normalization:
        return Normalization("sink", per_head=self.value)

    def forward(self, scores: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
        sink = _on_scores("Sink", self.value, scores, self.dim)
        return normalizers.softmax_with_sink(scores, sink, dim=self.dim, temperature=temperature)


class ScalableSoftmax(_PerHead):
    """softmax(s log(n) z), n the visible keys of the row: as sharp on long texts as on short ones.
    :func:`~attemper.functional.scalable_softmax`. In attention s log n multiplies q.k, as a temperature does, and not a
    bias.

    Args:
        s: where a learned one starts. Nakanishi 2025, "Scalable-Softmax Is Superior for Attention".
        learned: whether it is a parameter.
        num_heads: how many there are: 1, or the number of query heads.
    """

    def __init__(self, s: float = 1.0, *, learned: bool = False, num_heads: int = 1, dim: int = -1) -> None:
        super().__init__("s", s, learned, num_heads, dim)

    def normalization(self) -> Normalization:
        return Normalization("scalable_softmax", per_head=self.value)

    def forward(self, scores: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
        s = _on_scores("ScalableSoftmax", self.value, scores, self.dim)
        return normalizers.scalable_softmax(scores, s, dim=self.dim, temperature=temperature)


def _heads(where: str, num_heads: int) -> int:
    if isinstance(num_heads, bool) or not isinstance(num_heads, int) or num_heads < 1:
        raise InputError(f"{where}(num_heads=...) must be an int of at least 1, got {num_heads!r}.")
    return num_heads


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
