r"""sparsemax and entmax of alpha 1.5, by Newton's iteration on the threshold, from the side where it is monotone.

With a = alpha - 1, d_j <= 0 the score relative to the row's maximum and s the unknown, s = -tau::

    u_j = [a d_j + s]+     p_j = u_j^(1/a)     S(s) = sum p_j = 1     R(s) = sum p_j^(1-a)

S^a is the 1/a-norm of u, convex in s for a <= 1. At s = 1 the largest key alone has weight 1, so S >= 1, and the
tangent of a convex function never goes beyond its root::

    s <- s - (S - S^(1-a)) / R

For sparsemax this is Michelot's iteration: it ends after finitely many steps. The last step is added to u and not to s:
beside a large weight, s has not the digits that a hundred thousand small ones need to sum to 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attemper.backends.normalizers.simplex import Normalizer, gradient_by, on_rows

MOST = 100
"""Steps after which an iteration would be given up; a row of 100,000 keys takes about ten."""


def _sparsemax(below: Tensor, scores: Tensor, alpha: Tensor | None) -> Tensor:
    """``below`` [rows, n]: scores relative to the maximum of their row, -inf where hidden; at least one is 0."""
    s = _threshold(below, linear=True)
    u = (below + s).clamp(min=0)
    count = (u > 0).sum(-1, keepdim=True)
    return torch.where(u > 0, u + (1 - u.sum(-1, keepdim=True)) / count, 0.0).clamp(min=0)


def _entmax15(below: Tensor, scores: Tensor, alpha: Tensor | None) -> Tensor:
    half = below / 2
    u = (half + _threshold(half, linear=False)).clamp(min=0)
    left = 1 - u.square().sum(-1, keepdim=True)
    return torch.where(u > 0, u + left / (2 * u.sum(-1, keepdim=True)), 0.0).clamp(min=0).square()


def _threshold(scaled: Tensor, linear: bool) -> Tensor:
    """s, [rows, 1], for a d in ``scaled``; ``linear``: a = 1, else a = 1/2."""
    s = torch.ones_like(scaled[:, :1])
    least = 2 * torch.finfo(scaled.dtype).eps
    for _ in range(MOST):
        u = (scaled + s).clamp(min=0)
        if linear:
            step = (u.sum(-1, keepdim=True) - 1) / (u > 0).sum(-1, keepdim=True)
        else:
            norm = u.square().sum(-1, keepdim=True).sqrt()
            step = (norm * norm - norm) / u.sum(-1, keepdim=True)
        s = s - step.clamp(min=0)
        if bool((step <= least * s).all()):
            break
    return s


SPARSEMAX = Normalizer(lambda scores, number, per_head: on_rows(scores, _sparsemax), gradient_by(torch.ones_like))
ENTMAX15 = Normalizer(lambda scores, number, per_head: on_rows(scores, _entmax15), gradient_by(torch.sqrt))
