"""Causes between the raw dot product and the weights: each run's own final score as a function of its own q.k.

``final = cap tanh(m q.k / cap) + bias`` holds in each run exactly, so that what rounding did to q and k cancels.
Compared are m by row (scale, log n), cap, what is added by key or by distance, and the sink, from the kept mass.
"""

from __future__ import annotations

import numpy as np

from attemper.fingerprints.finding import ACCEPTED, Finding, in_words, short
from attemper.fingerprints.pair import SitePair
from attemper.fingerprints.site import SiteFingerprint, scaled_products

STAGE = "final score"
EXACT = 2e-5
"""Relative error of a number that a run's own scores give: they are kept in float32."""
_SEEN_SINK = 1e-4
"""Mass that a sink must take before its size can be told."""


def find(pair: SitePair) -> list[Finding]:
    """Scale, log n, softcap, biases, sink."""
    return [found for cause in (_multiplier, _softcap, _bias, _sink) if (found := cause(pair)) is not None]


def _multiplier(pair: SitePair) -> Finding | None:
    """One factor is a scale, one that grows with the place log n."""
    one, two = (site.statistics["multiplier"].astype(np.float64) for site in (pair.a, pair.b))
    if np.isnan(one).any() or np.isnan(two).any() or not (one != 0).all():
        return None
    ratio = two / one
    changed = np.asarray((np.abs(ratio - 1) > EXACT).any(1))
    if not changed.any():
        return None
    heads, rows = pair.heads(changed), ratio[changed]
    value, length = float(np.median(rows)), log_length(rows, pair.places)
    if _is_made(rows, value, 2 * EXACT):
        words = f"{in_words(heads)}scores of run b are {short(value)} times those of run a"
        return Finding("scale", STAGE, 0.0, value, heads, words, own=True)
    if length is not None and _is_made(rows, length[1], 2 * max(EXACT, pair.eps)):
        words = f"scores of one run grow with log n, from n = {short(length[0])} on, beside the other's"
        return Finding("logn", STAGE, 0.0, length[0], heads, in_words(heads) + words, own=True)
    each = np.median(rows, 1)
    if _is_made(rows, each[:, None], 2 * EXACT):
        words = f"scores of run b are {', '.join(map(short, each[:8]))} times those of run a, head by head"
        return Finding("scale", STAGE, 0.0, None, heads, in_words(heads) + words, own=True)
    words = f"{in_words(heads)}factors of scores differ by row, by no rule that is known"
    return Finding("scores", STAGE, 1.0, None, heads, words, own=True)


def _is_made(rows: np.ndarray, of: float | np.ndarray, within: float) -> bool:
    return bool((np.abs(rows / np.where(of == 0, np.nan, of) - 1) <= within).all())


def log_length(rows: np.ndarray, places: np.ndarray) -> tuple[float, np.ndarray] | None:
    """L for which a factor [H, R], or its inverse, is log(n) / log(L), at least 1 or as it is; and that factor [R]."""
    logs = np.log(places + 1.0)
    found: list[tuple[float, float, np.ndarray]] = []
    for power in (1, -1):
        values = rows**power
        off = (np.abs(values - 1) > 0.01) & (logs > 0)
        if off.sum() < 2:
            continue
        base = np.median((np.broadcast_to(logs, rows.shape) / values)[off])
        if not np.isfinite(base) or base <= 0:
            continue
        for form in (np.maximum(logs / base, 1.0), logs / base):
            made = np.maximum(form, 1e-100) ** power
            found.append((float(((rows - made) ** 2).sum()), float(np.exp(base)), made))
    if not found:
        return None
    _, length, made = min(found, key=lambda one: one[0])
    return length, made


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
    # A table of numbers may be rounded with the weights: beside the error of their mean stands that of the largest.
    rounding = 2 * (pair.eps + pair.weights) * max(np.abs(one).max() for one in own)
    # A number that all keys of a row share moves no weight.
    count = np.maximum(both.sum(-1, keepdims=True), 1)
    centred = np.where(both, change - change.sum(-1, keepdims=True) / count, 0.0)
    limit = EXACT * max(size, 1.0) + rounding
    chosen = (np.abs(centred) > limit).any((1, 2))
    if not chosen.any():
        return None
    heads = pair.heads(chosen)
    named = [one(pair, change[chosen], both[chosen], limit) for one in (_by_key, _by_distance)]
    kind, value, left, words = min(named, key=lambda one: one[2])
    if left > ACCEPTED:
        return Finding("scores", STAGE, left, None, heads, "numbers are added to scores by no rule known", own=True)
    return Finding(kind, STAGE, left, value, heads, in_words(heads) + words, own=True)


_Added = tuple[str, float | None, float, str]
"""Kind, value, residual, words."""


def _by_label(
    labels: np.ndarray, change: np.ndarray, both: np.ndarray, limit: float
) -> tuple[float, bool, list[np.ndarray]]:
    """What is left of ``change`` [H, R, PAIRS] if it is one number for each head and label, and a row's own number;
    whether that is within ``limit``; and the labels and numbers of each head.
    """
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
    return (left / total if total else 1.0), bool(left <= both.sum() * limit**2), kept


def _by_key(pair: SitePair, change: np.ndarray, both: np.ndarray, limit: float) -> _Added:
    left, exact, fits = _by_label(pair.a.pair_keys, change, both, limit)
    shifts = np.concatenate([fit[:, 1] - np.median(fit[:, 1]) for fit in fits])
    value = _common(shifts[np.abs(shifts) > limit], limit) if exact else None
    words = "run b adds numbers to the scores of keys, for every row"
    words = words if value is None else f"run b adds {short(value)} to the scores of some keys, for every row"
    return "key_shift", value, left, words


def _by_distance(pair: SitePair, change: np.ndarray, both: np.ndarray, limit: float) -> _Added:
    left, exact, fits = _by_label(np.abs(pair.places[:, None] - pair.a.pair_keys), change, both, limit)
    lines = [np.polyfit(fit[:, 0], fit[:, 1], 1) for fit in fits if len(fit) > 2]
    rest = [np.abs(np.polyval(line, fit[:, 0]) - fit[:, 1]).max() for line, fit in zip(lines, fits, strict=False)]
    straight = exact and len(lines) == len(fits) and max(rest) <= 2 * limit
    slopes = np.array([line[0] for line in lines])
    value = _common(slopes, 2 * limit / max(fits[0][-1, 0], 1.0)) if straight else None
    words = f"run b adds {short(value)} to a score for every token of distance" if value is not None else ""
    if straight and not words:
        words = f"run b adds {', '.join(map(short, slopes[:8]))} to a score for every token of distance, head by head"
    return "distance_bias", value, left, words or "numbers are added to scores by distance"


def _common(numbers: np.ndarray, within: float) -> float | None:
    """The number that all are; None where they are several."""
    middle = float(np.median(numbers)) if len(numbers) else np.nan
    return middle if np.abs(numbers - middle).max(initial=0.0) <= within and len(numbers) else None


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
    value = _common(change[marked], float(2 * rounding.max()))
    said = ", ".join(map(short, change[marked][:8])) if value is None else short(value)
    words = f"{in_words(heads)}the sink of run b is {said} above that of run a"
    words += "" if value is not None else ", head by head"
    return Finding("sink", "kept mass", 0.0, value, heads, words, own=True)
