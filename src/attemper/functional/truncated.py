"""Softmax over a part of the keys: the k largest scores, or those of a least weight."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attemper.call import row_operator
from attemper.call.normalizer import threshold, topk
from attemper.call.onnx import SOFTMAX_INSTEAD, refuse_onnx
from attemper.functional.tempered import keys_last, tempered


def topk_softmax(
    scores: Tensor, k: int, *, dim: int = -1, temperature: float | Tensor = 1.0, dtype: torch.dtype | None = None
) -> Tensor:
    r"""Softmax over the ``k`` largest scores of each row; every other weight is 0.

    .. math:: w_j = \frac{e^{z_j} \, [j \in K]}{\sum_{i \in K} e^{z_i}}, \quad z = x / T, \ |K| = \min(k, n)

    Among equal scores at the border the lower index is in. Temperature changes no order: K is that of the scores, even
    where it is infinite. The gradient takes K as it is: no score outside of it has one.

    Args:
        scores: x, floating; ``-inf`` hides a key.
        k: at least 1. Above the number of visible keys n it is softmax.
        dim: the dimension of the keys.
        temperature: positive, no unit; broadcastable to ``scores`` without ``dim``. A tensor is differentiated.
        dtype: of the result; None for that of ``scores``. The arithmetic is float32 at least.

    Returns:
        Weights in the shape of ``scores``; rows sum to 1 up to the rounding of ``dtype``.

    Raises:
        InputError: scores are not floating, there is no such ``dim``, k is not an int of at least 1, a number
            temperature is NaN or not above 0, or a tensor of them does not fit.

    Source:
        Gupta et al. 2021, "Memory-efficient Transformers via Top-k Attention".

    Example:
        >>> topk_softmax(torch.tensor([0.0, 2.0, 2.0, 1.0]), 2)
        tensor([0.0000, 0.5000, 0.5000, 0.0000])
    """
    topk(k, "topk_softmax")
    x = keys_last("topk_softmax", scores, dim)
    k = min(k, max(x.shape[-1], 1))
    z = tempered("topk_softmax", x, temperature)
    if z is not x:  # two scores may have become one
        z = torch.where(row_operator.largest(x.detach(), k), z, -math.inf)
    refuse_onnx("topk_softmax", SOFTMAX_INSTEAD)
    weights = row_operator.row_weights(z, "topk", k)
    return weights.movedim(-1, dim).to(dtype or scores.dtype)


def threshold_softmax(
    scores: Tensor,
    min_weight: float,
    *,
    dim: int = -1,
    temperature: float | Tensor = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    r"""Softmax over the keys whose softmax weight is at least ``min_weight``; every other weight is 0.

    .. math:: w_j = \frac{p_j \, [j \in K]}{\sum_{i \in K} p_i}, \quad p = \mathrm{softmax}(x / T),
        \ K = \{j : p_j \ge \mathrm{min\_weight}\} \cup \arg\max p

    The keys of the largest weight stay, however small it is: a row that sees anything sums to 1. The gradient takes K
    as it is: no score outside of it has one.

    Args:
        scores: x, floating; ``-inf`` hides a key.
        min_weight: from 0, which is softmax, to below 1.
        dim: the dimension of the keys.
        temperature: positive, no unit; broadcastable to ``scores`` without ``dim``. A tensor is differentiated.
        dtype: of the result; None for that of ``scores``. The arithmetic is float32 at least.

    Returns:
        Weights in the shape of ``scores``; rows sum to 1 up to the rounding of ``dtype``.

    Raises:
        InputError: scores are not floating, there is no such ``dim``, min_weight is not a number from 0 to below 1, a
            number temperature is NaN or not above 0, or a tensor of them does not fit.

    Example:
        >>> threshold_softmax(torch.tensor([3.0, 3.0, 0.0]), 0.1)
        tensor([0.5000, 0.5000, 0.0000])
    """
    threshold(min_weight, "threshold_softmax")
    x = keys_last("threshold_softmax", scores, dim)
    refuse_onnx("threshold_softmax", SOFTMAX_INSTEAD)
    weights = row_operator.row_weights(tempered("threshold_softmax", x, temperature), "threshold", min_weight)
    return weights.movedim(-1, dim).to(dtype or scores.dtype)
