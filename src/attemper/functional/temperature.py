"""The temperature at which attention has a wanted entropy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attemper.errors import InputError
from attemper.functional.crossing import crossed
from attemper.functional.score_rows import floating, with_keys_last
from attemper.functional.slope import fitting_bias
from attemper.functional.temperature_search import bracketed

TOLERANCE = 1e-7
"""How near the entropy comes to its target, in nats."""


class SolvedTemperature(NamedTuple):
    """What :func:`temperature_for_entropy` found, each [...] without ``dim`` (and 1 where entropies were averaged)."""

    temperature: Tensor
    """Float64: rounded to float32, it moves the entropy by up to Var_p(s) * 6e-8 nats."""
    entropy: Tensor
    """Nats, float64, at that temperature."""
    reached: Tensor
    """Bool: whether the entropy is the target's. If not, this is the nearest there is."""
    evaluations: Tensor
    """How often the entropy of the row was computed, int64."""


def temperature_for_entropy(
    scores: Tensor, target: float | Tensor, *, dim: int = -1, mean_over: int | Sequence[int] = (),
    bias: Tensor | None = None,
) -> SolvedTemperature:  # fmt: skip
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
    y = with_keys_last(where, floating(where, "scores", scores.detach() if isinstance(scores, Tensor) else scores), dim)
    axes = _row_axes(mean_over, scores.dim(), dim)
    wide = _double(y)
    logits = None if bias is None else _double(with_keys_last(where, fitting_bias(where, bias, scores).detach(), dim))
    shape = [1 if axis in axes else size for axis, size in enumerate(y.shape[:-1])]
    goal = _double(_targets(target, shape, y.device)).reshape(-1)
    if y.shape[-1] == 0:
        raise InputError(f"{where}(scores) has no keys: {list(scores.shape)} along dim={dim}.")
    groups, logits = _grouped(wide, axes), None if logits is None else _grouped(logits, axes)
    with torch.no_grad():
        found = bracketed(groups, goal, TOLERANCE) if logits is None else crossed(groups, logits, goal, TOLERANCE)
    return SolvedTemperature(*(part.reshape(shape).to(scores.device, _type(part, scores)) for part in found))


def _type(part: Tensor, scores: Tensor) -> torch.dtype:
    return torch.float32 if part.dtype == torch.float64 and scores.device.type == "mps" else part.dtype


def _double(tensor: Tensor) -> Tensor:
    """In float64; on the CPU where the device has none."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def _targets(target: float | Tensor, shape: list[int], device: torch.device) -> Tensor:
    if not isinstance(target, Tensor):
        if isinstance(target, bool) or not isinstance(target, int | float) or math.isnan(target):
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


def _grouped(rows: Tensor, axes: set[int]) -> Tensor:
    """[..., n] as [groups, rows of a group, n]."""
    kept = [axis for axis in range(rows.dim() - 1) if axis not in axes]
    moved = rows.permute(*kept, *sorted(axes), rows.dim() - 1)
    return moved.reshape(math.prod(rows.shape[axis] for axis in kept), -1, rows.shape[-1])
