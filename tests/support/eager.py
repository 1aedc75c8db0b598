"""Eager PyTorch attention with statistics, as one would write it by hand: the yardstick of the budgets, not an oracle.

It computes in float32 (float64 for float64 inputs) and differentiates by autograd. Its error against the oracle is what
ordinary code pays; a kernel may pay twice that, plus the roundings that are its own (``budgets.py``).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.support import oracle


def attention(
    query: Tensor, key: Tensor, value: Tensor, call: oracle.Inputs, *, attn_mask: Tensor | None = None,
    temperature: Tensor | float = 1.0, sink_logits: Tensor | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """``output`` and every statistic, in the compute type. ``call`` tells what is visible and the options."""
    compute = torch.float64 if query.dtype == torch.float64 else torch.float32
    repeats = query.shape[1] // key.shape[1]
    q, k, v = query.to(compute), key.to(compute), value.to(compute)
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    visible = torch.from_numpy(call.visible.copy())
    divisor = temperature.to(compute)[..., None] if isinstance(temperature, Tensor) else temperature
    s = (q @ k.mT) * (float(call.scale) / divisor)
    if call.softcap is not None:
        s = call.softcap * torch.tanh(s / call.softcap)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        s = s + attn_mask.to(compute).masked_fill(attn_mask <= torch.finfo(attn_mask.dtype).min / 2, 0.0)
    seen = visible.any(-1)
    s = s.masked_fill(~visible, -math.inf).masked_fill(~seen[..., None], 0.0)
    return _results(s, visible, seen, v, call, sink_logits)


def _results(
    s: Tensor, visible: Tensor, seen: Tensor, v: Tensor, call: oracle.Inputs, sink: Tensor | None
) -> dict[str, Tensor]:
    lse, p = torch.logsumexp(s, -1), torch.softmax(s, -1).masked_fill(~visible, 0.0)
    finite = s.masked_fill(~visible, 0.0)
    n = visible.sum(-1)
    mean = (p * finite).sum(-1)
    share = torch.ones_like(lse) if sink is None else torch.sigmoid(lse - sink.to(lse.dtype)[:, None])
    logs = torch.nn.functional.logsigmoid
    gap = lse if sink is None else lse - sink.to(lse.dtype)[:, None]
    entropy = lse - mean
    rank = torch.arange(1, s.shape[-1] + 1) - (s.shape[-1] - n)[..., None]
    tokens = torch.from_numpy(call.tokens)
    first = tokens & (tokens.cumsum(-1) <= call.first_tokens)
    rows = torch.arange(s.shape[2])[:, None] + call.offset
    distance = (rows - torch.arange(s.shape[-1])).abs().to(s.dtype)
    results = {
        "lse": lse,
        "entropy": entropy,
        "normalized_entropy": entropy / n.clamp(min=2).to(s.dtype).log() * (n > 1),
        "effective_tokens": 1 / (p * p).sum(-1).masked_fill(~seen, 1.0),
        "max_weight": p.amax(-1),
        "max_logit": s.amax(-1),
        "mean_logit": mean,
        "logit_variance": (p * (finite - mean[..., None]) ** 2).sum(-1),
        "mass": share,
        "first_token_mass": (p * first[:, None, None]).sum(-1),
        "entropy_with_sink": entropy
        if sink is None
        else share * entropy - share * logs(gap) - (1 - share) * logs(-gap),
        "mean_distance": (p * distance).sum(-1),
        "self_weight": (p * (distance == 0)).sum(-1),
        "span_mass": (p * _span(call)).sum(-1),
        "gini": (p.sort(-1).values * (2 * rank - n[..., None] - 1)).sum(-1) / n.clamp(min=1),
        "score_variance": ((finite - (finite.sum(-1) / n.clamp(min=1))[..., None]) ** 2 * visible).sum(-1)
        / n.clamp(min=1),
    }
    results = {name: value.masked_fill(~seen, 0.0) for name, value in results.items()}
    for name in ("lse", "max_logit"):
        results[name] = results[name].masked_fill(~seen, -math.inf)
    results["key_mass"] = p.sum(-2)
    results["output"] = (p * share[..., None]) @ v
    return results


def _span(call: oracle.Inputs) -> Tensor:
    """[B|1, 1, 1, K]: 1 at marked keys."""
    marks = torch.zeros(1, call.key.shape[2]) if call.span is None else torch.tensor(call.span)
    return marks[:, None, None].double()
