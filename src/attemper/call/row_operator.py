"""``torch.library`` operators from rows of scores to weights: ``attemper::row_weights`` and its gradient.

A compiled graph sees one node, a search for a threshold inside. The kernels are those in PyTorch, or in C++ for float32
rows on a CPU that the native library serves. The gradient follows from the weights alone; where it is to be
differentiated again it is a formula of PyTorch, else an operator of its own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attemper.backends.native import rows as native_rows
from attemper.backends.native.library import why_unusable
from attemper.backends.normalizers import CODES, NORMALIZERS
from attemper.backends.normalizers.entmax import alpha_gradient, by_alpha, iterations
from attemper.backends.normalizers.topk import largest
from attemper.call import transforms
from attemper.call.operator import LIBRARY, operator
from attemper.call.transforms import all_to_front


def row_weights(scores: Tensor, normalizer: str, number: float = 0.0, alpha: Tensor | None = None) -> Tensor:
    """Weights along the last dimension of ``scores``, -inf where hidden; twice differentiable.

    Args:
        scores: [..., n], float32 or float64.
        normalizer: a name of ``backends.normalizers.NORMALIZERS`` whose weights sum to 1.
        number: k of "topk", min_weight of "threshold", alpha of "entmax".
        alpha: [...], alpha of each row instead of ``number``; differentiated.
    """
    if transforms.active():
        return _nestable(scores, alpha, normalizer, float(number))
    transforms.refuse_in_graph(normalizer)
    return torch.ops.attemper.row_weights(scores, alpha, normalizer, float(number))


def largest_keys(scores: Tensor, k: int) -> Tensor:
    """Whether each of ``scores`` [..., n] is among the k largest of its row; of equal ones, those of lower index."""
    return largest(scores, k)


def entmax_iterations(scores: Tensor, number: float = 0.0, alpha: Tensor | None = None) -> Tensor:
    """How many evaluations "entmax" in PyTorch takes for each row, [...] int64."""
    with torch.no_grad():
        return iterations(_matrix(scores), number, _vector(alpha)).reshape(scores.shape[:-1])


def _matrix(tensor: Tensor) -> Tensor:
    """[rows, n]; by the numbers, since a -1 says nothing where n is 0."""
    return tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1]).contiguous()


def _vector(alpha: Tensor | None) -> Tensor | None:
    return None if alpha is None else alpha.reshape(-1)


def _in_cpp(tensor: Tensor, normalizer: str) -> bool:
    """For float32 on a CPU that the native library serves, by a normalizer that it knows; else in PyTorch."""
    served = normalizer in CODES and tensor.device.type == "cpu" and tensor.dtype == torch.float32
    return served and why_unusable() is None


def _like_first(first: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(first, memory_format=torch.contiguous_format)


@operator("row_weights(Tensor scores, Tensor? alpha, str normalizer, float number) -> Tensor", _like_first)
def _weights(scores: Tensor, alpha: Tensor | None, normalizer: str, number: float) -> Tensor:
    rows, each = _matrix(scores), _vector(alpha)
    with torch.no_grad():
        if not _in_cpp(scores, normalizer):
            return NORMALIZERS[normalizer].weights(rows, number, each).reshape(scores.shape)
        result = native_rows.weights(rows, normalizer, number, each)
        if each is not None and bool((strange := ~((each >= 1) & each.isfinite())).any()):
            result[strange] = math.nan  # as in PyTorch: no weights without an alpha
        return result.reshape(scores.shape)


@operator(
    "row_gradient(Tensor weights, Tensor grad, Tensor? alpha, str normalizer, float number) -> Tensor", _like_first
)
def _score_gradient(weights: Tensor, grad: Tensor, alpha: Tensor | None, normalizer: str, number: float) -> Tensor:
    rows, upstream, each = _matrix(weights), _matrix(grad), _vector(alpha)
    with torch.no_grad():
        # Above alpha = 2 PyTorch: it holds negative powers of small weights in range.
        steep = normalizer == "entmax" and bool((each > 2).any() if each is not None else number > 2)
        if steep or not _in_cpp(weights, normalizer):
            result = NORMALIZERS[normalizer].gradient(rows, upstream, number, each)
        else:
            result = native_rows.gradient(rows, upstream, normalizer, number, each)
        return result.reshape(weights.shape).contiguous()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, alpha, ctx.normalizer, ctx.number = inputs
    ctx.save_for_backward(output, alpha)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    weights, alpha = ctx.saved_tensors
    differentiated = torch.is_grad_enabled() and (weights.requires_grad or grad.requires_grad)
    again = differentiated or transforms.forward_mode()
    scores = None
    if ctx.needs_input_grad[0]:
        scores = (
            NORMALIZERS[ctx.normalizer].gradient(weights, grad, ctx.number, alpha)
            if again
            else torch.ops.attemper.row_gradient(weights, grad, alpha, ctx.normalizer, ctx.number)
        )
    return scores, alpha_gradient(weights, grad, alpha) if ctx.needs_input_grad[1] else None, None, None


def _tangent(ctx: Any, of_scores: Tensor | None, of_alpha: Tensor | None, *_: Any) -> Tensor:
    """How the weights move when scores and alpha do. The Jacobian of every normalizer is symmetric."""
    weights, alpha = ctx.saved_tensors
    tangent = torch.zeros_like(weights)
    if of_scores is not None:
        tangent = tangent + NORMALIZERS[ctx.normalizer].gradient(weights, of_scores, ctx.number, alpha)
    if of_alpha is not None and alpha is not None:
        tangent = tangent + by_alpha(weights, alpha) * of_alpha[..., None]
    return tangent


def _vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
    *tensors, normalizer, number = args
    scores, alpha = all_to_front(info, in_dims, *tensors)
    return row_weights(scores, normalizer, number, alpha), 0


def _refuse_second_derivative(*_: Any) -> None:
    raise AssertionError("row_gradient is for gradients that nobody differentiates")


torch.library.register_autograd("attemper::row_weights", _gradient, setup_context=_setup_context, lib=LIBRARY)
torch.library.register_autograd("attemper::row_gradient", _refuse_second_derivative, lib=LIBRARY)


_nestable = transforms.nestable(torch.ops.attemper.row_weights, _setup_context, _gradient, _tangent, _vmap)


def _weights_vmap(
    info: Any, in_dims: tuple[int | None, ...], scores: Tensor, alpha: Tensor | None, normalizer: str, number: float
) -> tuple[Tensor, int]:
    return torch.ops.attemper.row_weights(*all_to_front(info, in_dims, scores, alpha), normalizer, number), 0


def _gradient_vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
    *tensors, normalizer, number = args
    return torch.ops.attemper.row_gradient(*all_to_front(info, in_dims, *tensors), normalizer, number), 0


torch.library.register_vmap("attemper::row_weights", _weights_vmap, lib=LIBRARY)
torch.library.register_vmap("attemper::row_gradient", _gradient_vmap, lib=LIBRARY)
