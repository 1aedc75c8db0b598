"""The fuzz's oracle: dense attention from the definitions, in float64, with gradients by autograd; no code of attemper.

Every step passes its result through a ``Rounding``. One that rounds nothing gives the answer. One that rounds at
random, as often as a kernel of a given precision may, there and on the way back, shows how far a right result may be
from the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

INTEGERS = ("visible_keys", "support_size")
Weights = Callable[[Tensor, Tensor], Tensor]
"""(scores, visible) [..., n] -> weights."""


@dataclass
class Rounding:
    """Rounds what passes by up to ``count`` units of ``unit``, at random; nothing without a generator."""

    generator: torch.Generator | None = None
    unit: float = 0.0
    stored: float = 0.0
    """Unit of the type of queries, keys and values: weights and their gradients may pass through it."""

    def __call__(self, x: Tensor, count: float, terms: Tensor | None = None, unit: float | None = None) -> Tensor:
        """``x`` with errors relative to ``terms``, or to itself."""
        if self.generator is None:
            return x
        size = count * (self.unit if unit is None else unit)
        error = size * self._draw(x)
        y = x * (1 + error) if terms is None else x + (error * terms).detach()
        if y.requires_grad:
            y.register_hook(lambda grad: grad * (1 + size * self._draw(grad)))
        return y

    def back(self, x: Tensor) -> Tensor:
        """``x``, whose gradient may pass through the stored type, and is added up over its last dimension."""
        if self.generator is not None and x.requires_grad:
            x = x * 1.0
            size = 2 * self.stored + x.shape[-1] ** 0.5 * self.unit
            x.register_hook(lambda grad: grad * (1 + size * self._draw(grad)))
        return x

    def through(self, s: Tensor, weights: Tensor, growth: Tensor) -> None:
        """Errors of the scores' gradient, growth (g - sum growth g / sum growth), whose terms cancel."""
        if self.generator is None or not (s.requires_grad and weights.requires_grad):
            return
        growth, above = growth.detach(), []
        share = growth / growth.sum(-1, keepdim=True).clamp(min=1e-300)

        def add(grad: Tensor) -> Tensor:
            size = above[-1].abs()
            # A weight below the square of the unit may be dropped.
            terms = (growth + self.unit * (growth > 0)) * (size + (share * size).sum(-1, keepdim=True))
            return grad + 8 * self.unit * self._draw(grad) * terms

        weights.register_hook(above.append)
        s.register_hook(lambda grad: add(grad) if above else grad)

    def of_alpha(self, alpha: Any, weights: Tensor) -> None:
        """Errors of entmax's derivative by alpha, whose terms have squares of log p and cancel where keys are alike."""
        if self.generator is None or not (isinstance(alpha, Tensor) and alpha.requires_grad and weights.requires_grad):
            return
        above: list[Tensor] = []
        weights.register_hook(above.append)
        p = weights.detach()

        def add(grad: Tensor) -> Tensor:
            terms = above[-1].abs() * p * (1 + torch.where(p > 0, p, 1.0).log() ** 2)
            return grad + 16 * self.unit * self._draw(grad) * terms.sum((0, 2, 3))

        alpha.register_hook(lambda grad: add(grad) if above else grad)

    def flat(self, x: Tensor, bent: Tensor) -> None:
        """Errors of 1 - tanh^2 or of u (1 - u), which are of the size of 1."""
        if self.generator is None or not (x.requires_grad and bent.requires_grad):
            return
        above: list[Tensor] = []
        bent.register_hook(above.append)
        x.register_hook(lambda grad: grad + 8 * self.unit * self._draw(grad) * above[-1].abs() if above else grad)

    def of_share(self, share: Tensor, p: Tensor) -> None:
        """Errors of the sink's gradient, which adds up products with values of either sign."""
        if self.generator is None or not (share.requires_grad and p.requires_grad):
            return
        above: list[Tensor] = []
        p.register_hook(above.append)

        def add(grad: Tensor) -> Tensor:
            return grad + 8 * self.unit * self._draw(grad) * (p.detach() * above[-1].abs()).sum(-1)

        share.register_hook(lambda grad: add(grad) if above else grad)

    def from_output(self, s: Tensor, weights: Tensor, output: Tensor, share: Tensor | None) -> None:
        """Errors of the gradients of scores and sink where sum_j w_j g_j is read off the output as it was stored."""
        if self.generator is None or not (s.requires_grad and output.requires_grad):
            return
        above: list[Tensor] = []
        output.register_hook(above.append)

        def add(grad: Tensor) -> Tensor:
            terms = (above[-1].abs() * output.detach().abs()).sum(-1, keepdim=True)
            return grad + self.stored * self._draw(terms) * terms * weights.detach()

        def add_to_share(grad: Tensor) -> Tensor:
            terms = (above[-1].abs() * output.detach().abs()).sum(-1)
            return grad + self.stored * self._draw(grad) * terms / left

        s.register_hook(lambda grad: add(grad) if above else grad)
        if share is not None and share.requires_grad:
            left = share.detach().clamp(min=1e-30)
            share.register_hook(lambda grad: add_to_share(grad) if above else grad)

    def _draw(self, like: Tensor) -> Tensor:
        return torch.rand(like.shape, generator=self.generator, dtype=torch.float64) * 2 - 1


@dataclass
class Call:
    """One sequence batch as the oracle takes it; everything float64."""

    query: Tensor
    key: Tensor
    value: Tensor | None
    scale: float
    temperature: Tensor
    """Broadcastable to [B, H, Q]."""
    visible: Tensor
    """[B, H, Q, K] bool."""
    bias: Tensor | None = None
    softcap: float | None = None
    sink: Tensor | None = None
    """[H]."""
    normalizer: str = "softmax"
    number: Any = None
    """k, the smallest weight, or [H]: alpha, bias, s, sink logit."""
    first: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.bool))
    """[B, K] bool."""
    offset: int = 0
    marked: Tensor | None = None
    """[B, K] bool: the keys of the spans."""


def scores_of(call: Call, rounding: Rounding) -> Tensor:
    """[B, H, Q, K], 0 where hidden."""
    repeats = call.query.shape[1] // max(call.key.shape[1], 1)
    key = call.key.repeat_interleave(repeats, 1)
    size = call.query.shape[3]
    multiplier = (call.scale / call.temperature).expand(call.query.shape[:3])[..., None]
    if call.normalizer == "scalable_softmax":
        n = call.visible.sum(-1).clamp(min=1).double()
        multiplier = multiplier * (call.number[:, None] * n.log())[..., None]
    multiplier = rounding(multiplier, 4)
    # A kernel may multiply q by it before the product, and keep parts of it in a narrow type.
    hidden = ~call.visible
    x = (call.query @ key.transpose(-1, -2)).masked_fill(hidden, 0) * multiplier
    terms = (call.query.abs() @ key.abs().transpose(-1, -2)).masked_fill(hidden, 0) * multiplier.abs()
    x = rounding.back(rounding(x, size + 4, terms.detach()))
    if call.softcap is not None:
        bent = call.softcap * torch.tanh(x / call.softcap)
        rounding.flat(x, bent)
        x = rounding(bent, 6)
    if call.bias is not None:
        bias = call.bias.masked_fill(hidden, 0)
        x = rounding.back(rounding(x + bias, 2, (x.abs() + bias.abs()).detach()))
    return x


def softmax(s: Tensor, visible: Tensor) -> Tensor:
    """0 where hidden."""
    e = _relative(s, visible).exp() * visible
    total = e.sum(-1, keepdim=True)
    return e / torch.where(total > 0, total, 1.0)


def _relative(s: Tensor, visible: Tensor) -> Tensor:
    """Scores less the largest visible one, which takes no part in the graph; 0 where hidden."""
    if not s.shape[-1]:
        return s
    top = s.detach().masked_fill(~visible, -math.inf).amax(-1, keepdim=True)
    return torch.where(visible, s - torch.where(top == -math.inf, 0.0, top), 0.0)


def entmax(alpha: Any) -> Weights:
    """[e d - tau]_+^(1/e), e = alpha - 1: the threshold by bisection, its derivative by one step of Newton."""

    def weights(s: Tensor, visible: Tensor) -> Tensor:
        if not s.shape[-1]:
            return s
        e = torch.as_tensor(alpha, dtype=torch.float64) - 1
        e = e[:, None, None] if e.dim() == 1 else e[..., None] if e.dim() else e
        soft = e.detach().abs() < 1e-9
        e = torch.where(soft, 1.0, e)
        d = e * _relative(s, visible)
        power = 1 / e

        def at(tau: Tensor, exponent: Tensor) -> Tensor:
            base = torch.where(visible, d - tau, 0.0)
            inside = base > 0
            return torch.where(inside, torch.where(inside, base, 1.0) ** exponent, 0.0)

        with torch.no_grad():
            low, high = torch.full_like(d[..., :1], -1.0), torch.zeros_like(d[..., :1])
            for _ in range(56):
                middle = (low + high) / 2
                above = at(middle, power).sum(-1, keepdim=True) >= 1
                low, high = torch.where(above, middle, low), torch.where(above, high, middle)
            falling = (power * at(low, power - 1)).sum(-1, keepdim=True)
        step = (at(low, power).sum(-1, keepdim=True) - 1) / torch.where(falling > 0, falling, 1.0)
        found = at(low + torch.where(visible.any(-1, keepdim=True), step, 0.0), power)
        return torch.where(soft, softmax(s, visible), found)

    return weights


def topk(k: int) -> Weights:
    def weights(s: Tensor, visible: Tensor) -> Tensor:
        order = torch.sort(s.detach().masked_fill(~visible, -math.inf), dim=-1, descending=True, stable=True).indices
        rank = torch.zeros_like(order).scatter(-1, order, torch.arange(s.shape[-1]).expand(s.shape).contiguous())
        return softmax(s, visible & (rank < k))

    return weights


def threshold(least: float) -> Weights:
    def weights(s: Tensor, visible: Tensor) -> Tensor:
        p = softmax(s.detach(), visible)
        largest = p.amax(-1, keepdim=True) if p.shape[-1] else p
        return softmax(s, visible & ((p >= least) | (p == largest)))

    return weights


def sigmoid(bias: Any) -> Weights:
    def weights(s: Tensor, visible: Tensor) -> Tensor:
        shift = torch.as_tensor(bias, dtype=torch.float64)
        return torch.sigmoid(s + (shift[:, None, None] if shift.dim() == 1 else shift)) * visible

    return weights


ROWWISE: dict[str, Callable[[Any], Weights]] = {
    "sparsemax": lambda _: entmax(2.0), "entmax15": lambda _: entmax(1.5), "entmax": entmax, "topk": topk,
    "threshold": threshold, "sigmoid": sigmoid,
}  # fmt: skip


def _growth(call: Call, weights: Tensor) -> Tensor:
    """How fast each weight follows its score, all but the normalisation."""
    powers = {"sparsemax": 0.0, "entmax15": 0.5}
    power: Any = powers.get(call.normalizer, 1.0)
    if call.normalizer == "entmax":
        alpha = torch.as_tensor(call.number, dtype=torch.float64).detach()
        power = 2 - (alpha[:, None, None] if alpha.dim() else alpha)
    inside = weights.detach() > 0
    return torch.where(inside, torch.where(inside, weights.detach(), 1.0) ** power, 0.0)


def _sink(call: Call) -> Tensor | None:
    """[H]: the logit that takes weight and gives no value."""
    own = {"softmax_plus_one": torch.zeros(call.query.shape[1], dtype=torch.float64), "sink": call.number}
    given = own.get(call.normalizer)
    if given is None or call.sink is None:
        return call.sink if given is None else given
    return torch.logaddexp(call.sink, given)


def results(call: Call, rounding: Rounding, tiny: float) -> dict[str, Tensor]:
    """``output`` and every statistic. ``tiny``: weights that are not far above it may count as 0."""
    s, visible = scores_of(call, rounding), call.visible
    n, share = visible.sum(-1), None
    if call.normalizer in ROWWISE:
        number = call.number * 1.0 if isinstance(call.number, Tensor) else call.number
        weights = ROWWISE[call.normalizer](number)(s, visible)
        if call.normalizer == "entmax":
            rounding.of_alpha(number, weights)
        rounding.through(s, weights, _growth(call, weights))
        weights = rounding(weights, 16)
        mass = rounding(weights.sum(-1), 4)
        p = weights / torch.where(mass > 0, mass, 1.0)[..., None]
        found = {"mass": mass}
    else:
        p = softmax(s, visible)
        rounding.through(s, p, p)
        p = rounding(p, 8 + max(s.shape[-1], 1) ** 0.5)
        top = s.detach().masked_fill(~visible, -math.inf).amax(-1) if s.shape[-1] else -torch.inf * n
        total = (_relative(s, visible).exp() * visible).sum(-1)
        seen = n > 0
        lse = torch.where(seen, torch.where(seen, top, 0.0) + torch.where(seen, total, 1.0).log(), -math.inf)
        lse = torch.where(seen, rounding(torch.where(seen, lse, 0.0), 4), lse)
        sink = _sink(call)
        finite = torch.where(seen, lse, 0.0)
        z = torch.zeros_like(finite) if sink is None else finite - sink[:, None]
        share = torch.ones_like(finite) if sink is None else torch.sigmoid(z)
        rounding.flat(z, share)
        share = torch.where(seen, share, 0.0)
        if call.value is not None:
            rounding.of_share(share, p)
        share = rounding(share, 6)
        weights = p * share[..., None]
        h = -(share * F.logsigmoid(z) + (1 - share) * F.logsigmoid(-z))
        found = {"lse": lse, "mass": share}
        logs = torch.where(p > 0, s - finite[..., None], 0.0)
        entropy = -(p * logs).sum(-1)
        found["entropy_with_sink"] = entropy if sink is None else share * entropy + torch.where(seen, h, 0.0)
    found |= _statistics(call, s, p, rounding)
    if call.normalizer in ROWWISE:
        # Between what every type holds and what float64 holds.
        found |= {"support_size": (weights > 1e8 * tiny).sum(-1), "largest support_size": (weights > 0).sum(-1)}
    else:
        found |= {"support_size": n, "largest support_size": n}
    if call.value is not None:
        repeats = call.query.shape[1] // max(call.value.shape[1], 1)
        applied = rounding(weights, 2, unit=max(rounding.stored, rounding.unit))
        value = call.value.repeat_interleave(repeats, 1)
        output = applied @ value
        terms = (weights.abs() @ value.abs()).detach()
        rounding.from_output(s, weights, output, share)
        found["output"] = rounding(output, 4 + max(s.shape[-1], 1) ** 0.5, terms)
    return found


def _statistics(call: Call, s: Tensor, p: Tensor, rounding: Rounding) -> dict[str, Tensor]:
    """What follows from scores and renormalised weights."""
    visible, keys = call.visible, s.shape[-1]
    n = visible.sum(-1)
    seen, width = n > 0, n.double()
    entropy = -torch.where(p > 0, p * torch.where(p > 0, p, 1.0).log(), 0.0).sum(-1)
    mean = (p * s).sum(-1)
    away = torch.where(visible, s - (s * visible).sum(-1, keepdim=True) / width.clamp(min=1)[..., None], 0.0)
    hidden = s.detach().masked_fill(~visible, -math.inf)
    # numpy's argmax is the first of equals.
    winner = torch.from_numpy(hidden.numpy().argmax(-1)) if keys else torch.zeros_like(n)
    top = s.gather(-1, winner[..., None])[..., 0] if keys else torch.zeros_like(width)
    best = p.gather(-1, winner[..., None])[..., 0] if keys else torch.zeros_like(width)
    squares = (p * p).sum(-1)
    queries = torch.arange(s.shape[-2])[:, None] + call.offset
    distance = (queries - torch.arange(keys)).abs().double()
    ordered = p.sort(-1).values
    rank = torch.arange(1, keys + 1) - (keys - n)[..., None]
    gini = ((2 * rank - n[..., None] - 1) * ordered).sum(-1)
    size = terms_of(p, s)
    return {
        "entropy": rounding(entropy, 6, terms_of(p, p.clamp(min=1e-300).log())),
        "normalized_entropy": rounding(torch.where(n > 1, entropy / torch.where(n > 1, width, 2.0).log(), 0.0), 8),
        "effective_tokens": rounding(torch.where(squares > 0, 1 / torch.where(squares > 0, squares, 1.0), 0.0), 8),
        "max_weight": rounding(best, 4),
        "max_logit": torch.where(seen, top, -math.inf),
        "mean_logit": rounding(mean, 6, size),
        "logit_variance": rounding(
            (p * (s - mean[..., None]) ** 2).sum(-1), 8, terms_of(p, (s - mean[..., None]) ** 2)
        ),
        "score_variance": rounding((away * away).sum(-1) / width.clamp(min=1), 8),
        "visible_keys": n,
        "first_token_mass": rounding((p * call.first[:, None, None]).sum(-1), 4),
        "mean_distance": rounding((p * distance).sum(-1), 4),
        "self_weight": rounding((p * (distance == 0)).sum(-1), 4),
        "span_mass": rounding(
            torch.zeros_like(best) if call.marked is None else (p * call.marked[:, None, None]).sum(-1), 4
        ),
        "gini": rounding(gini / torch.where(seen, width, 1.0), 4, p.sum(-1)),
        "key_mass": rounding(p.sum(-2), 4),
    }


def terms_of(p: Tensor, x: Tensor) -> Tensor:
    return (p * x.abs()).sum(-1).detach()


def visible_keys(queries: int, keys: int, offset: int, causal: bool, left: int, right: int) -> Tensor:
    """[Q, K] bool of causality and a window: how far each key is ahead of the query's place."""
    ahead = torch.arange(keys) - (torch.arange(queries)[:, None] + offset)
    marks = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        marks &= ahead <= 0
    if right >= 0:
        marks &= ahead <= right
    if left >= 0:
        marks &= ahead >= -left
    return marks
