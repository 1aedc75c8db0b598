"""What a run measures of its attention: numbers per head, as plain functions of what a layer computed.

Definitions are those of ``attemper.statistics`` where the quantity is the same, so that default alarms can be judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from attemper.readings.reading import FEWEST_KEYS
from research.early_warning.attention import Moment, WrittenOutAttention


class Rows:
    """What one layer computed, with quantities that several measures share: each is computed when one asks for it."""

    def __init__(self, moment: Moment) -> None:
        self.scores, self.p = moment.scores, moment.weights
        rows = self.scores.shape[-1]
        self.judged = slice(min(FEWEST_KEYS, rows // 2) - 1, None)
        """The rows that see at least 32 keys (or the second half, in a shorter context), as alarms judge them."""

    @cached_property
    def visible(self) -> Tensor:
        return self.scores.isfinite()

    @cached_property
    def keys(self) -> Tensor:
        """[B, H, N], or without heads where none leaks."""
        return self.visible.sum(-1).float()

    @cached_property
    def visible_scores(self) -> Tensor:
        """With 0 in the place of the others."""
        return self.scores.masked_fill(~self.visible, 0.0)

    @cached_property
    def log_p(self) -> Tensor:
        """0 where p is."""
        return torch.where(self.p > 0, self.p.log(), 0.0)

    @cached_property
    def row_entropy(self) -> Tensor:
        return -(self.p * self.log_p).sum(-1)


def _max_logit(rows: Rows) -> Tensor:
    return rows.scores.amax((0, 2, 3))


def _score_std(rows: Rows) -> Tensor:
    """Root of the mean over rows of the plain variance of the visible scores."""
    mean = rows.visible_scores.sum(-1) / rows.keys
    variance = ((rows.visible_scores - mean[..., None]) ** 2 * rows.visible).sum(-1) / rows.keys
    return variance.mean((0, 2)).sqrt()


def _logit_std(rows: Rows) -> Tensor:
    """As ``score_std``, under the weights."""
    mu = (rows.p * rows.visible_scores).sum(-1)
    spread = (rows.p * (rows.visible_scores - mu[..., None]) ** 2).sum(-1)
    return spread.mean((0, 2)).sqrt()


def _entropy(rows: Rows) -> Tensor:
    """Mean over rows, nats."""
    return rows.row_entropy.mean((0, 2))


def _normalized_entropy(rows: Rows) -> Tensor:
    return (rows.row_entropy[..., rows.judged] / rows.keys[..., rows.judged].log()).mean((0, 2))


def _first_token_mass(rows: Rows) -> Tensor:
    return rows.p[:, :, rows.judged, 0].mean((0, 2))


def _disagreement(rows: Rows) -> Tensor:
    """Mean over rows of KL(p_h || the mean of all heads), nats."""
    mixture = rows.p.mean(1, keepdim=True)
    away = (rows.p * (rows.log_p - torch.where(mixture > 0, mixture.log(), 0.0))).sum(-1)
    return away.mean((0, 2))


PER_HEAD: dict[str, Callable[[Rows], Tensor]] = {
    "max_logit": _max_logit,
    "score_std": _score_std,
    "logit_std": _logit_std,
    "entropy": _entropy,
    "normalized_entropy": _normalized_entropy,
    "first_token_mass": _first_token_mass,
    "disagreement": _disagreement,
}
"""Name -> what it makes of a layer's rows: [H], over examples and rows. ``normalized_entropy`` and ``first_token_mass``
are of the judged rows."""


def of_moment(moment: Moment, names: Iterable[str] = PER_HEAD) -> dict[str, Tensor]:
    """Measures of ``PER_HEAD``, by default every one: name -> [H]."""
    rows = Rows(moment)
    return {name: PER_HEAD[name](rows) for name in names}


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


@torch.no_grad()
def attention_output(moment: Moment, layer: WrittenOutAttention) -> Tensor:
    """What a layer's attention adds: [B N, width]."""
    return layer.o_proj(moment.mixed.transpose(1, 2).flatten(2)).flatten(0, 1)


def change_norm(weights: Sequence[Tensor], before: Sequence[Tensor]) -> Tensor:
    """[] of the change of all weights together."""
    return torch.nn.utils.get_total_norm([weight.detach() - old for weight, old in zip(weights, before, strict=True)])


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
