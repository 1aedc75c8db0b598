"""The page of all heads on one text: a small map of each with its role, and each of them large with its tokens."""

from __future__ import annotations

import base64
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from attemper.readings.labels import by_reason, label_of, pattern_of
from attemper.readings.reading import Skipped
from attemper.readings.roles import ROLE_OF, ROLES
from attemper.report import texts
from attemper.report.page import first_that_fits, page_of
from attemper.report.picture import tokens_of
from attemper.report.texts import message, page_texts
from attemper.text import clean

FINEST, NO_NUMBER = 254, 255
"""Steps between a root of 0 and of 1, and the level of a weight that is no number."""
_SIZES = (
    *((tokens, FINEST) for tokens in (128, 96, 64)),
    *((64, steps) for steps in (127, 63, 31, 15)),
    *((tokens, 15) for tokens in (48, 32, 16)),
)
"""Tokens on each side and steps; the first with which a page is small enough is taken."""
_SCRIPTS = ("document", "texts", "colour_scale", "theme", "sheet", "lines", "grid")


Maps = tuple[Sequence[Any], np.ndarray]
"""The heads of a site, as :func:`attemper.pattern` gives them, and their weights [H, Q, K] uint8; see ``_levels``."""


def patterns_page(name: str, heads: Iterable[Sequence[Any]], skipped: Iterable[Skipped] = ()) -> str:
    """The page of the heads of each site. The same heads give the same page, to the byte."""
    sites = [(own, _levels(own)) for own in heads]
    return first_that_fits(_render(name, sites, skipped, *size) for size in _SIZES)


def _levels(own: Sequence[Any]) -> np.ndarray:
    """The root of each weight in ``FINEST`` steps, so that small ones keep their digits, or ``NO_NUMBER``."""
    found = (one.weights.detach() for one in own)
    # NumPy has no bfloat16.
    weights = np.stack([(each if each.element_size() > 2 else each.float()).numpy() for each in found])
    return np.where(np.isfinite(weights), np.rint(np.sqrt(weights.clip(0, 1)) * FINEST), NO_NUMBER).astype(np.uint8)


def _render(name: str, sites: Sequence[Maps], skipped: Iterable[Skipped], tokens: int, steps: int) -> str:
    roles = Counter(one.role for own, _ in sites for one in own)
    queries, keys = (max((levels.shape[axis] for _, levels in sites), default=0) for axis in (1, 2))
    heads, shown = roles.total(), [min(size, tokens) for size in (queries, keys)]
    cropped = message("grid.cropped", queries=queries, keys=keys, shown=tokens) if max(queries, keys) > tokens else None
    return page_of(
        "patterns",
        ("page", "patterns"),
        _SCRIPTS,
        {"texts": page_texts(of="grid"), "steps": steps, "stacks": _stacks(sites, tokens, steps)},
        title=texts.own_name(clean(name)),
        heads=heads,
        sites=len(sites),
        size=message("grid.size", queries=shown[0], keys=shown[1]),
        cropped=cropped,
        rounded=message("grid.rounded", value=_error(steps)),
        roles=[(role, roles[role.name]) for role in ROLES if roles[role.name]],
        without=roles[None],
        skipped=[(clean(one), texts.reason(why)) for one, why in by_reason((s.name, s.reason) for s in skipped)],
    )


def _error(steps: int) -> float:
    """How far a weight may be off, at most: near 1, where the root of it is rounded to half a step."""
    return round(1 - (1 - 0.5 / steps) ** 2, 3)


def _stacks(sites: Sequence[Maps], tokens: int, steps: int) -> list[dict[str, Any]]:
    """Sites whose names differ in numbers alone, together."""
    found: dict[tuple[str, str], list[Maps]] = {}
    for own, levels in sites:
        found.setdefault((pattern_of(own[0].site), own[0].kind), []).append((own, levels))
    return [
        {"name": clean(name), "kind": kind, "sites": [_site(*one, tokens, steps) for one in alike]}
        for (name, kind), alike in found.items()
    ]


def _site(heads: Sequence[Any], levels: np.ndarray, tokens: int, steps: int) -> dict[str, Any]:
    site = heads[0]
    levels = levels[:, :tokens, :tokens]
    if steps != FINEST:
        levels = np.where(levels == NO_NUMBER, NO_NUMBER, np.rint(levels * (steps / FINEST))).astype(np.uint8)
    return {
        "name": clean(site.site),
        "label": label_of(site.site) if site.layer is None else str(site.layer),
        "heads": [[one.head, ROLE_OF[one.role].key if one.role in ROLE_OF else None] for one in heads],
        **tokens_of(site, tokens),
        "padding": list(site.padding),
        "packed": base64.b64encode(zlib.compress(levels.tobytes())).decode("ascii"),
    }
