r"""The normalizers that need all keys of a row (docs/design/0008): all that differs from one to the next.

A row is described by its weights relative to the largest, omega = w / w_max in [0, 1], 1 at the maximum score, with
Omega = sum omega; d = s - m are scores relative to the row's maximum, e = alpha - 1, pi the largest weight::

    entmax family   omega = [1 + u]_+^(1/e),  u = d e pi^-e     (sparsemax: e = 1; entmax15: e = 1/2)
    top-k           omega = exp(d) where d > x, and on the first of those with d = x
    threshold       omega = exp(d) where exp(d) >= x
    sigmoid         omega = sigmoid(z) / sigmoid(z_max),  z = s + bias

All but sigmoid sum to 1: w = omega / Omega, whatever rounding pi has; of sigmoid w = omega sigmoid(z_max). What a row's
normalizer needs is ``(first, second)`` [M] and a ``number`` of the head, as ``parameters`` makes them.

Gradients, with g_j the gradient of weight w_j and p = omega / Omega::

    entmax family   ds = r (g - sum r g / sum r),   r = p^(1 - e) on the support
    top-k, threshold   the same with r = p          sigmoid   ds = w (1 - w) g
"""

from __future__ import annotations

import triton
import triton.language as tl

from attemper.backends.triton.softmax.state import LN2_HIGH, LN2_LOW, exponential, log_of

SPARSEMAX, ENTMAX15, ENTMAX, TOPK, THRESHOLD, SIGMOID = (tl.constexpr(code) for code in range(1, 7))
CODES = {
    "sparsemax": SPARSEMAX.value,
    "entmax15": ENTMAX15.value,
    "entmax": ENTMAX.value,
    "topk": TOPK.value,
    "threshold": THRESHOLD.value,
    "sigmoid": SIGMOID.value,
}
"""The name in ``Problem.normalizer`` and its code, CALL.NORMALIZER."""

LIMIT_OF_SOFTMAX = tl.constexpr(1e-6)
"""Of e: below it entmax is softmax."""
LARGEST_POWER = tl.constexpr(60.0)
"""Of log r: for e > 1 it grows without limit where a weight falls to 0, and is held below overflow."""
LARGEST = tl.constexpr(3e38)
EVERY = tl.constexpr(2147483647)
"""As the first key whose tie does not count: all ties do."""
MIN_WEIGHT_SLACK = tl.constexpr(1.0 - 4 * 2.0**-23)
"""A weight of exactly 1/n of n equal keys stays at min_weight = 1/n."""


@triton.jit
def log1p(u):
    """log(1 + u) for u > -1, to a unit or two in the last place also next to 0 and to -1.

    1 + u = 2^k f with f in [3/4, 3/2); log f = 2 atanh(x / (2 + x)), x = f - 1: u itself where k = 0.
    """
    total = 1.0 + u
    bits = total.to(tl.int32, bitcast=True)
    k = (bits - 0x3F400000) >> 23
    f = (bits - (k << 23)).to(tl.float32, bitcast=True)
    x = tl.where(k == 0, u, f - 1.0)
    t = x / (2.0 + x)
    w = t * t
    series = t * w * (2.0 / 3 + w * (2.0 / 5 + w * (2.0 / 7 + w * (2.0 / 9 + w * (2.0 / 11)))))
    whole = k.to(tl.float32)
    return whole * LN2_HIGH + (2.0 * t + (series + whole * LN2_LOW))


@triton.jit
def number_of(per_head, head, given, CALL: tl.constexpr):
    """The head's number: e of the entmax family, the bias of sigmoid; what was ``given`` (k, min_weight) elsewhere."""
    if CALL.NORMALIZER == SPARSEMAX:
        return 1.0
    if CALL.NORMALIZER == ENTMAX15:
        return 0.5
    if CALL.NORMALIZER == ENTMAX:
        return (tl.load(per_head + head).to(tl.float64) - 1.0).to(tl.float32)
    if CALL.NORMALIZER == SIGMOID:
        return tl.load(per_head + head).to(tl.float32)
    return given


@triton.jit
def parameters(x, m, limit, number, CALL: tl.constexpr, RELATIVE: tl.constexpr):
    """``(first, second)`` [M] for ``shares``, from what was found on the row, x.

    RELATIVE, of sigmoid: weights relative to the largest; if not, as they are.
    """
    first, second = x, limit
    if CALL.NORMALIZER == SPARSEMAX:
        first = 1.0 / x
    if CALL.NORMALIZER == ENTMAX15:
        first = 0.5 / tl.sqrt(x)
    if CALL.NORMALIZER == ENTMAX:
        # pi^-e may be beyond float32: then only ties of the maximum are in the support, here as there.
        level = tl.minimum(-number * log_of(x, 0.0 * x) * 1.4426950408889634, 127.0)
        first = tl.minimum(number * tl.exp2(level), LARGEST)
    if CALL.NORMALIZER == SIGMOID:
        first = 0.0 * m
        if RELATIVE:
            first = m + number
    return first, second


@triton.jit
def _log_sigmoid_rest(z):
    """log(1 + exp(-|z|)): log sigmoid(z) = min(z, 0) minus this."""
    return log1p(exponential(-tl.abs(z)))


@triton.jit
def sigmoid(z):
    return 1.0 / (1.0 + exponential(-z))


@triton.jit
def shares(s, d, visible, place, first, second, number, CALL: tl.constexpr, LOGS: tl.constexpr, RELATIVE: tl.constexpr):
    """omega [M, N], 0 where hidden, and log omega where it is not 0 (LOGS; 0 elsewhere)."""
    logs = d
    if CALL.NORMALIZER == TOPK:
        kept = (d > first[:, None]) | ((d == first[:, None]) & (place[None, :] < second[:, None]))
        omega = tl.where(kept, exponential(d), 0.0)
    elif CALL.NORMALIZER == THRESHOLD:
        e = exponential(d)
        omega = tl.where(e >= first[:, None], e, 0.0)
    elif CALL.NORMALIZER == SIGMOID:
        z = s + number
        if RELATIVE:
            top = first[:, None]
            # Where every weight is small they are as exp(d), and d has more digits than z.
            logs = tl.where(top < 0, d, tl.minimum(z, 0.0)) - (_log_sigmoid_rest(z) - _log_sigmoid_rest(top))
            omega = exponential(logs)
        else:
            omega = sigmoid(z)
    else:
        u = d * first[:, None]
        omega = tl.maximum(1.0 + u, 0.0)
        if CALL.NORMALIZER == ENTMAX15:
            omega = omega * omega
        if LOGS or CALL.NORMALIZER == ENTMAX:
            inside = u > -1.0
            logs = log1p(tl.where(inside, u, 0.0))
            if CALL.NORMALIZER == ENTMAX15:
                logs = logs * 2.0
            if CALL.NORMALIZER == ENTMAX:
                limit = number < LIMIT_OF_SOFTMAX
                logs = tl.where(limit, d, logs / tl.where(limit, 1.0, number))
                omega = tl.where(inside, exponential(logs), 0.0)
    omega = tl.where(visible, omega, 0.0)
    if LOGS:
        logs = tl.where(omega > 0, logs, 0.0)
    return omega, logs


@triton.jit
def growth(omega, logs, number, CALL: tl.constexpr):
    """omega^(1 - e) on the support [M, N]: what a weight of the entmax family grows by with pi."""
    if CALL.NORMALIZER == SPARSEMAX:
        return tl.where(omega > 0, 1.0, 0.0)
    if CALL.NORMALIZER == ENTMAX15:
        return tl.sqrt(omega)
    return tl.where(omega > 0, exponential(tl.minimum((1.0 - number) * logs, LARGEST_POWER)), 0.0)


@triton.jit
def largest(m, number):
    """The largest weight of sigmoid, [M], of rows that see a key."""
    return sigmoid(tl.where(m == -float("inf"), 0.0, m) + number)


@triton.jit
def gradient_weights(p, logs, log_total, number, CALL: tl.constexpr):
    """r [M, N] of all normalizers but sigmoid. ``log_total`` [M]: log Omega."""
    if CALL.NORMALIZER == SPARSEMAX:
        return tl.where(p > 0, 1.0, 0.0)
    if CALL.NORMALIZER == ENTMAX15:
        return tl.sqrt(p)
    if CALL.NORMALIZER == ENTMAX:
        power = tl.minimum((1.0 - number) * (logs - log_total[:, None]), LARGEST_POWER)
        return tl.where(p > 0, exponential(power), 0.0)
    return p


@triton.jit
def alpha_terms(p, logs, log_total, number):
    """``(y, b)`` [M, N] on the support: y = log p and b = y^2 phi(-e y), phi(x) = (exp(x) - 1 - x) / x^2.

    With B = sum p b, H = -sum p y and R = sum r: dp/dalpha = p / R (B - b - e (y B + b H)).
    """
    y = tl.where(p > 0, logs - log_total[:, None], 0.0)
    x = tl.maximum(-number * y, 0.0)
    near = 0.5 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720 + x * (1 / 5040 + x * (1 / 40320))))))
    safe = tl.minimum(tl.where(x < 0.5, 1.0, x), 80.0)
    far = (exponential(safe) - 1.0 - safe) / (safe * safe)
    return y, y * y * tl.where(x < 0.5, near, far)
