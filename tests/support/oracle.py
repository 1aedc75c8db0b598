"""The oracle: attention and every row statistic by loops over rows, from the definitions, with no code of attemper.

Numbers are numpy's ``longdouble`` (64 bits of mantissa on x86, never less than float64). A row is reduced to its
visible keys first, so nothing here knows about -inf, tiles or running maxima. Gradients go through dL/dp and the
softmax Jacobian, not through the shifted forms of the kernels. ``test_oracle.py`` holds all of it against mpmath and
finite differences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mpmath
import numpy as np
import torch

FLOAT = np.longdouble
Array = np.ndarray

ROW_STATISTICS = (
    "lse", "entropy", "normalized_entropy", "effective_tokens", "max_weight", "max_logit", "mean_logit",
    "logit_variance", "visible_keys", "mass", "first_token_mass", "support_size", "entropy_with_sink",
    "mean_distance", "gini", "score_variance", "self_weight", "span_mass",
)  # fmt: skip
INTEGERS = ("visible_keys", "support_size")


@dataclass
class Row:
    """One query and the keys it sees: [n] each, nothing else of the sequence."""

    places: Array
    scores: Array
    x: Array
    """Scores before softcap and bias."""
    derivative: Array
    """Derivative of the softcap at x."""
    terms: Array
    """sum_d |q_d k_d| |scale / T|: what the roundings of a dot product are relative to."""
    first: Array
    distance: Array
    sink: FLOAT | None
    span: Array | None = None
    """[n] bool: the marked keys."""

    @property
    def n(self) -> int:
        return len(self.scores)

    @property
    def marked(self) -> Array:
        return np.zeros(self.n, bool) if self.span is None else self.span

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.scores).all())

    @cached_property
    def p(self) -> Array:
        e = np.exp(self.scores - self.scores.max())
        return e / e.sum()

    @cached_property
    def share(self) -> FLOAT:
        """What the sink leaves to the keys."""
        if self.sink is None:
            return FLOAT(1)
        top = max(self.scores.max(), self.sink)
        keys = np.exp(self.scores - top).sum()
        return keys / (keys + np.exp(self.sink - top))

    @cached_property
    def partials(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """Derivatives of the definitions in ``row_statistics`` by p, and by the scores themselves."""
        s, p, n = self.scores, self.p, self.n
        mean, top, log_p = (p * s).sum(), int(np.argmax(s)), np.log(np.where(p > 0, p, 1))
        by_p = {
            "entropy": -(log_p + 1),
            "normalized_entropy": -(log_p + 1) / math.log(n) if n > 1 else np.zeros(n, FLOAT),
            "effective_tokens": -2 * p / (p * p).sum() ** 2,
            "max_weight": (np.arange(n) == top).astype(FLOAT),
            "mean_logit": s - s[top],
            "logit_variance": (s - mean) ** 2,
            "first_token_mass": self.first.astype(FLOAT),
            "mean_distance": self.distance,
            "self_weight": (self.distance == 0).astype(FLOAT),
            "span_mass": self.marked.astype(FLOAT),
            "gini": (2 * (np.argsort(np.argsort(p, kind="stable")) + 1) - n - 1).astype(FLOAT) / n,
        }
        by_s = {
            "lse": p,
            "max_logit": (np.arange(n) == top).astype(FLOAT),
            "mean_logit": p,
            "logit_variance": 2 * p * (s - mean),
            "score_variance": 2 * (s - s.mean()) / n,
        }
        return by_p, by_s


def row_statistics(row: Row) -> dict[str, FLOAT]:
    """Every statistic of a row, by the definitions of MATHS."""
    if row.n == 0:
        return {name: FLOAT(-np.inf if name in ("lse", "max_logit") else 0) for name in ROW_STATISTICS}
    if not row.finite:
        return {name: FLOAT(row.n if name in INTEGERS else np.nan) for name in ROW_STATISTICS}
    s, n, p, share = row.scores, row.n, row.p, row.share
    mean = (p * s).sum()
    weights = np.append(p * share, 1 - share) if row.sink is not None else p
    return {
        "lse": s.max() + np.log(np.exp(s - s.max()).sum()),
        "entropy": plogp(p).sum(),
        "normalized_entropy": plogp(p).sum() / np.log(FLOAT(n)) if n > 1 else FLOAT(0),
        "effective_tokens": 1 / (p * p).sum(),
        "max_weight": p.max(),
        "max_logit": s.max(),
        "mean_logit": mean,
        "logit_variance": (p * (s - mean) ** 2).sum(),
        "visible_keys": FLOAT(n),
        "support_size": FLOAT(n),
        "mass": share,
        "first_token_mass": p[row.first].sum(),
        "entropy_with_sink": plogp(weights).sum(),
        "mean_distance": (p * row.distance).sum(),
        "gini": (np.sort(p) * (2 * np.arange(1, n + 1) - n - 1)).sum() / n,
        "score_variance": ((s - s.mean()) ** 2).mean(),
        "self_weight": p[row.distance == 0].sum(),
        "span_mass": p[row.marked].sum(),
    }


def plogp(p: Any) -> Any:
    """-p log p, 0 at 0."""
    safe = np.where(p > 0, p, 1)
    return -safe * np.log(safe) * (p > 0)


def precise_entropy(scores: list[float]) -> float:
    """Entropy of softmax(scores) with 80 digits, for rows so sharp that 1 - p vanishes in float64."""
    with mpmath.workdps(80):
        terms = [mpmath.exp(mpmath.mpf(s) - mpmath.mpf(max(scores))) for s in scores]
        total = mpmath.fsum(terms)
        return float(-mpmath.fsum(t / total * mpmath.log(t / total) for t in terms))


@dataclass
class Inputs:
    """A call as numbers: [B, H, Q, D], [B, G, K, D], [B, G, K, E] and the options of ``attemper.attention``."""

    query: Array
    key: Array
    value: Array | None
    visible: Array
    """[B, H, Q, K] bool: mask and causal rule and window."""
    bias: Array | None
    temperature: Array
    """[B, H, Q]."""
    scale: FLOAT
    softcap: float | None
    sink: Array | None
    tokens: Array
    """[B, K] bool: keys that are not padding."""
    first_tokens: int
    offset: int
    span: Array | None = None
    """[B, K] bool."""

    def row(self, b: int, h: int, i: int) -> Row:
        places = np.flatnonzero(self.visible[b, h, i])
        group = h // (self.query.shape[1] // self.key.shape[1])
        multiplier = self.scale / self.temperature[b, h, i]
        products = self.key[b, group, places] * self.query[b, h, i]
        x, terms = multiplier * products.sum(-1), abs(multiplier) * np.abs(products).sum(-1)
        scores, derivative = x, np.ones_like(x)
        if self.softcap is not None:
            bent = np.tanh(x / FLOAT(self.softcap))
            scores, derivative = FLOAT(self.softcap) * bent, 1 - bent**2
        if self.bias is not None:
            scores = scores + self.bias[b, h, i, places]
        rank = np.cumsum(self.tokens[b])
        first = (self.tokens[b] & (rank <= self.first_tokens))[places]
        distance = np.abs(i + self.offset - places).astype(FLOAT)
        sink = None if self.sink is None else self.sink[h]
        span = None if self.span is None else self.span[b, places]
        return Row(places, scores, x, derivative, terms, first, distance, sink, span)

    def values(self, b: int, h: int, row: Row) -> Array:
        """[n, E]: the values of the row's keys."""
        assert self.value is not None
        return self.value[b, h // (self.query.shape[1] // self.value.shape[1]), row.places]


def numbers(tensor: torch.Tensor) -> Array:
    return tensor.detach().to(torch.float64).cpu().numpy().astype(FLOAT)


def inputs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor | None = None, attn_mask: torch.Tensor | None = None,
    is_causal: bool = False, scale: float | None = None, *, temperature: float | torch.Tensor = 1.0,
    causal_alignment: str = "top-left", window_size: tuple[int, int] = (-1, -1), softcap: float | None = None,
    sink_logits: torch.Tensor | None = None, first_tokens: int = 1, spans: torch.Tensor | None = None,
) -> Inputs:  # fmt: skip
    """The oracle's view of a call of ``attemper.attention``."""
    (batch, heads, rows, size), keys = query.shape, key.shape[2]
    offset = keys - rows if causal_alignment == "bottom-right" else 0
    seen, bias = _mask(attn_mask, (batch, heads, rows, keys))
    tokens: Array = np.ones((batch, keys), bool) if attn_mask is None else np.asarray(seen.any((1, 2)))
    left, right = window_size
    visible = seen.copy()
    for i in range(rows):
        for j in range(keys):
            hidden = (is_causal and j > i + offset) or (right >= 0 and j > i + offset + right)
            if hidden or (left >= 0 and j < i + offset - left):
                visible[:, :, i, j] = False
    temperatures = numbers(torch.as_tensor(temperature, dtype=torch.float64))
    return Inputs(
        query=numbers(query), key=numbers(key), value=None if value is None else numbers(value), visible=visible,
        bias=bias,
        temperature=np.broadcast_to(temperatures, (batch, heads, rows)),
        scale=FLOAT(scale) if scale is not None else 1 / np.sqrt(FLOAT(size)), softcap=softcap,
        sink=None if sink_logits is None else numbers(sink_logits), tokens=tokens, first_tokens=first_tokens,
        offset=offset, span=None if spans is None else np.broadcast_to(spans.numpy(), (batch, keys)),
    )  # fmt: skip


def _mask(mask: torch.Tensor | None, shape: tuple[int, ...]) -> tuple[Array, Array | None]:
    if mask is None:
        return np.ones(shape, bool), None
    if mask.dtype == torch.bool:
        return np.broadcast_to(mask.numpy(), shape).copy(), None
    bias = np.broadcast_to(numbers(mask), shape)
    return ~(bias <= float(torch.finfo(mask.dtype).min) / 2), bias


def forward(call: Inputs) -> dict[str, Array]:
    """``output`` [B, H, Q, E] (where there are values), each statistic [B, H, Q] and ``key_mass`` [B, H, K]."""
    shape = call.query.shape[:3]
    results: dict[str, Any] = {name: np.zeros(shape, FLOAT) for name in ROW_STATISTICS}
    results["key_mass"] = np.zeros((*shape[:2], call.key.shape[2]), FLOAT)
    if call.value is not None:
        results["output"] = np.zeros((*shape, call.value.shape[3]), FLOAT)
    for b, h, i in np.ndindex(*shape):
        row = call.row(b, h, i)
        for name, number in row_statistics(row).items():
            results[name][b, h, i] = number
        if row.n and row.finite:
            results["key_mass"][b, h, row.places] += row.p
            if call.value is not None:
                results["output"][b, h, i] = (row.p * row.share) @ call.values(b, h, row)
    return results


@dataclass
class Sensitivity:
    """dL/d(something of a row), and the sum of the absolute values of its terms: what roundings are relative to."""

    p: Array
    """Through the renormalised weights."""
    w: Array
    """Through the weights that a sink has taken its share of."""
    w_sink: FLOAT = field(default_factory=lambda: FLOAT(0))
    direct: Array | None = None
    """Through the scores themselves."""


def row_sensitivity(row: Row, upstream: Mapping[str, Any], absolute: bool = False) -> Sensitivity:
    """dL/dp, dL/dw and direct dL/ds of a row, from the definition of each statistic. ``absolute`` adds up |terms|."""
    p, n, share = row.p, row.n, row.share
    size = np.abs if absolute else (lambda value: value)
    by_p, by_s = row.partials
    result = Sensitivity(np.zeros(n, FLOAT), np.zeros(n, FLOAT), FLOAT(0), np.zeros(n, FLOAT))
    for name, g in upstream.items():
        if name in by_p:
            result.p += size(g * by_p[name])
        if name in by_s:
            result.direct += size(g * by_s[name])
    if "key_mass" in upstream:
        result.p += size(upstream["key_mass"][row.places])
    if "mass" in upstream and row.sink is not None:
        result.w += size(upstream["mass"])
    if "entropy_with_sink" in upstream:
        g, w = upstream["entropy_with_sink"], p * share
        result.w += size(-g * (np.log(np.where(w > 0, w, 1)) + 1))
        result.w_sink += size(-g * (np.log(1 - share) + 1)) if share < 1 else 0
    return result


def score_gradient(row: Row, of: Sensitivity) -> Array:
    """dL/ds [n] through the Jacobian of softmax."""
    p, w = row.p, row.p * row.share
    mean_p, mean_w = (p * of.p).sum(), (w * of.w).sum() + (1 - row.share) * of.w_sink
    return p * (of.p - mean_p) + w * (of.w - mean_w) + of.direct


def statistic_gradients(row: Row, names: Sequence[str]) -> Array:
    """d statistic / d scores, [names, n]."""
    (by_p, by_s), nothing = row.partials, np.zeros(row.n, FLOAT)
    through = np.stack([by_p.get(name, nothing) for name in names])
    direct = np.stack([by_s.get(name, nothing) for name in names])
    found = row.p * (through - (row.p * through).sum(-1, keepdims=True)) + direct
    for place, name in enumerate(names):
        if name in ("mass", "entropy_with_sink"):
            found[place] = score_gradient(row, row_sensitivity(row, {name: FLOAT(1)}))
    return found


def row_gradient(row: Row, upstream: Mapping[str, Any], values: Array | None) -> dict[str, tuple]:
    """dL/ds [n] and dL/dsink of a row, each with the sum of the absolute values of its terms."""
    p, share = row.p, row.share
    plain, sizes = row_sensitivity(row, upstream), row_sensitivity(row, upstream, absolute=True)
    if values is not None and "output" in upstream:
        plain.w = plain.w + values @ upstream["output"]
        sizes.w = sizes.w + np.abs(values) @ np.abs(upstream["output"])
    w, rest = p * share, 1 - share
    mean_w = (w * plain.w).sum() + rest * plain.w_sink
    size_p, size_w = (p * sizes.p).sum(), (w * sizes.w).sum() + rest * sizes.w_sink
    magnitude = p * (sizes.p + size_p) + w * (sizes.w + size_w) + sizes.direct
    return {
        "scores": (score_gradient(row, plain), magnitude),
        "sink": (rest * (plain.w_sink - mean_w), rest * (sizes.w_sink + size_w)),
    }
