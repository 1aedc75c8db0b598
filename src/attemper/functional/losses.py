"""Losses on the statistics of attention; gradients flow through the kernel that gave them, without any weights.

Each takes a tensor [B, H, Q] or an ``AttentionStats`` with the statistic. Of ``AttentionStats`` only the valid rows
count, those that see a key and have finite scores; of a tensor every entry counts, unless ``valid`` says otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attemper.call.result import AttentionStats
from attemper.errors import InputError

Rows = Tensor | AttentionStats


def entropy_bonus(entropy: Rows, coef: float = 0.01, *, valid: Tensor | None = None) -> Tensor:
    """``-coef * mean H``: lower when attention is spread. Add it to a loss to keep heads from collapsing.

    Args:
        entropy: [B, H, Q] nats, or statistics with it.
        coef: what a nat of mean entropy is worth; negative to sharpen.
        valid: bool, broadcastable: rows that count.

    Returns:
        A number. 0 where no row counts.

    Raises:
        InputError: the statistics lack the entropy, or ``valid`` does not fit.
    """
    return -coef * _mean(*_rows("entropy_bonus", "entropy", entropy, valid))


def entropy_target(
    entropy: Rows, alpha: float | Tensor, *, tolerance: float = 0.0, valid: Tensor | None = None
) -> Tensor:
    r"""How far rows are from an entropy.

    .. math:: \operatorname{mean} \max(|H - \alpha| - tolerance, 0)^2

    Args:
        entropy: [B, H, Q] nats, or statistics with it.
        alpha: the target in nats, from 0 (one key) to log n (all alike); a tensor broadcastable to the entropy, [H, 1]
            for one per head.
        tolerance: nats around the target that cost nothing.
        valid: bool, broadcastable: rows that count.

    Returns:
        A number in square nats. 0 where no row counts.

    Raises:
        InputError: the statistics lack the entropy, ``alpha`` or ``valid`` do not fit, or the tolerance is negative.

    Source:
        The penalty (H - alpha)^2 of the article on controlling attention by entropy (docs/articles), from row
        statistics where that needs the dense weights.
    """
    if not tolerance >= 0:
        raise InputError(f"entropy_target(tolerance=...) must be at least 0 nats, got {tolerance!r}.")
    values, valid = _rows("entropy_target", "entropy", entropy, valid)
    try:
        away = (values - alpha).abs()
    except RuntimeError as error:
        came = list(alpha.shape) if isinstance(alpha, Tensor) else alpha
        raise InputError(f"entropy_target(alpha=...) must fit entropies {list(values.shape)}, got {came}.") from error
    if away.shape != values.shape:
        raise InputError(
            f"entropy_target(alpha=...) must be broadcastable to entropies {list(values.shape)}; it would widen them "
            f"to {list(away.shape)}."
        )
    return _mean((away - tolerance).clamp(min=0).square(), valid)


def entropy_diversity(entropy: Rows, *, valid: Tensor | None = None) -> Tensor:
    r"""Heads of a layer should differ: the negative variance of their mean entropies.

    .. math:: -\frac{1}{H} \sum_h (\bar H_h - \bar H)^2, \quad \bar H_h = \operatorname{mean}_{b, q} H_{b h q}

    Args:
        entropy: [B, H, Q] nats, or statistics with it.
        valid: bool, broadcastable: rows that count.

    Returns:
        A number in square nats, 0 or below; 0 for one head. A head without a row that counts is left out.

    Raises:
        InputError: the tensor has not three dimensions, the statistics lack the entropy, or ``valid`` does not fit.
    """
    values, valid = _rows("entropy_diversity", "entropy", entropy, valid)
    if values.dim() != 3:
        raise InputError(f"entropy_diversity(entropy) must be [B, H, Q], got {list(values.shape)}.")
    valid = torch.ones_like(values, dtype=torch.bool) if valid is None else valid
    counts = valid.sum((0, 2))
    means = torch.where(valid, values, 0.0).sum((0, 2)) / counts.clamp(min=1)
    has = counts > 0
    heads = has.sum().clamp(min=1)
    centre = torch.where(has, means, 0.0).sum() / heads
    return -torch.where(has, (means - centre).square(), 0.0).sum() / heads


def z_loss(lse: Rows, *, valid: Tensor | None = None) -> Tensor:
    """``mean lse^2``: keeps the logits of attention from drifting away, as the z-loss of an output layer does.

    Args:
        lse: [B, H, Q] log of the sum of exp(scores), or statistics with it.
        valid: bool, broadcastable: rows that count. Rows that see no key (lse -inf) must not: an ``AttentionStats``
            knows them.

    Returns:
        A number. 0 where no row counts.

    Raises:
        InputError: the statistics lack the lse, or ``valid`` does not fit.

    Source:
        The auxiliary loss of PaLM (Chowdhery et al., 2022) for the output softmax, on the softmax of attention.
    """
    values, valid = _rows("z_loss", "lse", lse, valid)
    return _mean((values if valid is None else torch.where(valid, values, 0.0)).square(), valid)


def _rows(where: str, name: str, given: Rows, valid: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The statistic's tensor, and which of its entries count."""
    if isinstance(given, AttentionStats):
        if name not in given:
            raise InputError(f"{where} needs the statistic {name!r}: ask attention for stats={name!r}.")
        values, own = given[name], given.valid
    elif isinstance(given, Tensor) and given.dtype.is_floating_point:
        values, own = given, None
    else:
        came = given.dtype if isinstance(given, Tensor) else type(given).__name__
        raise InputError(f"{where}({name}) must be a floating tensor or an AttentionStats, got {came}.")
    if valid is None:
        return values, own
    if not isinstance(valid, Tensor) or valid.dtype != torch.bool:
        raise InputError(f"{where}(valid=...) must be a bool tensor: True for rows that count.")
    try:
        valid = valid.expand(values.shape)
    except RuntimeError as error:
        raise InputError(
            f"{where}(valid=...) must be broadcastable to {list(values.shape)}, got {list(valid.shape)}."
        ) from error
    return values, valid if own is None else valid & own


def _mean(values: Tensor, valid: Tensor | None) -> Tensor:
    """Over the entries that count; summed in float64 where the device has it."""
    wide = torch.float32 if values.device.type == "mps" else torch.float64
    if valid is None:
        return values.mean(dtype=wide).to(values.dtype) if values.numel() else values.sum()
    total = torch.where(valid, values, 0.0).sum(dtype=wide)
    return (total / valid.sum().clamp(min=1)).to(values.dtype)
