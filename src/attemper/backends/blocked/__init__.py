r"""Attention with exact statistics, block by block, in plain PyTorch: any device, every feature.

Forward, per tile of query rows, over blocks of keys (all [n, rows, keys], in cache)::

    x = (scale/T) q.k      s = softcap(x) + bias      m' = max(m, max s)      d = s - m'      e = exp(d)
    Z = r Z + sum e        A = r (A + t Z) + sum e d        B = r (B + 2 t A + t^2 Z) + sum e d^2
    C = r^2 C + sum e^2    O = r O + e V                    with t = m - m' and r = exp(t)

Row sums are carried in float64 and leave as the *state*, everything relative to the row's maximum so that no offset
costs digits::

    m    maximum score                     n    visible keys
    z    log Z           (lse = m + z)     c    C / Z^2         (sum of p^2)
    a    -A / Z          (mu  = m - a)     f    weight on the first tokens
    v    B / Z - (A/Z)^2 (variance)        t    expected distance of query and key          g    gini
    u    m - mean of the scores            y    their variance, both over visible keys without weights

Backward recomputes d from q, k and m; no weight is ever kept. With X = d + a and P = exp(d - z)::

    dS = P [ mass (dP - D) + g_z - g_a (1 + X) + g_v (X^2 + 2X - v) + 2 g_c (P - c)
           + g_f (1[first] - f) + g_t (distance - t) + g_key - sum_j P g_key ] + 1[argmax] (g_m - g_z + g_a + g_u)
         + (2 g_y (d + u) - g_u) / n

Memory: one chunk of keys and values in float32, about five tiles, and the gradients. Weights of n x n never exist.
"""

from __future__ import annotations

from torch import Tensor

from attemper.backends.blocked import rowwise as _rows
from attemper.backends.blocked import softmax_backward as _softmax_backward
from attemper.backends.blocked import softmax_forward as _softmax_forward
from attemper.backends.contract import Gradients, Problem, Upstream

__all__ = ["backward", "forward"]


def forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Output [B, H, Q, E], state [F, B, H, Q], key_mass [B, H, K]; what was not asked has size 0."""
    return _rows.forward(problem) if problem.rowwise else _softmax_forward.forward(problem)


def backward(problem: Problem, output: Tensor, state: Tensor, upstream: Upstream, needs: tuple[bool, ...]) -> Gradients:
    """Gradients for ``problem.differentiable``, those that ``needs`` marks."""
    kernel = _rows if problem.rowwise else _softmax_backward
    return kernel.backward(problem, output, state, upstream, needs)
