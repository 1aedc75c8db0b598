"""Whether the number of an explanation is true: the claim is applied to run a's scores and compared with run b's.

Nothing here asks attemper. Queries, keys, masks, caps and sinks are taken where transformers hands them to its
attention function; scores are made from them again in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

EXACT = 0.02
"""Share of a head's change that an applied claim may leave."""
NOISE = 3.0
"""How many times the rounding of the clean pair a claim may leave."""


@dataclass
class Calls:
    """One attention of one run: what it was given, and final scores [batch, heads, rows, keys] in float64."""

    query: Tensor
    key: Tensor
    scale: float
    cap: float | None
    added: Tensor
    visible: Tensor
    sinks: Tensor | None

    @property
    def products(self) -> Tensor:
        return self.scale * self.query @ self.key.mT

    def scores(self, products: Tensor | None = None) -> Tensor:
        products = self.products if products is None else products
        capped = products if self.cap is None else self.cap * torch.tanh(products / self.cap)
        return capped + self.added


_kept: dict[str, Calls] = {}
_names: dict[int, str] = {}


def _record(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    each = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(each, 1), value.repeat_interleave(each, 1)
    shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    added = torch.zeros(shape, dtype=torch.float64)
    if attention_mask is not None:
        added = added + attention_mask[..., : key.shape[2]].double()
    elif getattr(module, "is_causal", False) and query.shape[2] > 1:
        added = added.masked_fill(~torch.ones(shape[-2:], dtype=torch.bool).tril(), -math.inf)
    visible = added > -1e9
    if position_bias is not None:
        added = added + position_bias.double()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks = getattr(module, "sinks", None)
    call = Calls(query.double(), key.double(), scale, softcap, added.where(visible, 0.0), visible, sinks)
    final = call.scores().masked_fill(~visible, -math.inf)
    if sinks is not None:
        final = torch.cat([final, sinks.double()[None, :, None, None].expand(*shape[:3], 1)], -1)
    weights = final.softmax(-1).nan_to_num(0.0)[..., : key.shape[2]]
    _kept[_names[id(module)]] = call
    return (weights @ value.double()).to(value.dtype).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register("unseen_record", _record)
ALL_MASK_ATTENTION_FUNCTIONS.register("unseen_record", eager_mask)


def calls(model: Any, batch: dict[str, Tensor]) -> dict[str, Calls]:
    """Of every attention of one forward pass, by the qualified name of its module."""
    _kept.clear()
    _names.clear()
    _names.update({id(module): name for name, module in model.named_modules()})
    before = model.config._attn_implementation
    model.set_attn_implementation("unseen_record")
    try:
        with torch.no_grad():
            model(**batch)
    finally:
        for module in model.modules():
            if hasattr(module, "config") and hasattr(module.config, "_attn_implementation"):
                module.config._attn_implementation = before
    return dict(_kept)


def _centred(scores: Tensor, visible: Tensor) -> Tensor:
    """Without what softmax does not see: the mean over a row's visible keys. Hidden keys are 0."""
    scores = scores.where(visible, 0.0)
    mean = scores.sum(-1, keepdim=True) / visible.sum(-1, keepdim=True).clamp_min(1)
    return (scores - mean).where(visible, 0.0)


def _size(scores: Tensor) -> Tensor:
    """Root of the sum of squares of each head."""
    return scores.square().sum((0, 2, 3)).sqrt()


@dataclass
class Claim:
    """A number of an explanation, and what is needed to test it."""

    a: Calls
    b: Calls
    noise: Tensor
    """By head: what rounding alone changes at this site."""
    causal: bool
    rope: tuple[str, Tensor] | None
    """The pairing of features, and run a's angles per token."""

    def predicted_by(self, scores: Tensor) -> bool:
        """Whether these final scores are run b's, in each head that changed; at least one did."""
        if not torch.equal(self.a.visible.expand_as(scores), self.b.visible.expand_as(scores)):
            return False
        now = _centred(self.b.scores(), self.b.visible)
        change = _size(now - _centred(self.a.scores(), self.b.visible))
        left = _size(now - _centred(scores, self.b.visible))
        changed = change > NOISE * self.noise
        return bool(changed.any()) and bool((left <= EXACT * change + NOISE * self.noise)[changed].all())


def predicts(kind: str, value: float, claim: Claim) -> bool:
    """Whether ``value`` of ``kind`` makes run b of run a."""
    test = TESTS.get(kind)
    return test is not None and math.isfinite(value) and test(value, claim)


def _scale(value: float, claim: Claim) -> bool:
    return claim.predicted_by(claim.a.scores(value * claim.a.products))


def _softcap(value: float, claim: Claim) -> bool:
    return claim.predicted_by(value * torch.tanh(claim.a.products / value) + claim.a.added)


def _logn(value: float, claim: Claim) -> bool:
    count = torch.arange(1.0, claim.a.products.shape[-2] + 1, dtype=torch.float64)[:, None]
    factor = (count.log() / math.log(value)).clamp_min(1.0)
    both = (factor, 1 / factor)
    return any(claim.predicted_by(claim.a.scores(each * claim.a.products)) for each in both)


def _difference(claim: Claim) -> Tensor:
    return claim.b.scores() - claim.a.scores()


def _key_shift(value: float, claim: Claim) -> bool:
    change, visible = _difference(claim), claim.b.visible
    if not torch.equal(claim.a.visible, visible):
        return False
    middle = change.masked_fill(~visible, math.nan).nanmedian(-1, keepdim=True).values
    for origin in (middle, middle - value):
        shifted = (change - origin - value).abs() < (change - origin).abs()
        if shifted.any() and claim.predicted_by(claim.a.scores() + value * shifted):
            return True
    return False


def _distance(claim: Claim) -> Tensor:
    rows, keys = claim.a.products.shape[-2:]
    return (torch.arange(rows)[:, None] - torch.arange(keys)[None, :]).double()


def _distance_bias(value: float, claim: Claim) -> bool:
    """Every changed head is linear in distance; the number lies within the heads' own slopes."""
    distance = _distance(claim)
    change, away = _centred(_difference(claim), claim.b.visible), 0.0
    for shape in (distance, distance.abs()):
        away = _centred(shape.expand_as(change), claim.b.visible)
        slopes = (change * away).sum((0, 2, 3)) / away.square().sum((0, 2, 3))
        if claim.predicted_by(claim.a.scores() + slopes[:, None, None] * shape):
            moved = slopes[_size(change) > NOISE * claim.noise].abs()
            return bool(0.95 * moved.min() <= abs(value) <= 1.05 * moved.max())
    return False


def _window(value: float, claim: Claim) -> bool:
    """Run b sees what either run sees within the window."""
    distance = _distance(claim)
    either = claim.a.visible | claim.b.visible
    inside = (distance < value) & (distance > -value)
    return torch.equal(either & inside, claim.b.visible) and not torch.equal(claim.a.visible, claim.b.visible)


def _causality(value: float, claim: Claim) -> bool:
    """The furthest that a row of b sees ahead; with or without the first row, which must see something."""
    ahead = (-_distance(claim)).expand_as(claim.b.visible).masked_fill(~claim.b.visible, -math.inf)
    return value in (float(ahead.max()), float(ahead[..., 1:, :].max()))


def _sink(value: float, claim: Claim) -> bool:
    if claim.a.sinks is None or claim.b.sinks is None:
        return False
    moved = claim.b.sinks.double() - claim.a.sinks.double()
    moved = moved[moved.abs() > 1e-3]
    return len(moved) > 0 and bool(((moved - value).abs() <= 0.05 * abs(value)).all())


def turned(states: Tensor, angles: Tensor, pairing: str) -> Tensor:
    """States [..., tokens, size] turned by angles [tokens, pairs]; features beyond the pairs stay."""
    pairs = angles.shape[-1]
    cos, sin = angles.cos(), angles.sin()
    kept = states[..., 2 * pairs :]
    if pairing == "half":
        one, two = states[..., :pairs], states[..., pairs : 2 * pairs]
        return torch.cat([one * cos - two * sin, two * cos + one * sin, kept], -1)
    one, two = states[..., 0 : 2 * pairs : 2], states[..., 1 : 2 * pairs : 2]
    both = torch.stack([one * cos - two * sin, two * cos + one * sin], -1).flatten(-2)
    return torch.cat([both, kept], -1)


def _rotary(value: float, claim: Claim) -> bool:
    """``value`` is run b's base, or what divides positions."""
    if claim.rope is None or value == 0:
        return False
    pairing, before = claim.rope
    before = before.double()
    pairs = before.shape[0]
    powers = torch.arange(pairs, dtype=torch.float64) / pairs
    where = torch.arange(claim.a.query.shape[-2], dtype=torch.float64)[:, None]
    for after in (abs(value) ** -powers, before / value):
        moved = where * (after - before)
        query, key = (turned(states, moved, pairing) for states in (claim.a.query, claim.a.key))
        if claim.predicted_by(claim.a.scores(claim.a.scale * query @ key.mT)):
            return True
    return False


TESTS: dict[str, Callable[[float, Claim], bool]] = {
    "scale": _scale,
    "softcap": _softcap,
    "logn": _logn,
    "key_shift": _key_shift,
    "distance_bias": _distance_bias,
    "window": _window,
    "causality": _causality,
    "sink": _sink,
    "rotary": _rotary,
}
"""Kinds whose number can be applied. Bits of rounded keys are known by construction; any other number is false."""
