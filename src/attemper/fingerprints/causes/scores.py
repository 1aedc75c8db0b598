"""Causes between the raw dot product and the weights: each run's own final score as a function of its own q.k.

``final = cap tanh(m q.k / cap) + bias`` holds in each run exactly, so that what rounding did to q and k cancels.
SitePair are m by row (scale, log n), cap, what is added by key or by distance, and the sink that follows from
the kept mass.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from attemper.fingerprints.finding import ACCEPTED, Finding, in_words, short
from attemper.fingerprints.pair import SitePair
from attemper.fingerprints.record import SiteFingerprint, scaled_products

STAGE = "final score"
EXACT = 2e-5
"""Relative error of a number that a run's own scores give: they are kept in float32."""
_SEEN_SINK = 1e-4
"""Mass that a sink must take before its size can be told."""


def find(pair: SitePair) -> list[Finding]:
    """Scale, log n, softcap, biases, sink."""
    return [found for cause in (_multiplier, _softcap, _bias, _sink) if (found := cause(pair)) is not None]


def multipliers(site: SiteFingerprint) -> np.ndarray:
    """[H, R]: scale / T of each row; fitted where the run tells only its scores."""
    given = site.statistics["multiplier"].astype(np.float64)
    return given if not np.isnan(given).any() else np.full_like(given, np.nan)


def _multiplier(pair: SitePair) -> Finding | None:
    one, two = multipliers(pair.a), multipliers(pair.b)
    if np.isnan(one).any() or np.isnan(two).any() or not (one != 0).all():
        return None
    return factor(pair, two / one, EXACT, STAGE, own=True)


def factor(pair: SitePair, ratio: np.ndarray, least: float, stage: str, *, own: bool) -> Finding | None:
    """What a factor [H, R] on scores is: one number a scale, one that grows with the place log n.

    Args:
        least: the smallest change of the factor that counts.
    """
    changed = np.abs(ratio - 1) > least
    if not changed.any():
        return None
    heads = pair.heads(np.asarray(changed.any(1)))
    rows = ratio[changed.any(1)]
    middle = np.median(rows)
    total = ((rows - 1) ** 2).sum()
    left = ((rows - middle) ** 2).sum() / total
    best = Finding(
        "scale", stage, float(left), float(middle), heads,
        f"{in_words(heads)}scores of run b are {short(middle)} times those of run a", own=own,
    )  # fmt: skip
    length = _log_length(rows, pair.places)
    if length is not None and length[1] < best.residual and best.residual > 1e-6:
        words = f"scores of one run grow with log n, from n = {short(length[0])} on, beside the other's"
        best = Finding("logn", stage, length[1], length[0], heads, in_words(heads) + words, own=own)
    return best if best.residual <= ACCEPTED else None


def _log_length(rows: np.ndarray, places: np.ndarray) -> tuple[float, float] | None:
    """L for which a factor, or its inverse, is log(n) / log(L), at least 1 or as it is; and what it leaves."""
    logs = np.log(places + 1.0)
    found: list[tuple[float, float]] = []
    for values in (rows, 1 / rows):
        off = (np.abs(values - 1) > 0.01) & (logs > 0)
        if off.sum() < 2:
            continue
        base = np.median((logs / values)[off])
        if not np.isfinite(base) or base <= 0:
            continue
        for form in (np.maximum(logs / base, 1.0), logs / base):
            left = ((values - form) ** 2).sum() / ((values - 1) ** 2).sum()
            found.append((float(np.exp(base)), float(left)))
    return min(found, key=lambda one: one[1]) if found else None


def _softcap(pair: SitePair) -> Finding | None:
    one, two = pair.a.softcap, pair.b.softcap
    if one == two or (one and two and abs(one / two - 1) < EXACT):
        return None
    said = ["no softcap" if cap is None else f"a softcap of {short(cap)}" for cap in (one, two)]
    return Finding("softcap", STAGE, 0.0, two, None, f"{said[0]} in run a, {said[1]} in run b", one, own=True)


def bias_of(site: SiteFingerprint) -> np.ndarray:
    """[H, R, PAIRS]: what is added to the score of a pair beside its product."""
    final = site.final.astype(np.float64)
    if np.isnan(site.raw).all():
        return final
    return final - scaled_products(site.raw, site.statistics["multiplier"], site.softcap)


def _bias(pair: SitePair) -> Finding | None:
    if np.isnan(pair.a.raw).all() or np.isnan(pair.b.raw).all():
        return None
    both = np.isfinite(pair.a.final) & np.isfinite(pair.b.final)
    own = [np.where(both, bias_of(site), 0.0) for site in (pair.a, pair.b)]
    change = own[1] - own[0]
    size = np.abs(np.where(both, pair.a.final, 0.0)).max() + max(np.abs(one).max() for one in own)
    rounding = 2 * pair.eps * max(np.abs(one).max() for one in own)
    # A number that all keys of a row share moves no weight.
    count = np.maximum(both.sum(-1, keepdims=True), 1)
    centred = np.where(both, change - change.sum(-1, keepdims=True) / count, 0.0)
    marked = np.abs(centred) > EXACT * max(size, 1.0) + rounding
    if not marked.any():
        return None
    heads = pair.heads(marked.any((1, 2)))
    chosen = marked.any((1, 2))
    named = [_by_key(pair, change[chosen], both[chosen]), _by_distance(pair, change[chosen], both[chosen])]
    kind, value, left = min(named, key=lambda one: one[2])
    if left > ACCEPTED:
        return Finding("scores", STAGE, left, None, heads, "numbers are added to scores by no rule known", own=True)
    if value is not None and kind == "key_shift":
        words = f"run b adds {short(value)} to the scores of some keys, for every row"
    else:
        words = (
            f"run b adds {short(value)} to a score for every token of distance"
            if value is not None
            else ("numbers are added to scores by distance")
        )
    return Finding(kind, STAGE, left, value, heads, in_words(heads) + words, own=True)


def _by_label(labels: np.ndarray, change: np.ndarray, both: np.ndarray) -> tuple[float, np.ndarray]:
    """What is left of ``change`` [H, R, PAIRS] if it is one number for each head and label, and a row's own number."""
    total = left = 0.0
    kept = []
    for values, seen in zip(change, both, strict=True):
        rows, cells = np.nonzero(seen)
        if not len(rows):
            continue
        y = values[rows, cells]
        names, place = np.unique(labels[rows, cells], return_inverse=True)
        fit, own = np.bincount(place, y) / np.bincount(place), np.zeros(len(values))
        # A row's own number moves no weight: it is taken off in turn with that of the label.
        for _ in range(8):
            own = np.bincount(rows, y - fit[place], len(values)) / np.maximum(
                np.bincount(rows, minlength=len(values)), 1
            )
            fit = np.bincount(place, y - own[rows]) / np.bincount(place)
        rest = y - fit[place] - own[rows]
        mean = np.bincount(rows, y, len(values)) / np.maximum(np.bincount(rows, minlength=len(values)), 1)
        total += ((y - mean[rows]) ** 2).sum()
        left += (rest**2).sum()
        kept.append(np.stack([names, fit], 1))
    return (left / total if total else 1.0), kept[0] if kept else np.zeros((0, 2))


def _by_key(pair: SitePair, change: np.ndarray, both: np.ndarray) -> tuple[str, float | None, float]:
    left, fit = _by_label(pair.a.pair_keys, change, both)
    middle = np.median(fit[:, 1]) if len(fit) else 0.0
    largest = fit[np.abs(fit[:, 1] - middle).argmax(), 1] - middle if len(fit) else 0.0
    return "key_shift", float(largest), left


def _by_distance(pair: SitePair, change: np.ndarray, both: np.ndarray) -> tuple[str, float | None, float]:
    distance = np.abs(pair.places[:, None] - pair.a.pair_keys)
    left, fit = _by_label(distance, change, both)
    slope = None
    if len(fit) > 2:
        line = np.polyfit(fit[:, 0], fit[:, 1], 1)
        rest = ((np.polyval(line, fit[:, 0]) - fit[:, 1]) ** 2).sum()
        slope = float(line[0]) if rest <= 1e-3 * ((fit[:, 1] - fit[:, 1].mean()) ** 2).sum() else None
    return "distance_bias", slope, left


def sinks(site: SiteFingerprint) -> np.ndarray:
    """[H]: the logit of each head's sink, by the mass that it takes; -inf where it takes none that can be told."""
    part = {name: site.statistics[name].astype(np.float64) for name in ("kept_mass", "lse_keys")}
    taken = 1 - part["kept_mass"]
    known = (taken > _SEEN_SINK) & (taken < 1) & np.isfinite(part["lse_keys"])
    logits = part["lse_keys"] + np.log(np.where(known, taken / np.where(known, part["kept_mass"], 1.0), 1.0))
    return np.array([np.median(row[mark]) if mark.any() else -np.inf for row, mark in zip(logits, known, strict=True)])


def _sink(pair: SitePair) -> Finding | None:
    one, two = sinks(pair.a), sinks(pair.b)
    both = np.isfinite(one) & np.isfinite(two)
    change = np.where(both, np.where(both, two, 0.0) - np.where(both, one, 0.0), 0.0)
    rounding = 1e-3 + 2 * pair.eps * np.where(both, np.abs(one), 1.0)
    missing = np.isfinite(one) != np.isfinite(two)
    # What a sink takes may be too little to tell in one run alone, if it is little in the other, too.
    much = [(1 - site.statistics["kept_mass"]).max(1) > 100 * _SEEN_SINK for site in (pair.a, pair.b)]
    missing &= much[0] | much[1]
    marked = missing | (np.abs(change) > rounding)
    if not marked.any():
        return None
    heads = pair.heads(marked)
    if missing.any():
        which = "b" if np.isfinite(one[missing]).all() else "a"
        return Finding("sink", "kept mass", 0.0, None, heads, f"{in_words(heads)}run {which} has no sink", own=True)
    value = float(np.median(change[marked]))
    words = f"{in_words(heads)}the sink of run b is {short(value)} above that of run a"
    return Finding("sink", "kept mass", 0.0, value, heads, words, own=True)


CAUSES: tuple[Callable[[SitePair], Finding | None], ...] = (_multiplier, _softcap, _bias, _sink)
