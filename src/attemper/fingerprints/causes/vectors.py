"""Causes in queries and keys that a factor, another order of heads or an added vector explains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from attemper.fingerprints import floor
from attemper.fingerprints.causes.rotary import Pairing, angles_of, pairings, places_of, turn
from attemper.fingerprints.causes.scores import log_length
from attemper.fingerprints.finding import REPRODUCED, Finding, finding_of, in_words, short, slope
from attemper.fingerprints.pair import SitePair
from attemper.fingerprints.site import MARGIN, PAIRS

STAGE = "q and k"


def all_zero(pair: SitePair) -> Finding | None:
    """Queries or keys of heads that are all zero in one run alone."""
    for words, both in (("queries", pair.query), ("keys", pair.key)):
        one, two = (~part.any((1, 2)) for part in both)
        if (one != two).any():
            heads, run = pair.heads(one != two), "b" if (two & ~one).any() else "a"
            words = f"{in_words(heads)}{words} of run {run} are all zero"
            return Finding("weights", STAGE, 1.0, None, heads, words)
    return None


def factor_of_products(pair: SitePair) -> Iterator[Finding]:
    """Queries, keys or both are longer by a factor, of a head or by row: read off all products, whose errors
    average out.
    """
    weight = _weights(pair)
    a, b = (_less_row_mean(site.raw.astype(np.float64), weight) for site in (pair.a, pair.b))
    aa, ab, bb = ((weight * one * two).sum(-1) for one, two in ((a, a), (a, b), (b, b)))
    size = np.maximum(aa, 1e-300)
    c = ab / size
    rest = (weight * (b - c[..., None] * a) ** 2).sum((1, 2))
    # Of one row's factor, by how far single products are from it; the factor of a row has an error of its own, too.
    error = 2 * np.sqrt(rest / (PAIRS / 2 * size.sum(1))) + 1e-6
    mean = slope(aa.sum(1), ab.sum(1), bb.sum(1), pair)
    rows = np.sqrt((size * (c - 1) ** 2).sum(1) / size.sum(1))
    marked = (np.abs(mean - 1) > SURE * error / np.sqrt(max(c.shape[1] / 2, 1))) | (rows > 3 * error)
    if not marked.any():
        return
    heads, value = pair.heads(marked), float(np.median(mean[marked]))
    sizes = [float((a * b).sum() / max((a * a).sum(), 1e-300)) for a, b in (pair.query, pair.key)]
    words = f"{in_words(heads)}q.k of run b is {short(value)} times that of run a"
    if heads is None and all(abs(one - 1) > 1e-3 for one in sizes) and abs(sizes[0] / sizes[1] - 1) < 0.02:
        words += (
            f", with queries and keys {short(sizes[0])} times as long, as by the magnitude of a rotary embedding (YaRN)"
        )
    found = [(Finding("scale", STAGE, 1.0, value, heads, words), np.full_like(c, value))]
    length = log_length(c[marked], pair.places)
    if length is not None:
        words = (
            f"{in_words(heads)}scores of one run grow with log n, from n = {short(length[0])} on, beside the other's"
        )
        found.append((Finding("logn", STAGE, 1.0, length[0], heads, words), np.broadcast_to(length[1], c.shape)))
    if np.ptp(mean[marked]) > SURE * error.max():
        said = ", ".join(map(short, mean[marked][:8]))
        words = f"{in_words(heads)}q.k of run b is {said} times that of run a, head by head"
        found.append((Finding("scale", STAGE, 1.0, None, heads, words), np.repeat(mean[:, None], c.shape[1], 1)))
    others = (rest / size.sum(1))[~marked]  # what a factor leaves where there is none
    noise = float(np.median(others)) * size[marked].sum() if len(others) else 0.0
    total = max(min((weight * part**2)[marked].sum() for part in (b - a, a, b)), 1e-300)
    for one, factors in found:
        factors = np.where(marked[:, None], factors, 1.0)
        left = (weight * (b - factors[..., None] * a) ** 2)[marked].sum()
        yield replace(one, residual=float(max(left - noise, 0.0) / total), reproduced=_reproduces(pair, factors))


def _reproduces(pair: SitePair, factors: np.ndarray) -> bool:
    """Whether factors [H, R] make the products of run b of those of run a."""
    known = np.where((~(np.isnan(pair.a.raw) | np.isnan(pair.b.raw))).all(0), 1.0, 0.0)
    a, b = (_less_row_mean(site.raw.astype(np.float64), known) for site in (pair.a, pair.b))
    rest = np.sqrt(((b - factors[..., None] * a) ** 2).sum(-1) / np.maximum(known.sum(-1), 1.0))
    one, two = pair.lengths
    relative = rest / np.maximum(np.minimum(np.abs(factors) * one, two), 1e-9 * (one + two) + 1e-30)
    return max(map(pair.level, relative)) <= REPRODUCED * MARGIN * floor.products(pair)


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


def head_order(pair: SitePair) -> Iterator[Finding]:
    """The heads of queries, keys or both are the same ones in another order."""
    orders = [_order(*part) for part in (pair.query, pair.key)]
    moved = [order != np.arange(len(order)) for order in orders]
    said = [
        f"the {name} of run b are the {name} of heads {', '.join(str(pair.numbers(len(order))[n]) for n in order[:16])}"
        for name, order, mark in zip(("queries", "keys"), orders, moved, strict=True)
        if mark.any()
    ]
    if said:
        each = len(orders[1]) == len(pair.a.query) > len(pair.a.key)  # keys of one run stand once for each head
        kind = "grouping" if each and not moved[0].any() else "head_order"
        heads = pair.heads(next(mark for mark in moved if mark.any()))
        made = pair.query[0][orders[0]], pair.key[0][orders[1]]
        yield finding_of(pair, kind, *made, f"{', and '.join(said)} of run a", heads=heads)


def _order(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Which head of run a each head of run b is; as they stand where that is no order."""
    cost = ((b[:, None] - a[None]) ** 2).sum((2, 3))
    own = np.arange(len(cost))
    order = np.where(cost.diagonal() <= cost.min(1) * (1 + 1e-9), own, cost.argmin(1))
    return order if len(set(order.tolist())) == len(order) else own


def other_projection(pair: SitePair) -> Iterator[Finding]:
    """Queries stand where keys should and keys where queries should; or one run has one of them in both places."""
    if pair.query[0].shape != pair.key[0].shape:
        return
    words = "queries of run b are the keys of run a, and its keys the queries of run a"
    yield finding_of(pair, "swapped", pair.key[0], pair.query[0], words)
    for name, one in (("b", pair), ("a", SitePair(pair.number, pair.b, pair.a))):
        for made, words in ((one.query[0], "its keys are its queries"), (one.key[0], "its queries are its keys")):
            yield finding_of(one, "not_loaded", made, made, f"in run {name} {words}")


def apart(pair: SitePair, heads: tuple[int, ...] | None) -> Finding:
    """Queries and keys that no cause makes of one another, and what is known of them."""
    limit, said = MARGIN * floor.vectors(pair), {}
    parts = ("queries", pair.query, pair.query_level), ("keys", pair.key, pair.key_level)
    for name, (a, b), level in parts:
        if (marked := level > limit).any():
            a, b = a[marked], b[marked]
            sizes = np.linalg.norm(a), np.linalg.norm(b)
            like = float((a * b).sum() / max(sizes[0] * sizes[1], 1e-300))
            words = f"{name} differ by {level.max():.2g} of their size (correlation {like:.2f}"
            said[name] = f"{words}, {short(float(sizes[1] / max(sizes[0], 1e-300)))} times as long in run b)"
    words = "; ".join(said.values()) or "products of queries and keys differ"
    words = f"{in_words(heads)}{words}, by no rule that is known"
    return Finding("weights", STAGE, 1.0, None, heads, words, parts=tuple(said))


def bias(pair: SitePair) -> Iterator[Finding]:
    """A vector is added to queries, keys or both of a head, before or after rotation."""
    least = min(pair.query[0].shape[1], pair.key[0].shape[1])
    if least < 3:
        return
    still: list[tuple[Pairing, np.ndarray]] = [(Pairing(0, True), np.zeros(0))]
    own = pair.a.kind == "self"
    turned = ((pairing, theta) for pairing in pairings(pair) if own for theta in angles_of(pair, pairing.count))
    marks = [
        level > 0.1 * max(pair.query_level.max(), pair.key_level.max()) for level in (pair.query_level, pair.key_level)
    ]
    names = [name for name, mark in zip(("queries", "keys"), marks, strict=True) if mark.any()]
    heads = pair.heads(marks[0]) if marks[0].any() else None
    words = f"{in_words(heads)}{' and '.join(names)} differ by one vector at all places"
    for pairing, theta in (*still, *turned):
        made = []
        for a, b in (pair.query, pair.key):
            places = places_of(a)
            change = turn(b - a, pairing, theta, -places).mean(1, keepdims=True)
            made.append(a + turn(np.repeat(change, len(places), 1), pairing, theta, places))
        fitted = least / (least - 1)
        yield finding_of(pair, "bias", made[0], made[1], words, heads=heads, fitted=fitted)


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
