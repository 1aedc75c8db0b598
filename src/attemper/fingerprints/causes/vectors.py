"""Causes in queries and keys that a factor, another order of heads or an added vector explains."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from attemper.fingerprints.causes.rotary import Pairing, angles_of, as_pairs, pairings
from attemper.fingerprints.causes.scores import factor
from attemper.fingerprints.finding import Finding, in_words, short
from attemper.fingerprints.pair import SitePair
from attemper.fingerprints.record import PAIRS, VECTOR_ROWS

STAGE = "q and k"


def factor_of_products(pair: SitePair) -> Finding | None:
    """Queries, keys or both are longer by a factor, of a head or by row: read off all products, whose errors
    average out.
    """
    weight = _weights(pair)
    a, b = (_less_row_mean(site.raw.astype(np.float64), weight) for site in (pair.a, pair.b))
    size = np.maximum((weight * a * a).sum(-1), 1e-300)
    c = (weight * a * b).sum(-1) / size
    rest, total = (weight * (b - c[..., None] * a) ** 2).sum(-1), (weight * (b - a) ** 2).sum(-1)
    # Of one row's factor, by how far single products are from it; the factor of a row has an error of its own, too.
    error = 2 * np.sqrt(rest.sum(1) / (PAIRS / 2 * size.sum(1))) + 1e-6
    mean = (c * size).sum(1) / size.sum(1)
    rows = np.sqrt((size * (c - 1) ** 2).sum(1) / size.sum(1))
    marked = (np.abs(mean - 1) > SURE * error / np.sqrt(max(c.shape[1] / 2, 1))) | (rows > 3 * error)
    if not marked.any():
        return None
    noise = _noise_of_others(rest.sum(1) / size.sum(1), marked) * size[marked].sum()
    left = float(max(rest[marked].sum() - noise, 0.0) / max(total[marked].sum(), 1e-300))
    found = factor(pair, np.where(marked[:, None], c, 1.0), float(error.max()), STAGE, own=False)
    if found is None:
        # One factor for all rows, of which no single one is sure.
        value = float(np.median(mean[marked]))
        spread = float(((mean[marked] - value) ** 2).sum() / ((mean[marked] - 1) ** 2).sum())
        found = Finding("scale", STAGE, spread, value)
    heads = pair.heads(marked)
    residual = max(left, found.residual)
    if found.kind == "logn":
        return replace(found, residual=residual)
    value = float(np.median(mean[marked]))
    sizes = [_length(*vectors) for vectors in (pair.query, pair.key)]
    both = heads is None and all(abs(one - 1) > 1e-3 for one in sizes) and abs(sizes[0] / sizes[1] - 1) < 0.02
    words = f"{in_words(heads)}q.k of run b is {short(value)} times that of run a"
    if both:
        words = (
            f"q.k of run b is {short(value)} times that of run a, with queries and keys {short(sizes[0])} times as "
            "long, as by the magnitude of a rotary embedding (YaRN)"
        )
    return Finding("scale", STAGE, residual, value, heads, words)


def _noise_of_others(rest: np.ndarray, marked: np.ndarray) -> float:
    """What a factor leaves of heads, [H] relative to their products, where they have none: their median."""
    return float(np.median(rest[~marked])) if not marked.all() else 0.0


def _weights(pair: SitePair) -> np.ndarray:
    """[R, PAIRS]: 1 over the variance of a pair's products, by what one factor for each row leaves in all heads; 0
    where there is none. A token whose experts changed shows in every head: it must not speak as loud as others.
    """
    known = ~(np.isnan(pair.a.raw) | np.isnan(pair.b.raw))
    seen = np.where(known.all(0), 1.0, 0.0)
    if len(known) < FEWEST or not seen.any():
        return seen
    a, b = (_less_row_mean(site.raw.astype(np.float64), seen) for site in (pair.a, pair.b))
    size = (a * a).sum(-1, keepdims=True)
    rest = (b - (a * b).sum(-1, keepdims=True) / np.maximum(size, 1e-300) * a) ** 2
    variance = (rest / np.maximum(size.mean(1, keepdims=True), 1e-300)).mean(0)
    middle = np.median(variance[seen > 0])
    return seen * middle / np.maximum(variance + 0.3 * middle, 1e-300) if middle else seen


def _less_row_mean(raw: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Products less the mean of their row, which moves no weight; 0 where there is none. Where all tokens are alike,
    products share their rounding errors, and these must not pass for a factor.
    """
    known = np.where(weight > 0, raw, 0.0)
    mean = (weight * known).sum(-1, keepdims=True) / np.maximum(weight.sum(-1, keepdims=True), 1e-300)
    return np.where(weight > 0, known - mean, 0.0)


FEWEST = 3
"""Heads by which the variance of a pair can be told."""
SURE = 6.0
"""Standard errors that a factor must be away from 1."""


def _length(a: np.ndarray, b: np.ndarray) -> float:
    return float((a * b).sum() / max((a * a).sum(), 1e-300))


def head_order(pair: SitePair) -> Finding | None:
    """The heads of queries or keys are the same ones in another order."""
    found = []
    for name, (a, b) in (("queries", pair.query), ("keys", pair.key)):
        cost = ((b[:, None] - a[None]) ** 2).sum((2, 3))
        order = cost.argmin(1)
        moved = order != np.arange(len(order))
        if len(order) < 2 or not moved.any() or len(set(order.tolist())) != len(order):
            continue
        left = cost[moved, order[moved]].sum() / max(cost.diagonal()[moved].sum(), 1e-300)
        found.append((float(left), name, order, moved))
    if not found:
        return None
    left, name, order, moved = min(found, key=lambda one: one[0])
    rest = sum(((b - a) ** 2).sum() for other, (a, b) in (("queries", pair.query), ("keys", pair.key)) if other != name)
    own = (
        ((pair.query[1] - pair.query[0]) ** 2).sum() if name == "queries" else ((pair.key[1] - pair.key[0]) ** 2).sum()
    )
    each = len(order) == len(pair.a.query) > len(pair.a.key)  # keys of one run stand once for each head
    kind = "grouping" if name == "keys" and rest < 0.01 * own and each else None
    heads = pair.heads(moved)
    said = ", ".join(str(pair.numbers(len(order))[place]) for place in order[:16])
    words = f"the {name} of run b are those of heads {said} of run a"
    return Finding(kind or "head_order", STAGE, left, None, heads, words)


def bias(pair: SitePair) -> Finding | None:
    """A vector is added to queries or keys of a head, before or after rotation."""
    found: list[tuple[float, str]] = []
    for name, (a, b) in (("queries", pair.query), ("keys", pair.key)):
        change = b - a
        total = (change**2).sum()
        if not total or change.shape[1] < 3:
            continue
        degrees = change.shape[1] / (change.shape[1] - 1)
        found.append((degrees * ((change - change.mean(1, keepdims=True)) ** 2).sum() / total, name))
        for pairing in pairings(pair):
            z = as_pairs(change, pairing)
            for theta in angles_of(pair, pairing.count):
                still = z * np.exp(-1j * np.array(_places(pair))[:, None] * theta)
                left = (np.abs(still - still.mean(1, keepdims=True)) ** 2).sum() + _rest_beside(change, pairing)
                found.append((degrees * left / total, name))
    if not found:
        return None
    # Both may be changed: what explains the one that is changed more counts.
    sizes = {
        name: float(((b - a) ** 2).sum() / max((a * a).sum(), 1e-300))
        for name, (a, b) in (("queries", pair.query), ("keys", pair.key))
    }
    name = max(sizes, key=lambda one: sizes[one])
    left = min((one for one, which in found if which == name), default=1.0)
    changed = pair.query_level if name == "queries" else pair.key_level
    marked = changed > 0.1 * changed.max()
    heads = pair.heads(marked) if name == "queries" else None
    return Finding(
        "bias", STAGE, float(left), None, heads, f"{in_words(heads)}{name} differ by one vector at all places"
    )


def _rest_beside(change: np.ndarray, pairing: Pairing) -> float:
    """What a bias leaves of features that are not rotated."""
    rest = change[..., pairing.rotated :]
    return float(((rest - rest.mean(1, keepdims=True)) ** 2).sum()) if rest.shape[-1] else 0.0


def _places(pair: SitePair) -> list[int]:
    return list(VECTOR_ROWS[: pair.a.query.shape[1]])


def key_rounding(pair: SitePair) -> Finding | None:
    """Keys of one run lie on a grid of few levels, those of the other do not."""
    found = [_bits(key) for key in (pair.a.key.astype(np.float64), pair.b.key.astype(np.float64))]
    if found[0] == found[1]:
        return None
    which = "b" if found[1] is not None else "a"
    value, before = (None if one is None else float(one) for one in (found[1], found[0]))
    bits = found[1] if which == "b" else found[0]
    words = f"keys of run {which} lie on a grid of {bits} bits"
    return Finding("key_rounding", STAGE, 0.01, value, None, words, before, own=True)


def _bits(key: np.ndarray) -> int | None:
    """Bits of the grid that the elements of keys [G, P, D] lie on, each vector with its own step; None for none."""
    if key.shape[-1] < 8:
        return None
    most = np.abs(key).max(-1, keepdims=True)
    low, wide = key.min(-1, keepdims=True), np.ptp(key, -1)[..., None]
    for bits in range(2, 9):
        levels = 2 ** (bits - 1) - 1
        for unit, origin in ((most / levels, 0.0), (most / (levels + 1), 0.0), (wide / (2**bits - 1), low)):
            steps = (key - origin) / np.where(unit > 0, unit, 1.0)
            # Products of bfloat16 carry the rounding of the step: large multiples tell nothing.
            small = np.abs(steps) < (2**8 if bits < 6 else 20)
            off = np.abs(steps - np.round(steps))[small]
            if small.mean() > 0.1 and off.size > 64 and np.sqrt((off**2).mean()) < 0.06:
                return bits
    return None
