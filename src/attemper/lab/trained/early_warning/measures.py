"""What a run measures of its attention: numbers per head, as plain functions of what a layer computed.

Definitions are those of ``attemper.statistics`` where the quantity is the same, so that default alarms can be judged.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attemper.lab.trained.early_warning.attention import Moment, WrittenOutAttention
from attemper.readings.reading import FEWEST_KEYS

PER_HEAD = (
    "max_logit",
    "score_std",
    "logit_std",
    "entropy",
    "normalized_entropy",
    "first_token_mass",
    "disagreement",
)
"""What :func:`of_moment` gives."""


def of_moment(moment: Moment) -> dict[str, Tensor]:
    """Name -> [H], over examples and rows.

    ``max_logit``; ``score_std``: root of the mean over rows of the plain variance of the visible scores; ``logit_std``:
    the same under the weights; ``entropy``: mean over rows, nats; ``normalized_entropy`` and ``first_token_mass``: over
    the rows that see at least 32 keys (or the second half, in a shorter context), as alarms judge them;
    ``disagreement``: mean over rows of KL(p_h || the mean of all heads), nats.
    """
    scores, p = moment.scores, moment.weights
    visible = scores.isfinite()
    keys = visible.sum(-1).float()  # [B, H, N], or without heads where none leaks
    s = scores.masked_fill(~visible, 0.0)
    mean = s.sum(-1) / keys
    variance = ((s - mean[..., None]) ** 2 * visible).sum(-1) / keys
    log_p = torch.where(p > 0, p.log(), 0.0)
    entropy = -(p * log_p).sum(-1)
    mu = (p * s).sum(-1)
    spread = (p * (s - mu[..., None]) ** 2).sum(-1)
    mixture = p.mean(1, keepdim=True)
    away = (p * (log_p - torch.where(mixture > 0, mixture.log(), 0.0))).sum(-1)
    judged = slice(min(FEWEST_KEYS, scores.shape[-1] // 2) - 1, None)
    normalized = entropy[..., judged] / keys[..., judged].log()
    return {
        "max_logit": scores.amax((0, 2, 3)),
        "score_std": variance.mean((0, 2)).sqrt(),
        "logit_std": spread.mean((0, 2)).sqrt(),
        "entropy": entropy.mean((0, 2)),
        "normalized_entropy": normalized.mean((0, 2)),
        "first_token_mass": p[:, :, judged, 0].mean((0, 2)),
        "disagreement": away.mean((0, 2)),
    }


def effective_rank(x: Tensor) -> Tensor:
    r"""exp of the entropy of the singular values of each matrix ``x`` [..., n, d], as shares of their sum -> [...].

    Computed from the d x d Gram matrices in float64; d where all directions are as strong, 1 where there is one.

    Source: Roy and Vetterli 2007, "The effective rank".
    """
    x = x.double()
    return spectral_entropy(torch.linalg.eigvalsh(x.transpose(-1, -2) @ x).clamp_min(0).sqrt()).exp()


def spectral_entropy(singular_values: Tensor) -> Tensor:
    """Entropy in nats of singular values [..., d] as shares of their sum -> [...]; NaN where all are 0."""
    shares = singular_values / singular_values.sum(-1, keepdim=True)
    return torch.special.entr(shares).sum(-1)


class Increments:
    r"""Spectral entropy of how each head's query-key matrix has changed since the last call.

    .. math:: H(\sigma(\Delta M_h)), \quad M_h = W_Q^{h\,T} W_K^h

    The increment has a rank of at most 2 D, so its singular values are those of a 2 D x 2 D matrix: with
    :math:`\Delta M = U^T V`, U = [W_Q'; W_Q], V = [W_K'; -W_K] and QR of both, :math:`R_U R_V^T`.

    Source: the signal of arXiv 2606.28116.
    """

    def __init__(self, layers: list[WrittenOutAttention]) -> None:
        self._layers = layers
        self._before = self._weights()

    def _weights(self) -> tuple[Tensor, Tensor]:
        """[L, H, D, width] each, float64."""
        found = [
            torch.stack(
                [
                    layer.get_parameter(f"{name}.weight").detach().double().unflatten(0, (layer.heads, -1))
                    for layer in self._layers
                ]
            )
            for name in ("q_proj", "k_proj")
        ]
        return found[0], found[1]

    def read(self) -> Tensor:
        """[L, H], nats; log(2 D) at most."""
        query, key = self._weights()
        u = torch.cat((query, self._before[0]), -2).transpose(-1, -2)
        v = torch.cat((key, -self._before[1]), -2).transpose(-1, -2)
        self._before = query, key
        if not (u.isfinite().all() and v.isfinite().all()):
            return torch.full(query.shape[:2], math.nan)
        r_u, r_v = torch.linalg.qr(u, mode="r").R, torch.linalg.qr(v, mode="r").R
        return spectral_entropy(torch.linalg.svdvals(r_u @ r_v.transpose(-1, -2)))
