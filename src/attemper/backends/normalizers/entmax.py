r"""entmax of any alpha, by a bracketed Newton iteration on the logarithm of the largest weight.

With a = alpha - 1, d_j <= 0 the score relative to the row's maximum, q the largest weight and y = log q::

    p_j = q [1 - rho_j]+^(1/a)     rho_j = a |d_j| q^-a     S(y) = sum p_j = 1     dS/dy = V = sum p_j / (1 - rho_j)

S rises with y; with c keys tied at the maximum among n, y lies between -log n and -log c. Newton's step is that of S^a
as a function of q^a, for a <= 1 the convex function of ``sparsemax.py``::

    y <- y + log(1 - (S - S^(1-a)) / V) / a

so from the right it is monotone there. For a > 1 the derivative of a weight that leaves 0 is infinite: a step that
leaves the bracket, or two that do not halve it, give way to halving. Where a key's weight hangs on less than the last
digit of y, it is what the other keys leave: the result lies between the weights at the two ends of the last bracket.

In float64, whatever the scores: for a = 2, the root of a rounding of 1e-7 would be 3e-4. Differences of powers are
written by expm1 and log1p, so that alpha may come as close to 1 as it likes; alpha = 1 is softmax.

The gradient of alpha, with rt = r / sum r, l_j = log w_j and h_j = -w_j l_j::

    dw_j / dalpha = (w_j - rt_j) / a^2 + (h_j - rt_j sum h) / a  =  rt_j sum_k c_k - c_j
    c_j = (w_j^(1-a) - w_j (1 - a l_j)) / a^2 = w_j l_j^2 psi(-a l_j)     psi(x) = (e^x - 1 - x) / x^2

The first form divides digits that have cancelled by a^2; in the second every term is positive, down to a = 0, where
psi is 1/2. Above a = 1 it could overflow, and the first has nothing left to cancel.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from attemper.backends.normalizers.simplex import Normalizer, below_maximum, on_rows, relative, shares

MOST = 200
"""Evaluations after which a row would be given up. Halving alone needs about 60."""

_SERIES = tuple(1 / math.factorial(k + 2) for k in range(14))
"""psi(x) = sum x^k / (k + 2)!: for x below 0.5 exact in float64."""

_NEAR = 0.5


class _Rows(NamedTuple):
    far: Tensor
    """a |d_j|, [rows, n]; inf where hidden."""
    a: Tensor
    """[rows, 1]."""

    def at(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """p_j and 1 - rho_j at y, [rows, 1]."""
        # Finite, so that 0 times it stays 0: what overflows there is far beyond the support.
        scale = torch.exp(-self.a * y).clamp(max=torch.finfo(y.dtype).max)
        rho = (self.far * scale).clamp(max=1)
        return torch.exp(y + torch.log1p(-rho) / self.a), 1 - rho


def _entmax(below: Tensor, alpha: float | Tensor) -> tuple[Tensor, Tensor]:
    """Weights [rows, n] and how often S was evaluated, [rows] int64.

    ``below`` [rows, n]: scores relative to the maximum of their row, -inf where hidden, at least one of them 0.
    ``alpha``: a number, or [rows]; NaN for a row where it is not a finite number of at least 1.
    """
    wide = torch.float32 if below.device.type == "mps" else torch.float64
    d = below.to(wide)
    a = (alpha.to(wide) - 1)[:, None] if isinstance(alpha, Tensor) else d.new_full((len(d), 1), alpha - 1)
    solvable = (a > 0) & a.isfinite()
    rows = _Rows(torch.where(solvable, a, 1.0) * -d, torch.where(solvable, a, 1.0))
    ties, visible = (d == 0).sum(-1, keepdim=True), (d != -math.inf).sum(-1, keepdim=True)
    low, high, evaluations = _solve(rows, ties, visible)
    p = torch.where(solvable, _between(rows, low, high), math.nan)
    if bool((a == 0).any()):
        p = torch.where(a == 0, torch.softmax(d, -1), p)
    return p.to(below.dtype), torch.where(solvable, evaluations, 0)[:, 0]


def _solve(rows: _Rows, ties: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The ends of the last bracket, or twice the same y where S is 1 there; and how often S was evaluated."""
    dtype, a = rows.a.dtype, rows.a
    low, high = -visible.to(dtype).log(), -ties.to(dtype).log()
    y, evaluations = high, torch.zeros_like(ties)
    going = torch.ones_like(ties, dtype=torch.bool)
    eps = torch.finfo(dtype).eps
    fine = 4 * eps * low.abs().clamp(min=1)
    width, before = (high - low), torch.full_like(y, math.inf)
    for count in range(MOST):
        p, rest = rows.at(y)
        total = p.sum(-1, keepdim=True)
        evaluations = evaluations + going
        hit = going & ((total - 1).abs() <= 4 * eps)
        above = total > 1
        low = torch.where(hit | (going & ~above), y, low)
        high = torch.where(hit | (going & above), y, high)
        going = going & ~hit & (high - low > 4 * fine)
        if not bool(going.any()):
            break
        logarithm = total.log()
        rise = torch.where(rest > 0, p / rest, 0.0).sum(-1, keepdim=True)
        step = torch.log1p(torch.expm1(-a * logarithm) * total / rise) / a
        # A step shorter than the digits of y goes a little further: it closes the bracket from the other side.
        step = torch.where(step.abs() < fine, torch.copysign(2 * fine, step), step)
        halve = ~((y + step > low) & (y + step < high))
        if count % 2:
            halve |= (high - low > width / 2) & (logarithm.abs() > before / 2)
            width, before = high - low, logarithm.abs()
        y = torch.where(going, torch.where(halve, (low + high) / 2, y + step), y)
    return low, high, evaluations


def _between(rows: _Rows, *ends: Tensor) -> Tensor:
    """Weights of sum 1, each between those at the two ends."""
    low, high = (rows.at(end)[0] for end in ends)
    least, most = low.sum(-1, keepdim=True), high.sum(-1, keepdim=True)
    gap = torch.where(most > least, most - least, 1.0)
    share = torch.where(most > least, (1 - least) / gap, 0.0).clamp(0, 1)
    p = low + share * (high - low)
    return p / p.sum(-1, keepdim=True)


def _weights(scores: Tensor, number: float = 0.0, per_head: Tensor | None = None) -> Tensor:
    """``number``: alpha, where no row has its own."""
    return on_rows(scores, lambda below, _, alpha: _entmax(below, number if alpha is None else alpha)[0], per_head)


def iterations(scores: Tensor, number: float = 0.0, alpha: Tensor | None = None) -> Tensor:
    """How often the sum of the weights of each row was evaluated, [rows] int64."""
    below, good = below_maximum(scores)
    return torch.where(good, _entmax(below, number if alpha is None else alpha)[1], 0)


def _gradient(weights: Tensor, grad: Tensor, number: float = 0.0, per_head: Tensor | None = None) -> Tensor:
    """r (g - sum(r g) / sum r) from log r: that of the largest r is minus the sum of the others, so no digit cancels.

    Above alpha = 2, r grows without limit where a weight falls to 0. It is held at the root of the largest number.
    """
    if weights.shape[-1] == 0:
        return grad
    support = ~(weights == 0)  # a NaN stays, and shows
    w = torch.where(support, weights, 1.0)
    power = 2 - number if per_head is None else (2 - per_head.to(w.dtype))[..., None]
    log_r = power * w.log()
    ranks = torch.where(support, log_r, -math.inf)
    largest = torch.zeros_like(support).scatter(-1, ranks.detach().argmax(-1, keepdim=True), True)
    g = relative(ranks, grad, support)
    mean = (shares(log_r, support) * g).sum(-1, keepdim=True)
    r = log_r.clamp(max=math.log(torch.finfo(log_r.dtype).max) / 2).exp()
    others = torch.where(support & ~largest, r * (g - mean), 0.0)
    return torch.where(support & largest, -others.sum(-1, keepdim=True), others)


def alpha_gradient(weights: Tensor, grad: Tensor, alpha: Tensor) -> Tensor:
    """Gradient of alpha, [...], from the weights [..., n] and theirs."""
    if weights.shape[-1] == 0:
        return torch.zeros_like(alpha)
    moved, support = _by_alpha(weights, alpha)
    return (moved * relative(weights, grad, support)).sum(-1).to(alpha.dtype)


def by_alpha(weights: Tensor, alpha: Tensor) -> Tensor:
    """dw_j / dalpha, [..., n]."""
    return _by_alpha(weights, alpha)[0] if weights.shape[-1] else weights


def _by_alpha(weights: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """dw_j / dalpha, and where a key has weight."""
    support = ~(weights == 0)
    w = torch.where(support, weights, 1.0)
    log_w = w.log()
    a = (alpha.to(w.dtype) - 1)[..., None]
    share = shares((1 - a) * log_w, support)
    small = a <= 1
    c = torch.where(support & small, _curvature(w, log_w, torch.where(small, a, 1.0)), 0.0)
    near = share * c.sum(-1, keepdim=True) - c
    wide = torch.where(small, 2.0, a)
    h = torch.where(support, -w * log_w, 0.0)
    far = (torch.where(support, w, 0.0) - share) / wide**2 + (h - share * h.sum(-1, keepdim=True)) / wide
    return torch.where(small, near, far), support


def _curvature(w: Tensor, log_w: Tensor, a: Tensor) -> Tensor:
    """c_j for 0 <= a <= 1."""
    x = -a * log_w
    close = x < _NEAR
    series = torch.zeros_like(x)
    for coefficient in reversed(_SERIES):
        series = series * torch.where(close, x, 0.0) + coefficient
    divisor = torch.where(close, 1.0, a)
    return torch.where(close, w * log_w**2 * series, (w.pow(1 - a) - w * (1 + x)) / divisor**2)


def _wide(weights: Tensor, alpha: Tensor | None) -> bool:
    """Of n equal weights a term is n^(alpha - 2) times the sum. Read off on the CPU only: elsewhere it would sync."""
    return alpha is not None and (weights.device.type != "cpu" or bool((alpha > 2).any()))


ENTMAX = Normalizer(
    _weights,
    _gradient,
    lambda weights, grad, of_scores, per_head: alpha_gradient(weights, grad, per_head),
    _wide,
    parameter="alpha",
    module="Entmax(alpha)",
)
