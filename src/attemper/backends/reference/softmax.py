"""Dense attention, written as the specification: every definition of the maths page, in float64, one line each.

Slow and n x n in memory on purpose. The tests hold every backend against independent loops and against this.
All of it is plain PyTorch, so gradients and second derivatives come from autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def scores(
    query: Tensor, key: Tensor, multiplier: Tensor, bias: Tensor | None, visible: Tensor, softcap: float | None
) -> Tensor:
    """``s = softcap(multiplier * q.k) + bias`` [B, H, Q, K] in float64; -inf where a key is not visible."""
    heads = query.shape[1]
    key = key.double().repeat_interleave(heads // max(key.shape[1], 1), dim=1)
    # A key that is not visible may hold NaN or inf: it must not reach a statistic.
    x = torch.einsum("bhqd,bhkd->bhqk", query.double(), key) * multiplier.double()[..., None]
    x = torch.where(visible, x, 0.0)
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    if bias is not None:
        x = x + torch.where(visible, bias.double(), 0.0)
    return torch.where(visible, x, -math.inf)


def weights(s: Tensor, visible: Tensor) -> Tensor:
    """``p = softmax(s)`` over the visible keys; a row that sees nothing is all 0."""
    seen = visible.any(-1, keepdim=True)
    s = torch.where(seen, s, 0.0)
    # Neither torch.softmax nor torch.logsumexp: PyTorch does not differentiate their tangents.
    e = torch.exp(s - _maximum(s).detach()[..., None])
    return torch.where(visible, e / e.sum(-1, keepdim=True), 0.0)


def log_sum_exp(s: Tensor) -> Tensor:
    """``log sum exp(s)`` over the keys; -inf where there are none."""
    top = _maximum(s).detach()
    return top + torch.exp(s - top[..., None]).sum(-1).log()


def visible_keys(
    shape: tuple[int, int, int, int],
    mask: Tensor | None,
    left: float,
    right: float,
    positions: Tensor,
    documents: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Which keys a row can see, [B, H, Q, K]: mask and window and document, all at once.

    ``positions`` [Q]: the key on each row's diagonal. ``documents``: the number of the document of each query and
    each key; positions and keys then count within the document.
    """
    _, _, rows, keys = shape
    place = torch.arange(keys, device=positions.device)
    seen = torch.ones((rows, keys), dtype=torch.bool, device=positions.device)
    if documents is not None:
        of_query, of_key = documents
        seen = of_query[:, None] == of_key
        starts = torch.searchsorted(of_key, of_key)
        place = place - starts
    if right < math.inf:
        seen = seen & (place <= positions[:, None] + right)
    if left < math.inf:
        seen = seen & (place >= positions[:, None] - left)
    seen = seen.expand(shape)
    if mask is None:
        return seen
    return seen & (mask if mask.dtype == torch.bool else ~(mask <= torch.finfo(mask.dtype).min / 2))


def statistics(
    s: Tensor, visible: Tensor, sink: Tensor | None, first: Tensor, distance: Tensor
) -> dict[str, Callable[[], Tensor]]:
    """Every row statistic [B, H, Q] (key_mass [B, H, K]) of scores ``s``, each computed when it is called.

    ``first`` marks the first tokens [B, 1, 1, K]; ``distance`` is abs(pos_q - pos_k), broadcastable to ``s``.
    """
    p = weights(s, visible)
    n = visible.sum(-1)
    seen = n > 0
    bad = seen & ~torch.isfinite(torch.where(visible, s, 0.0)).all(-1)
    finite = torch.where(visible & seen[..., None], s, 0.0)
    log_p = torch.where(p > 0, p, 1.0).log()
    mean = (p * finite).sum(-1)
    score_mean = finite.sum(-1) / n.clamp(min=1)
    entropy = 0.0 - (p * log_p).sum(-1)  # -(0.0) would be -0.0
    lse = log_sum_exp(torch.where(seen[..., None], s, 0.0))
    share = torch.ones_like(lse) if sink is None else torch.sigmoid(lse - sink.double()[:, None])

    def row(value: Tensor, empty: float = 0.0) -> Tensor:
        return torch.where(bad, math.nan, torch.where(seen, value, empty))

    def plain_variance() -> Tensor:
        """Of the visible scores, every one alike."""
        shift = finite - torch.where(seen, score_mean, 0.0)[..., None]
        return torch.where(visible, shift, 0.0).square().sum(-1) / n.clamp(min=1)

    def share_entropy() -> Tensor:
        logs = torch.nn.functional.logsigmoid
        gap = torch.where(seen, lse, 0.0) - (math.inf if sink is None else sink.double()[:, None])
        return entropy if sink is None else share * (entropy - logs(gap)) - (1 - share) * logs(-gap)

    def sorted_gini() -> Tensor:
        rank = torch.arange(1, p.shape[-1] + 1, device=p.device) - (p.shape[-1] - n)[..., None]
        return (p.sort(-1).values * (2 * rank - n[..., None] - 1)).sum(-1) / n.clamp(min=1)

    def log_n() -> Tensor:
        return torch.where(n > 1, n, 2).double().log()

    return {
        "lse": lambda: row(lse, -math.inf),
        "max_logit": lambda: row(_maximum(s), -math.inf),
        "entropy": lambda: row(entropy),
        "normalized_entropy": lambda: row(torch.where(n > 1, entropy / log_n(), 0.0)),
        "effective_tokens": lambda: row(1 / torch.where(seen, (p * p).sum(-1), 1.0)),
        "max_weight": lambda: row(torch.exp(_maximum(torch.where(seen[..., None], s, 0.0)) - lse)),
        "mean_logit": lambda: row(mean),
        "logit_variance": lambda: row((p * (finite - mean[..., None]) ** 2).sum(-1)),
        "visible_keys": lambda: n,
        "mass": lambda: row(share),
        "first_token_mass": lambda: row((p * first).sum(-1)),
        "support_size": lambda: n,
        "gini": lambda: row(sorted_gini()),
        "score_mean": lambda: row(score_mean),  # no statistic of its own: what merging two variances takes
        "score_variance": lambda: row(plain_variance()),
        "mean_distance": lambda: row((p * distance).sum(-1)),
        "entropy_with_sink": lambda: row(share_entropy()),
        "key_mass": lambda: torch.where((seen & ~bad)[..., None], p, 0.0).sum(-2),
    }


def _maximum(s: Tensor) -> Tensor:
    """The largest score of a row; among ties the gradient goes to the lowest index."""
    if s.shape[-1] == 0:
        return s.new_full(s.shape[:-1], -math.inf)
    return s.gather(-1, s.argmax(-1, keepdim=True)).squeeze(-1)


def output(p: Tensor, share: Tensor, value: Tensor, dropout_p: float) -> Tensor:
    """``O = dropout(mass p) V`` [B, H, Q, E] in float64."""
    value = value.double().repeat_interleave(p.shape[1] // max(value.shape[1], 1), dim=1)
    return torch.nn.functional.dropout(p * share[..., None], dropout_p) @ value
