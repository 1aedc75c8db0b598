"""Causes in the whole numbers of rows: which keys a row sees. They are exact, whatever the precision."""

from __future__ import annotations

import numpy as np

from attemper.fingerprints.finding import ACCEPTED, Finding, in_words
from attemper.fingerprints.pair import SitePair
from attemper.fingerprints.site import SiteFingerprint
from attemper.text import count

STAGE = "visible keys"
_NAMES = ("visible_keys", "first_visible", "last_visible")


def find(pair: SitePair) -> list[Finding]:
    """Windows, causality, padding."""
    counts = [np.stack([site.counts[name] for name in _NAMES]) for site in (pair.a, pair.b)]
    differs = (counts[0] != counts[1]).any(0)
    if not differs.any():
        return []
    heads = pair.heads(differs.any(1))
    found = [cause(pair, differs) for cause in (_padding, _causality, _window, _documents, _lost_tokens)]
    named = sorted((one for one in found if one is not None and one[0] <= ACCEPTED), key=lambda one: one[0])
    if not named:
        return [Finding("scores", STAGE, 1.0, None, heads, "rows see other keys, by no rule that is known", own=True)]
    residual, kind, value, before, words = named[0]
    value, before = (None, None) if residual else (value, before)  # a number stands only where it predicts
    return [Finding(kind, STAGE, residual, value, heads, in_words(heads) + words, before, own=True)]


_Named = tuple[float, str, float | None, float | None, str]
"""Residual, kind, value, value of run a, words."""


def _sees_padding(site: SiteFingerprint, lengths: np.ndarray) -> np.ndarray:
    seen = site.counts["visible_keys"] > 0
    return seen & ((site.counts["first_visible"] < 0) | (site.counts["last_visible"] >= lengths))


def _lengths(pair: SitePair) -> np.ndarray:
    """[R]: tokens of each row's sequence, by the last of the fixed keys."""
    return pair.a.pair_keys[:, -1] + 1


def _padding(pair: SitePair, differs: np.ndarray) -> _Named | None:
    """One run sees keys outside of the sequence."""
    outside = [_sees_padding(site, _lengths(pair)) for site in (pair.a, pair.b)]
    if not (outside[0] ^ outside[1]).any():
        return None
    which = "b" if outside[1].any() else "a"
    left = float((differs & ~(outside[0] | outside[1])).sum() / differs.sum())
    return left, "padding", None, None, f"run {which} gives weight to padding, the other hides it"


def _causality(pair: SitePair, differs: np.ndarray) -> _Named | None:
    """One run ends at a row's own place, and the other elsewhere."""
    if pair.a.kind != "self":
        return None
    lengths, places = _lengths(pair), pair.places
    ahead = [np.broadcast_to(site.counts["last_visible"] - places, differs.shape) for site in (pair.a, pair.b)]
    moved = (ahead[0] != ahead[1]) & differs
    if not moved.any():
        return None
    inner = moved & (places < lengths - 1) & (places > 0)
    if not inner.any():
        return None
    own = [ahead[n][inner] for n in (0, 1)]
    if not any((one == 0).all() for one in own):
        return None
    first = [site.counts["first_visible"] for site in (pair.a, pair.b)]
    left = float((differs & ~moved & (first[0] != first[1])).sum() / differs.sum())
    steps, before = (float(np.median(one)) if len(set(one.tolist())) == 1 else None for one in (own[1], own[0]))
    ends = [_end(one, (lengths - 1 - places)[None].repeat(len(differs), 0)[inner]) for one in own]
    return left, "causality", steps, before, f"a row ends {ends[0]} in run a and {ends[1]} in run b"


def _end(ahead: np.ndarray, most: np.ndarray) -> str:
    if (ahead == 0).all():
        return "at its own place"
    if (ahead == most).all():
        return "at the last token"
    if len(set(ahead.tolist())) == 1:
        return f"{count(abs(int(ahead[0])), 'key')} {'ahead of' if ahead[0] > 0 else 'before'} its own place"
    return "elsewhere"


def _window(pair: SitePair, differs: np.ndarray) -> _Named | None:
    """The first key follows the row at a fixed distance, in one run at least; the last one may, too."""
    first = [site.counts["first_visible"] for site in (pair.a, pair.b)]
    moved = (first[0] != first[1]) & differs
    if not moved.any():
        return _kept_first(pair, differs)
    sizes = [_size(one, pair.places, moved) for one in first]
    if sizes[0] is None and sizes[1] is None:
        return None
    left, sided, said = 0.0, [], []
    for site, size in zip((pair.a, pair.b), sizes, strict=True):
        starts = np.zeros_like(pair.places) if size is None else np.maximum(pair.places - size + 1, 0)
        left = max(left, float((moved & (site.counts["first_visible"] != starts)).sum() / moved.sum()))
        ends = np.minimum(pair.places + (size or 0) - 1, _lengths(pair) - 1)
        sided.append(size is not None and (site.counts["last_visible"] == ends).all())
        window = f"a window of {count(size or 0, 'key')}{' to each side' if sided[-1] else ''}"
        said.append("no window" if size is None else window)
    left = left if any(sided) else max(left, float((differs & ~moved).sum() / differs.sum()))
    value, before = (None if size is None or any(sided) else float(size) for size in (sizes[1], sizes[0]))
    words = "rows begin at other keys" if left else f"{said[0]} in run a, {said[1]} in run b"
    return left, "window", value, before, words


def _kept_first(pair: SitePair, differs: np.ndarray) -> _Named | None:
    """Rows of one run see so many keys and no more, the first and their own among them."""
    seen = [site.counts["visible_keys"] for site in (pair.a, pair.b)]
    ends = [pair.a.counts[name] == pair.b.counts[name] for name in ("first_visible", "last_visible")]
    for run, few, all_keys in (("b", seen[1], seen[0]), ("a", seen[0], seen[1])):
        most = few[differs][0]
        if (few == np.minimum(all_keys, most)).all() and np.all(ends) and pair.a.kind == "self":
            words = f"run {run} sees {count(int(most), 'key')} of a row at most, the first among them: a window"
            return 0.0, "window", None, None, words
    return None


def _size(first: np.ndarray, places: np.ndarray, moved: np.ndarray) -> int | None:
    """Keys of a window by where rows begin; None where all begin at the first key."""
    begun = moved & (first > 0)
    if not begun.any():
        return None
    sizes = (np.broadcast_to(places, first.shape) - first + 1)[begun]
    return int(np.median(sizes))


def _documents(pair: SitePair, differs: np.ndarray) -> _Named | None:
    """Rows of one run see less: keys of a stretch of their sequence alone; or of other stretches than the other's."""
    which, mark = pair.a.rows[:, 0], np.asarray(differs.any(0))
    if pair.a.kind != "self":
        return None
    for run, site, other in (("b", pair.b, pair.a), ("a", pair.a, pair.b)):
        first, last = site.counts["first_visible"], site.counts["last_visible"]
        less = (first >= other.counts["first_visible"]) & (last <= other.counts["last_visible"])
        # Rows before the first stretch tell it from padding.
        starts = {number: first[:, mark & (which == number)].min() for number in set(which[mark].tolist())}
        earlier = any(place < starts.get(number, 0) for number, place in pair.a.rows[~mark].tolist())
        several = _stretches(pair, site, mark)
        if several is not None and less.all() and (several or earlier):
            begun = np.unique(first[first > 0])
            size = int(np.gcd.reduce(begun))
            words = f"run {run} hides other documents of a sequence, the other shows them"
            # Chunked attention, and documents of one length, which look the same.
            if len(begun) > 1 and size > 1 and begun.max() == size * len(begun):
                words = f"run {run} attends in stretches of {count(size, 'key')}, the other beyond"
            return 0.0, "documents", None, None, words
    if all(_stretches(pair, site, np.ones_like(mark)) for site in (pair.a, pair.b)):
        return 0.0, "documents", None, None, "documents of a sequence begin at other places in run b"
    return None


def _stretches(pair: SitePair, site: SiteFingerprint, rows: np.ndarray) -> bool | None:
    """Whether rows see several stretches of a sequence, each of which holds their own place; None where these are not
    unbroken, or overlap.
    """
    first, last, which = site.counts["first_visible"], site.counts["last_visible"], pair.a.rows[:, 0]
    whole = (site.counts["visible_keys"] == last - first + 1) & (first <= pair.places) & (pair.places <= last)
    begins = (first[:, rows][:, 1:] != first[:, rows][:, :-1]) & (which[rows][1:] == which[rows][:-1])
    apart = (first[:, rows][:, 1:] > last[:, rows][:, :-1])[begins].all()
    return bool(begins.any()) if whole.all() and apart else None


def _lost_tokens(pair: SitePair, differs: np.ndarray) -> _Named | None:
    """The same keys of a sequence are hidden from all rows of one run, as by a mask of padding."""
    fewer = [pair.b.counts["visible_keys"] < pair.a.counts["visible_keys"]]
    fewer.append(pair.b.counts["visible_keys"] > pair.a.counts["visible_keys"])
    which = 0 if fewer[0].sum() >= fewer[1].sum() else 1
    lost = np.abs(pair.b.counts["visible_keys"] - pair.a.counts["visible_keys"])
    left = float((differs & ~fewer[which]).sum() / differs.sum())
    if pair.a.kind == "self" and pair.places.max() > 0:
        # Rows of one sequence lose about as many keys, up to their own.
        spread = [np.ptp(lost[:, pair.a.rows[:, 0] == number]) for number in set(pair.a.rows[:, 0].tolist())]
        full = pair.a.counts["visible_keys"].max()
        left = max(left, float(max(spread) / max(full, 1)) if max(spread) > 1 else 0.0)
    return left, "padding", None, None, f"run {'b' if which == 0 else 'a'} hides tokens that the other sees"
