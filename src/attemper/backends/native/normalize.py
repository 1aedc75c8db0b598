"""Maps of rows of scores to weights, and their vector-Jacobian products, on the CPU (``source/normalize.cpp``)."""

from __future__ import annotations

import torch
from torch import Tensor

from attemper.backends.native.arguments import address
from attemper.backends.native.library import check, library

KINDS = ("softmax", "sparsemax", "entmax15", "entmax", "topk", "threshold", "sigmoid")
"""In the order of ``source/solve.h``."""
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def weights(scores: Tensor, kind: str, number: float = 0.0, alpha: Tensor | None = None) -> Tensor:
    """The weights of every row; a row of -inf is 0, one with NaN or +inf is NaN.

    Args:
        scores: [rows, n], one of ``DTYPES``, on the CPU; ``-inf`` hides a key.
        kind: one of ``KINDS``.
        number: k of "topk", the smallest weight of "threshold", the bias of "sigmoid", alpha of "entmax".
        alpha: [rows] float32, alpha (or the bias) of each row, instead of ``number``.

    Returns:
        [rows, n] of the scores' type.
    """
    scores, result = scores.contiguous(), torch.empty(scores.shape, dtype=scores.dtype)
    rows, n = scores.shape
    each = None if alpha is None else alpha.detach().to(torch.float32).contiguous()
    code = library().attemper_weights(
        rows, n, KINDS.index(kind), number, number, address(each), DTYPES[scores.dtype],
        address(scores), address(result), torch.get_num_threads(),
    )  # fmt: skip
    check("attemper_weights", code)
    return result


def gradient(weights: Tensor, grad: Tensor, kind: str, number: float = 0.0, alpha: Tensor | None = None) -> Tensor:
    """The gradient of the scores from the gradient of the weights, [rows, n]; the support is held fixed.

    ``number`` or ``alpha``: alpha of "entmax", as in ``weights``.
    """
    weights, grad = weights.contiguous(), grad.to(weights.dtype).contiguous()
    rows, n = weights.shape
    result = torch.empty(weights.shape, dtype=weights.dtype)
    each = None if alpha is None else alpha.detach().to(torch.float32).contiguous()
    code = library().attemper_slope(
        rows, n, KINDS.index(kind), number, address(each), DTYPES[weights.dtype],
        address(weights), address(grad), address(result), torch.get_num_threads(),
    )  # fmt: skip
    check("attemper_slope", code)
    return result
