"""Numbers of two runs that are not finite: every comparison with NaN is false, so that no level shows them."""

from __future__ import annotations

import numpy as np

from attemper.fingerprints.advice import ADVICE
from attemper.fingerprints.finding import Finding
from attemper.fingerprints.pair import SitePair
from attemper.fingerprints.site import SiteFingerprint

_CERTAIN = ("query", "key", "final")
_STAGES = {"residual": ("input", "residual"), "input": ("input", "input")}
_STAGES |= dict.fromkeys(("query", "key", "raw"), ("weights", "q and k"))
_STAGES |= {"final": ("scores", "final score"), "output": ("values", "head output")}
_STAGES |= dict.fromkeys(("attended", "change"), ("weights", "attention output"))
"""What is kept, in the order in which it is made -> kind and stage."""


def find(pair: SitePair, pairs: list[SitePair]) -> Finding | None:
    """Of the first stage where run b has others; "too_small" where all are the same ones in both runs."""
    return min(every(pair, pairs), key=lambda one: one.kind == "too_small", default=None)


def every(pair: SitePair, pairs: list[SitePair]) -> list[Finding]:
    """Of all that is kept of a site."""
    found = []
    for name, (kind, stage) in _STAGES.items():
        a, b = _marks(pair.a, name, [one.a for one in pairs]), _marks(pair.b, name, [one.b for one in pairs])
        if a.any() or b.any():
            if len(a) != len(b):  # heads of keys, once for each head that reads them
                a, b = (np.repeat(part, len(pair.a.query) // len(part), 0) for part in (a, b))
            bad = np.any(a | b, axis=tuple(range(1, a.ndim)))
            heads = pair.heads(np.repeat(bad, len(pair.a.query) // len(bad))) if a.ndim == 3 else None
            found.append(_finding(kind, stage, name, a, b, heads))
    return found


def of_output(sketches: tuple[np.ndarray, np.ndarray]) -> Finding | None:
    """The same of what the models give, in rows that both keep."""
    one, two = (~np.isfinite(part) for part in sketches)
    return _finding("output", "model output", "output", one, two, None) if one.any() or two.any() else None


def _finding(kind: str, stage: str, name: str, a: np.ndarray, b: np.ndarray, heads: tuple[int, ...] | None) -> Finding:
    words = f"of the numbers kept ({name}), {a.sum()} of {a.size} of run a and {b.sum()} of {b.size} of run b are not "
    words += "finite (NaN or infinite)"
    both = np.array_equal(a, b)
    if both:
        kind, words = "too_small", words + ", at the same places: from here on, differences cannot be seen"
    return Finding(kind, stage, 1.0, None, heads, words, advice=ADVICE[f"not finite{' in both' if both else ''}"])


def _marks(site: SiteFingerprint, name: str, sites: list[SiteFingerprint]) -> np.ndarray:
    """All NaN is also what was not seen: it counts where weights of the site are not finite, or other sites of that run
    have the stage, and queries, keys or scores that are not.
    """
    bad = ~np.isfinite(getattr(site, name))
    if name in ("raw", "final"):  # NaN where there is no key
        bad &= site.pair_keys >= 0
    if name == "final":  # -inf where the key is hidden
        bad &= ~np.isneginf(site.final)
    if name in _CERTAIN or not np.isnan(getattr(site, name)).all():
        return bad
    seen = any(not np.isnan(getattr(one, name)).all() for one in sites)
    seen &= any(_marks(one, certain, []).any() for one in sites for certain in _CERTAIN)
    return bad & (seen or not all(np.isfinite(part).all() for part in site.weights.values()))
