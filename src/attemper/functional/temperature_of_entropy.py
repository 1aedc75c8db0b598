"""The temperature at which attention has a wanted entropy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attemper.checks import one_of
from attemper.errors import InputError
from attemper.functional.measures import divisor_of, floating, keys_last, quotient
from attemper.functional.temperature_search import SolvedTemperature, search

LAWS = ("log", "yarn", "llama4")
"""How a temperature may follow the number of keys: ``length_temperature``."""


def temperature_for_entropy(
    scores: Tensor,
    target: float | Tensor,
    *,
    dim: int = -1,
    mean_over: int | Sequence[int] = (),
    bias: Tensor | None = None,
) -> SolvedTemperature:
    r"""The temperature T at which ``softmax(scores / T + bias)`` has the entropy ``target``.

    Without a bias the entropy only rises with T (:func:`entropy_slope`), from log(number of keys that share the
    maximum) to log(visible keys): between them there is exactly one T, outside there is none. It is found by Newton
    steps inside a bracket, on

    .. math:: \varphi(\beta) = \log\frac{\log n - H}{H - \log m}, \quad \beta = 1 / T

    which is nearly 2 log beta + const where weights are flat, and nearly proportional to beta where they are sharp.
    With a bias the entropy may rise and fall: among the solutions that a fine search finds, the one nearest to T = 1
    (in log T) is taken.

    Args:
        scores: q.k scaled, before temperature, floating; ``-inf`` hides a key. [..., n] for ``dim=-1``.
        target: nats; broadcastable to the result.
        dim: the dimension of the keys.
        mean_over: dimensions of ``scores`` whose rows share one temperature: their mean entropy is held at the target.
            Scores [B, H, Q, K] with ``mean_over=(0, 2)`` give one temperature per head.
        bias: in logits, not divided by T, broadcastable to ``scores``: a position bias. ``-inf`` hides a key.

    Returns:
        ``SolvedTemperature``, off the graph. An unreachable target has ``reached`` False and the nearest entropy:
        T = inf above log n, and below the limit of ties a T so small that only the tied keys have weight. Where every T
        gives the same entropy, T is 1. A row that sees no key, or has a score that is NaN or +inf, is left out of
        means; alone it has T = 1, entropy 0 (NaN for such scores), and is not reached.

    Raises:
        InputError: scores, bias or a tensor of targets are not floating or do not fit, a target is NaN, ``dim`` or
            ``mean_over`` name no dimension, or ``mean_over`` has that of the keys.

    Example:
        >>> solved = temperature_for_entropy(torch.tensor([0.0, 1.0, 4.0]), 0.5)
        >>> round(solved.entropy.item(), 6), solved.reached.item()
        (0.5, True)
    """
    where = "temperature_for_entropy"
    y = keys_last(where, scores.detach() if isinstance(scores, Tensor) else scores, dim)
    axes = _row_axes(mean_over, scores.dim(), dim)
    logits = None if bias is None else _group(_double(_fitted_bias(where, bias, scores, dim).detach()), axes)
    shape = [1 if axis in axes else size for axis, size in enumerate(y.shape[:-1])]
    goal = _double(_targets(target, shape, y.device)).reshape(-1)
    if y.shape[-1] == 0:
        raise InputError(f"{where}(scores) has no keys: {list(scores.shape)} along dim={dim}.")
    with torch.no_grad():
        found = search(_group(_double(y), axes), logits, goal)
    return SolvedTemperature(*(part.reshape(shape).to(scores.device, _type(part, scores)) for part in found))


def entropy_slope(
    scores: Tensor, temperature: float | Tensor = 1.0, *, dim: int = -1, bias: Tensor | None = None
) -> Tensor:
    r"""Derivative of the entropy of ``softmax(scores / temperature + bias)`` with respect to the temperature.

    .. math::
        \frac{dH}{dT} = \frac{1}{T} \mathrm{Cov}_p(s, x)
                      = \frac{1}{T} \sum_j p_j (s_j - E_p[s]) (x_j - E_p[x]), \quad x = y / T, \ s = x + b

    Without a bias s is x, so it is :math:`\mathrm{Var}_p(y) / T^3 \ge 0`: entropy only rises with temperature. With a
    bias, which temperature does not divide, it can fall.

    Args:
        scores: y, floating; ``-inf`` hides a key.
        temperature: positive, no unit; broadcastable to ``scores`` without ``dim``. inf gives a slope of 0.
        dim: the dimension of the keys.
        bias: b in logits, floating, broadcastable to ``scores``: a position bias, ALiBi. ``-inf`` hides a key.

    Returns:
        [...] without ``dim``, nats per unit of temperature, float32, or float64 for float64 scores. A row with nothing
        visible gives 0. Differentiable, twice.

    Raises:
        InputError: scores or bias are not floating, they or a tensor of temperatures do not fit together, there is no
            such ``dim``, or a number temperature is NaN or not above 0.

    Source:
        dH/ds_j = -p_j (s_j - E_p[s]) and ds_j/dT = -x_j / T; derived in docs/lab/temperature.md.

    Example:
        >>> entropy_slope(torch.tensor([0.0, 1.0])).item() > 0
        True
    """
    y = keys_last("entropy_slope", scores, dim)
    b = None if bias is None else _fitted_bias("entropy_slope", bias, scores, dim).to(y.dtype)
    visible = y != -math.inf
    if b is not None:
        visible = visible & (b != -math.inf)
        b = torch.where(visible, b, 0.0)
    hidden = torch.where(visible, y, 0.0)
    divisor = divisor_of("entropy_slope", temperature, y)
    x = quotient(hidden, divisor)
    slope = covariance(x, x if b is None else x + b, visible)
    return slope / (divisor[..., 0] if isinstance(divisor, Tensor) else divisor)


def length_temperature(n: float | Tensor, reference: float, law: str = "log", *, beta: float = 0.1) -> float | Tensor:
    r"""The temperature, which divides, of attention over ``n`` keys for a model at home with ``reference`` keys.

    .. math::
        \text{log:}\ \frac{\log reference}{\log n} \qquad
        \text{yarn:}\ (0.1 \log \tfrac{n}{reference} + 1)^{-2} \qquad
        \text{llama4:}\ (1 + \beta \log(1 + \lfloor n / reference \rfloor))^{-1}

    - "log": a key that stands log(reference) above all others keeps half of the weight at any length. Models that
      multiply queries by log(n) / log(reference) ("logn attention") are this law, and so is scalable softmax, s log(n),
      with s = 1 / log(reference).
    - "yarn" is what transformers' ``rope_parameters`` of type "yarn" do with ``factor = n / reference``: their
      ``attention_factor`` multiplies queries and keys alike, hence the square. 1 up to the reference.
    - "llama4" is transformers' ``attn_temperature_tuning`` with ``floor_scale = reference`` and ``attn_scale = beta``,
      whose n is the place of the query, counted from 1.

    Args:
        n: keys that a query sees, or its place; a number, or a tensor of any shape.
        reference: keys that the model was trained with; above 1 for "log".
        law: "log", "yarn" or "llama4".
        beta: of "llama4".

    Returns:
        A number, or a tensor in the shape of ``n``, float64 if ``n`` is and else float32. At one key "log" gives inf,
        which a single key does not feel.

    Raises:
        InputError: the law is unknown, ``reference`` or ``n`` (a number) is too small, or a tensor is not of numbers.

    Example:
        >>> round(length_temperature(1024, 32), 6)
        0.5
    """
    one_of("length_temperature(law=...)", law, LAWS)
    least = 1.0 if law == "log" else 0.0
    if isinstance(reference, bool) or not isinstance(reference, (int, float)) or not least < reference < math.inf:
        raise InputError(f"length_temperature(reference=...) must be a number above {least:g}, got {reference!r}.")
    if not isinstance(n, Tensor):
        if isinstance(n, bool) or not isinstance(n, (int, float)) or not 1 <= n < math.inf:
            raise InputError(f"length_temperature(n) must be a number of keys of at least 1, got {n!r}.")
        return float(_law(torch.tensor(n, dtype=torch.float64), float(reference), law, beta))
    if n.dtype == torch.bool or n.is_complex():
        raise InputError(f"length_temperature(n) must hold numbers of keys, got {n.dtype}.")
    return _law(n if n.dtype == torch.float64 else n.float(), float(reference), law, beta)


def _type(part: Tensor, scores: Tensor) -> torch.dtype:
    return torch.float32 if part.dtype == torch.float64 and scores.device.type == "mps" else part.dtype


def _double(tensor: Tensor) -> Tensor:
    """In float64; on the CPU where the device has none."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def _targets(target: float | Tensor, shape: list[int], device: torch.device) -> Tensor:
    if not isinstance(target, Tensor):
        if isinstance(target, bool) or not isinstance(target, (int, float)) or math.isnan(target):
            raise InputError(f"temperature_for_entropy(target) must be an entropy in nats, got {target!r}.")
        return torch.full(shape, float(target), dtype=torch.float32 if device.type == "mps" else torch.float64)
    if not target.dtype.is_floating_point or bool(target.isnan().any()):
        raise InputError("temperature_for_entropy(target) must hold entropies in nats, floating and without NaN.")
    try:
        return target.detach().expand(shape)
    except RuntimeError as error:
        raise InputError(
            f"temperature_for_entropy(target) must be broadcastable to {shape}, one for each temperature, got "
            f"{list(target.shape)}."
        ) from error


def _row_axes(mean_over: int | Sequence[int], count: int, dim: int) -> set[int]:
    """``mean_over`` as dimensions of the scores once their keys are last."""
    asked = (mean_over,) if isinstance(mean_over, int) else tuple(mean_over)
    keys, axes = dim % count, set()
    for axis in asked:
        if isinstance(axis, bool) or not isinstance(axis, int) or not -count <= axis < count or axis % count == keys:
            raise InputError(
                f"temperature_for_entropy(mean_over={mean_over!r}) must name dimensions of {count}-dimensional scores "
                f"other than dim={dim}, that of the keys."
            )
        axes.add(axis % count - (axis % count > keys))
    return axes


def _group(rows: Tensor, axes: set[int]) -> Tensor:
    """[..., n] as [groups, rows of a group, n]."""
    kept = [axis for axis in range(rows.dim() - 1) if axis not in axes]
    moved = rows.permute(*kept, *sorted(axes), rows.dim() - 1)
    return moved.reshape(math.prod(rows.shape[axis] for axis in kept), -1, rows.shape[-1])


def _fitted_bias(where: str, bias: Tensor, scores: Tensor, dim: int) -> Tensor:
    """``bias`` in the shape of the scores, with the dimension of the keys at the end."""
    try:
        return keys_last(where, floating(where, "bias", bias).expand(scores.shape), dim, "bias")
    except RuntimeError as error:
        raise InputError(
            f"{where}(bias) must be broadcastable to the scores {list(scores.shape)}, got {list(bias.shape)}."
        ) from error


def covariance(x: Tensor, s: Tensor, visible: Tensor) -> Tensor:
    """Cov_p(s, x) under p = softmax(s) of the visible keys, along the last dimension; 0 where there are none."""
    if x.shape[-1] == 0:
        return x.new_zeros(x.shape[:-1])
    top = torch.where(visible, s, -math.inf).argmax(-1, keepdim=True)
    # Relative to the key of the largest score: a covariance is free of shifts, and large offsets would cost digits.
    near, above = s - s.gather(-1, top).detach(), x - x.gather(-1, top).detach()
    e = torch.where(visible, torch.exp(near), 0.0)
    p = e / torch.where(visible.any(-1, keepdim=True), e.sum(-1, keepdim=True), 1.0)
    # A key without weight counts for nothing, however far it is: its distance squared may overflow. NaN stays.
    counts = ~(p == 0)
    near, above = torch.where(counts, near, 0.0), torch.where(counts, above, 0.0)
    near, above = (part - (p * part).sum(-1, keepdim=True) for part in (near, above))
    return (p * near * above).sum(-1)


def _law(n: Tensor, reference: float, law: str, beta: float) -> Tensor:
    if law == "log":
        return math.log(reference) / n.log()
    if law == "yarn":
        return (0.1 * (n / reference).clamp(min=1.0).log() + 1).square().reciprocal()
    return (1 + beta * torch.log1p(torch.floor(n / reference))).reciprocal()
