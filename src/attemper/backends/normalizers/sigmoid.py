"""Sigmoid: every key is weighted for itself, and the weights of a row sum to whatever they do.

With the bias b of the head::

    w_j = 1 / (1 + exp(-(s_j + b)))        ds_j = w_j (1 - w_j) g_j        db = sum ds_j
"""

from __future__ import annotations

import torch
from torch import Tensor

from attemper.backends.normalizers.simplex import Normalizer


def _weights(scores: Tensor, number: float = 0.0, per_head: Tensor | None = None) -> Tensor:
    return torch.sigmoid(scores + (number if per_head is None else per_head[:, None]))


def _gradient(weights: Tensor, grad: Tensor, number: float = 0.0, per_head: Tensor | None = None) -> Tensor:
    return weights * (1 - weights) * grad


def _bias_gradient(weights: Tensor, grad: Tensor, of_scores: Tensor, per_head: Tensor) -> Tensor:
    return of_scores.sum(-1)


SIGMOID = Normalizer(_weights, _gradient, _bias_gradient, parameter="bias", default=0.0, module="Sigmoid(bias)")
