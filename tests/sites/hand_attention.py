"""Attention as people write it by hand: functions of queries, keys and values [B, H, N, D], and what is to be seen."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as imported_early

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
HEADS, SIZE = 4, 8


class Attention(nn.Module):
    """Self attention over [B, N, 32] in 4 heads, whichever way ``attend`` computes it."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.qkv, self.num_heads, self.attend = nn.Linear(32, 96), HEADS, attend
        self.qkv.weight.data *= 4

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(*self.split(x))


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) / SIZE**0.5


def _einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    weights = torch.einsum("bihd,bjhd->bhij", q, k).div(SIZE**0.5).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def _einsum_heads_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (part.permute(2, 0, 1, 3) for part in (q, k, v))
    weights = torch.einsum("ibnd,jbnd->ijbn", q, k).div(SIZE**0.5).softmax(dim=1)
    return torch.einsum("ijbn,jbnd->ibnd", weights, v)


def _einsum_ellipsis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("...id,...jd->...ij", q, k).div(SIZE**0.5).softmax(-1)
    return torch.einsum("...ij,...jd->...id", [weights, v])


def _shared_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhij,bjd->bhid", scores(q, k).softmax(-1), v.mean(1))


def _into_another(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    given = scores(q, k).detach()
    return torch.softmax(given, -1, out=torch.empty_like(given)) @ v.detach()


def _halves(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = scores(q, k).to(torch.float64)
    return F.softmax(logits, dim=-1, dtype=torch.float32).to(q.dtype) @ v


def _head_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (scores(q, k).softmax(-1) * torch.tensor([1.0, 0.0, 1.0, 0.5]).view(1, HEADS, 1, 1)) @ v


def _renormalised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = scores(q, k).softmax(-1)
    return weights / weights.sum(-1, keepdim=True) @ v


def _in_place_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(scores(q, k).softmax(-1).clone(), 0.2, True, inplace=True) @ v


def _twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = scores(q, k).softmax(-1)
    return weights @ v + weights @ k


def _folded_and_back(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = scores(q, k).softmax(-1).reshape(-1, *q.shape[2:3] * 2)
    return torch.bmm(weights, v.reshape(-1, *v.shape[2:])).view_as(v)


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (part.unflatten(1, (2, 2)) for part in (q, k, v))
    return (scores(q, k).softmax(-1) @ v).flatten(1, 2)


def _grouped_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (part.unflatten(1, (2, 2)) for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v)


def _rows_without_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1).nan_to_num(0.0).masked_fill(torch.zeros(q.shape[2], 1, dtype=torch.bool), 0.0) @ v


_NORMALISE = nn.Softmax(dim=-1)

SEEN: dict[str, Attend] = {
    "einsum": _einsum,
    "einsum, heads last, softmax over the second axis": _einsum_heads_last,
    "einsum with an ellipsis and a list": _einsum_ellipsis,
    "einsum, values shared by all heads": _shared_values,
    "torch.special.softmax": lambda q, k, v: torch.special.softmax(scores(q, k), -1) @ v,
    "nn.Softmax": lambda q, k, v: _NORMALISE(scores(q, k)) @ v,
    "softmax into another tensor": _into_another,
    "log_softmax and exp": lambda q, k, v: F.log_softmax(scores(q, k), -1).exp() @ v,
    "softmax in another type": _halves,
    "keyword arguments": lambda q, k, v: torch.matmul(input=torch.softmax(input=scores(q, k), dim=3), other=v),
    "a head mask": _head_mask,
    "weights divided by their sum": _renormalised,
    "dropout in place": _in_place_dropout,
    "nn.Dropout": lambda q, k, v: nn.Dropout(0.2)(scores(q, k).softmax(-1)) @ v,
    "weights used twice": _twice,
    "scores transposed, softmax over the last axis but one":
        lambda q, k, v: scores(k, q).softmax(dim=-2).transpose(-2, -1) @ v,
    "weights on the right": lambda q, k, v: v.mT @ scores(k, q).softmax(dim=-2),
    "the right operand's product": lambda q, k, v: v.__rmatmul__(scores(q, k).softmax(-1)),
    "heads folded after the softmax": _folded_and_back,
    "heads in groups": _grouped,
    "heads in groups, SDPA": _grouped_sdpa,
    "rows without keys set to zero": _rows_without_keys,
    "torch._C._nn.scaled_dot_product_attention": attrgetter("_C._nn.scaled_dot_product_attention")(torch),
    "scaled_dot_product_attention imported before": imported_early,
    "SDPA by keyword": lambda q, k, v: F.scaled_dot_product_attention(query=q, key=k, value=v),
}  # fmt: skip


def _overwritten(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    given = scores(q, k).detach()
    return torch.softmax(given, -1, out=given) @ v.detach()


def _scores_reused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    given = scores(q, k).detach()
    weights = given.softmax(-1)
    given.zero_()
    return weights @ v.detach()


def _view_reused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = scores(q, k).softmax(-1).detach()
    weights[:, :, 0].zero_()
    return weights @ v.detach()


def _assigned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = scores(q, k).softmax(-1).clone()
    weights[..., 0] = 0.0
    return weights @ v


def _masked_afterwards(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = scores(q, k).softmax(-1) * torch.ones(q.shape[2], q.shape[2]).tril()
    return weights / weights.sum(-1, keepdim=True) @ v


def _difference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (scores(q, k).softmax(-1) - 0.5 * scores(k, q).softmax(-1)) @ v


def _talking_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mixed = F.linear(scores(q, k).softmax(-1).permute(0, 2, 3, 1), torch.eye(HEADS) + 0.1).permute(0, 3, 1, 2)
    return mixed @ v


def _parts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = scores(q, k).softmax(-1)
    return weights[..., :5] @ v[..., :5, :] + weights[..., 5:] @ v[..., 5:, :]


def _joined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    halves = [scores(q, part).softmax(-1) / 2 for part in k.chunk(2, -2)]
    return torch.cat(halves, -1) @ v


def _slots(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1).transpose(-2, -1) @ v


def _channels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = (F.normalize(part.transpose(-2, -1), dim=-1) for part in (q, k))
    return ((q @ k.transpose(-2, -1)).softmax(-1) @ v.transpose(-2, -1)).permute(0, 3, 1, 2)


def _channels_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (part.transpose(-2, -1).contiguous() for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v)


def _channels_by_distance(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (part.transpose(-2, -1) for part in (q, k, v))
    return (-torch.cdist(q, k)).softmax(-1) @ v


def _gumbel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.gumbel_softmax(scores(q, k)) @ v


NOT_SEEN: dict[str, tuple[Attend, str]] = {
    "softmax onto its scores": (_overwritten, "scores are overwritten"),
    "scores reused before the product": (_scores_reused, "scores are overwritten"),
    "weights written through a view": (_view_reused, "or its weights after the softmax"),
    "weights assigned": (_assigned, r"changed between the softmax and the values \(an assignment\)"),
    "weights masked and normalised again": (_masked_afterwards, r"changed .* \(mul\)"),
    "difference of two softmaxes": (_difference, r"changed .* \(sub\)"),
    "squared weights": (lambda q, k, v: scores(q, k).softmax(-1) ** 2 @ v, r"changed .* \(pow\)"),
    "talking heads": (_talking_heads, r"changed .* \(linear\)"),
    "weights in parts": (_parts, r"changed .* \(getitem\)"),
    "two softmaxes side by side": (_joined, r"changed .* \(cat\)"),
    "product over queries": (_slots, "sums over another axis than its softmax"),
    "softmax over channels": (_channels, "runs over channels, not over tokens"),
    "softmax over channels, SDPA": (_channels_sdpa, "runs over channels, not over tokens"),
    "softmax over channels, scores by distance": (_channels_by_distance, "runs over channels, not over tokens"),
    "softmax of keys over tokens": (
        lambda q, k, v: q @ (k.softmax(-2).transpose(-2, -1) @ v), r"without queries, as in factorised \(linear\)"),
    "gumbel softmax": (_gumbel, r"not a softmax of its scores \(gumbel_softmax\)"),
    "softmin": (lambda q, k, v: F.softmin(scores(q, k), -1) @ v, r"not a softmax of its scores \(softmin\)"),
}  # fmt: skip


class Mixture(nn.Module):
    """A soft mixture of experts: a softmax meets a product, and weighs no tokens."""

    def __init__(self, weight: bool) -> None:
        super().__init__()
        self.router, self.experts, self.weight = nn.Linear(32, 4), nn.Linear(32, 4 * 32), weight

    def forward(self, x: Tensor) -> Tensor:
        logits = x @ self.router.weight.T if self.weight else self.router(x)
        return torch.einsum("bne,bned->bnd", logits.softmax(-1), self.experts(x).unflatten(-1, (4, 32)))


class Codebook(nn.Module):
    """Soft look-up in a table of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(11, 32))

    def forward(self, x: Tensor) -> Tensor:
        return (-torch.cdist(x, self.codes[None])).softmax(-1) @ self.codes


class LayerMix(nn.Module):
    """Mixes outputs of layers by learned weights, and attends after that."""

    def __init__(self, view: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn((4, 1) if view == "transposed" else (1, 4)))
        self.view = view

    def forward(self, x: Tensor) -> Tensor:
        weight = {"row": self.weight[:1], "transposed": self.weight.T}.get(self.view, self.weight)
        layers = torch.stack([x] * 4).flatten(1)
        weights = weight.softmax(-1)
        if self.view == "changed":
            weights = weights * torch.arange(1.0, 5.0)
        mixed = (weights @ layers).view_as(x)
        return (x @ x.mT).softmax(-1) @ mixed


class Pool(nn.Module):
    """One learned query that pools tokens: weights [B, N]."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.query, self.score, self.way = nn.Parameter(torch.randn(32)), nn.Linear(32, 1), way

    def weights(self, x: Tensor) -> Tensor:
        logits = x @ self.query if self.way != "linear" else self.score(x).squeeze(-1)
        return logits.softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weights(x)
        if self.way == "einsum":
            return torch.einsum("bn,bnd->bd", weights, x)
        return torch.bmm(weights.unsqueeze(1), x).squeeze(1)


class ConvolutionalChannels(nn.Module):
    """Restormer's way: channels of a feature map attend to one another."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Conv2d(8, 24, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).flatten(2).chunk(3, 1)
        return (q @ k.mT).softmax(-1) @ v


class KeyBias(nn.Module):
    """Scores with a bias that a linear layer computes for each key: the sum is no output of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Linear(32, 12)

    def weights(self, x: Tensor) -> Tensor:
        return (self.bias(x) + x @ x.mT).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.weights(x) @ x


class Unbatched(nn.Module):
    """One head of one sequence, [N, D]."""

    def weights(self, x: Tensor) -> Tensor:
        return (x[0] @ x[0].T).softmax(-1)[None]

    def forward(self, x: Tensor) -> Tensor:
        return self.weights(x)[0] @ x[0]


class LearnedQueries(nn.Module):
    """Parameters that ask tokens, in heads."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.key = nn.Parameter(torch.randn(3, 32)), nn.Linear(32, 32)

    def weights(self, x: Tensor) -> Tensor:
        return (self.queries @ self.key(x).transpose(-2, -1)).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.weights(x) @ x
