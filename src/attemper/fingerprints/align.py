"""Two fingerprints side by side: sites by order and shape, heads by number, rows by token; refused by what differs
where they are not of the same tokens or the same architecture.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from attemper.errors import InputError
from attemper.fingerprints.pair import SitePair
from attemper.fingerprints.record import Fingerprint
from attemper.fingerprints.site import OF_HEADS, ModelOutput, SiteFingerprint
from attemper.text import clean, clean_name, count

_BY_ROW = ("residual", "input", "attended", "change", "grams")
_SHAPE = {"kind": "its kind", "heads": "its heads", "head_dim": "the size of its heads"}


def align(a: Fingerprint, b: Fingerprint) -> list[SitePair]:
    """The sites of both, in the order in which they ran."""
    means = [_mean_of_calls(one) for one in (a, b)]
    if (means[0] is None) is not (means[1] is None):
        run, name = ("b", means[1]) if means[0] is None else ("a", means[0])
        raise InputError(
            f"explain: {clean_name(name or '')} of {run} is all calls of a module as one site, as earlier versions "
            "kept them, and each call is a site in the other run: take it again with this version."
        )
    if a.lengths != b.lengths:
        raise InputError(
            f"explain: a is of {_sequences(a)} and b of {_sequences(b)}: take fingerprints of the same tokens."
        )
    if a.tokens is not None and b.tokens is not None and a.tokens != b.tokens:
        raise InputError(
            f"explain: the tokens differ (hash {a.tokens[:8]} of a, {b.tokens[:8]} of b): take fingerprints of the "
            "same text, by the same tokenizer."
        )
    if len(a.sites) != len(b.sites):
        raise InputError(
            f"explain: a has {count(len(a.sites), 'site')} of attention and b {len(b.sites)}; {_alone(a, b)} has no "
            f"partner. They must be of one architecture with as many layers{_not_read(a, b)}."
        )
    return [_pair(number, *pair) for number, pair in enumerate(zip(a.sites, b.sites, strict=True))]


def _mean_of_calls(one: Fingerprint) -> str | None:
    """The first site that has the same row of several calls."""
    return next((site.name for site in one.sites if len(set(map(tuple, site.rows.tolist()))) < len(site.rows)), None)


def other_padding(a: Fingerprint, b: Fingerprint) -> str | None:
    """What one of two runs over the same ids hides as padding and the other shows, in words; None for nothing."""
    if a.lengths == b.lengths or len(a.lengths) != len(b.lengths) or not a.about.get("given"):
        return None
    if a.about["given"] != b.about.get("given") or len(a.sites) != len(b.sites):
        return None
    run, hides, shows = ("a", a, b) if sum(a.lengths) < sum(b.lengths) else ("b", b, a)
    least = np.minimum(a.lengths, b.lengths)
    # Unless a mask of another form hides it: then no row sees more keys than there are tokens.
    seen = [(site.counts["visible_keys"].max(0), least[site.rows[:, 0]]) for site in shows.sites if site.kind == "self"]
    if not any((most > tokens).any() for most, tokens in seen) and any(most.max() > least.min() for most, _ in seen):
        return None
    count = sum(shows.lengths) - sum(hides.lengths)
    which = ", ".join(map(str, np.flatnonzero(np.not_equal(a.lengths, b.lengths))[:8]))
    return f"run {run} hides {count} places of padding, in sequences {which}, and the other run shows them"


def _sequences(one: Fingerprint) -> str:
    lengths = ", ".join(map(str, one.lengths[:8])) + (", ..." if len(one.lengths) > 8 else "")
    return f"{count(len(one.lengths), 'sequence')} (tokens: {lengths})"


def _alone(a: Fingerprint, b: Fingerprint) -> str:
    """The first site that one of both does not have: by name where they share names, else by order."""
    fewer, more = sorted(([site.name for site in one.sites] for one in (a, b)), key=len)
    missing = [name for name in more if name not in fewer]
    by_name = len(missing) == len(more) - len(fewer)
    return clean_name(missing[0] if by_name else more[len(fewer)])


def _not_read(a: Fingerprint, b: Fingerprint) -> str:
    told = [
        f"{clean_name(name)} of {run}: {clean(reason)}"
        for run, one in (("a", a), ("b", b))
        for name, reason in one.skipped.items()
    ]
    return f" (not read: {'; '.join(told[:4])})" if told else ""


def _pair(number: int, a: SiteFingerprint, b: SiteFingerprint) -> SitePair:
    for field, words in _SHAPE.items():
        one, two = getattr(a, field), getattr(b, field)
        scores_only = field == "head_dim" and 1 in (one, two)
        if one != two and not scores_only:
            raise InputError(
                f"explain: site {number} ({clean_name(a.name)}) differs in {words}: {one} in a, {two} in b. They must "
                "be of one architecture."
            )
    if a.query.shape[1] != b.query.shape[1]:
        raise InputError(
            f"explain: site {number} ({clean_name(a.name)}) keeps {count(a.query.shape[1], 'place')} of vectors in a "
            f"and {b.query.shape[1]} in b: take both fingerprints with the same version."
        )
    one, two = _common_rows(a.rows, b.rows)
    if not len(one):
        raise InputError(
            f"explain: site {number} ({clean_name(a.name)}) has no row that both keep: take both with the same rows=."
        )
    heads = [head for head in a.numbers if head in b.numbers]
    if not heads:
        raise InputError(
            f"explain: site {number} ({clean_name(a.name)}) has no head that both keep: {_head_list(a)} in a, "
            f"{_head_list(b)} in b: take both with the same heads=."
        )
    return SitePair(number, _heads(_rows(a, one), heads), _heads(_rows(b, two), heads))


def outputs_of(a: ModelOutput | None, b: ModelOutput | None) -> tuple[np.ndarray, np.ndarray] | None:
    """Sketches of what two models give, in the rows that both keep; None where they cannot be compared."""
    if a is None or b is None or a.width != b.width:
        return None
    one, two = _common_rows(a.rows, b.rows)
    return (a.sketch[one], b.sketch[two]) if len(one) else None


def _common_rows(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where rows that stand in both are in the one, and in the other."""
    places = {row: place for place, row in enumerate(_occurrences(b))}
    both = [(place, places[row]) for place, row in enumerate(_occurrences(a)) if row in places]
    one, two = np.array(both, int).reshape(-1, 2).T
    return one, two


def _occurrences(rows: np.ndarray) -> list[tuple[int, ...]]:
    """Rows as (how often it came before, sequence, place): of several calls, each its own."""
    seen: Counter[tuple[int, ...]] = Counter()
    return [(seen.update([row]) or seen[row], *row) for row in map(tuple, rows.tolist())]


def _head_list(site: SiteFingerprint) -> str:
    return ", ".join(map(str, site.numbers[:8])) + (", ..." if len(site.numbers) > 8 else "")


def _heads(site: SiteFingerprint, heads: list[int]) -> SiteFingerprint:
    """The site with these of its heads, and the keys that they read: each its own, where others read them as well."""
    if len(heads) == len(site.numbers):
        return site
    chosen = [site.numbers.index(head) for head in heads]
    read = [head * site.kv_heads // site.heads for head in heads]
    groups = list(dict.fromkeys(read))
    whole = len(heads) * site.kv_heads == len(groups) * site.heads
    keys = [site.key_numbers.index(group) for group in (groups if whole else read)]
    kv_heads = site.kv_heads if whole else site.heads
    return site.of_heads(chosen, site.key[keys], kv_heads=kv_heads, kept_heads=tuple(heads))


def _rows(site: SiteFingerprint, chosen: np.ndarray) -> SiteFingerprint:
    if len(chosen) == len(site.rows) and (chosen == np.arange(len(chosen))).all():
        return site
    return replace(
        site,
        **{name: getattr(site, name)[chosen] for name in ("rows", "pair_keys", *_BY_ROW)},
        **{name: getattr(site, name)[:, chosen] for name in OF_HEADS},
        counts={name: part[:, chosen] for name, part in site.counts.items()},
        statistics={name: part[:, chosen] for name, part in site.statistics.items()},
    )
