"""The page of all heads on one text: a small map of each with its role, and each of them large with its tokens."""

from __future__ import annotations

import base64
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attemper.readings.labels import by_reason, label_of, pattern_of
from attemper.readings.reading import Skipped
from attemper.readings.roles import ROLE_OF, ROLES
from attemper.report import texts
from attemper.report.page import LARGEST_BYTES, page_of
from attemper.report.picture import short_token
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


@dataclass(frozen=True)
class SiteMaps:
    """The heads of a site on a text."""

    name: str
    kind: str
    layer: int | None
    tokens: tuple[str, ...]
    key_tokens: tuple[str, ...]
    padding: tuple[int, int]
    heads: tuple[tuple[int, str | None], ...]
    """Number and role of each."""
    levels: Any
    """[H, Q, K] uint8: the root of a weight in ``FINEST`` steps, or ``NO_NUMBER``."""


def patterns_page(name: str, sites: Sequence[SiteMaps], skipped: Iterable[Skipped] = ()) -> str:
    """The page of the heads of these sites. The same heads give the same page, to the byte."""
    whole = ""
    for tokens, steps in _SIZES:
        whole = _render(name, sites, skipped, tokens, steps)
        if len(whole.encode("utf-8")) <= LARGEST_BYTES:
            break
    return whole


def _render(name: str, sites: Sequence[SiteMaps], skipped: Iterable[Skipped], tokens: int, steps: int) -> str:
    roles = Counter(role for site in sites for _, role in site.heads)
    queries, keys = (max((site.levels.shape[axis] for site in sites), default=0) for axis in (1, 2))
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


def _stacks(sites: Sequence[SiteMaps], tokens: int, steps: int) -> list[dict[str, Any]]:
    """Sites whose names differ in numbers alone, together."""
    found: dict[tuple[str, str], list[SiteMaps]] = {}
    for site in sites:
        found.setdefault((pattern_of(site.name), site.kind), []).append(site)
    return [
        {"name": clean(name), "kind": kind, "sites": [_site(site, tokens, steps) for site in own]}
        for (name, kind), own in found.items()
    ]


def _site(site: SiteMaps, tokens: int, steps: int) -> dict[str, Any]:
    own, keys = ([short_token(token) for token in names[:tokens]] for names in (site.tokens, site.key_tokens))
    levels = site.levels[:, :tokens, :tokens]
    if steps != FINEST:
        levels = np.where(levels == NO_NUMBER, NO_NUMBER, np.rint(levels * (steps / FINEST))).astype(np.uint8)
    return {
        "name": clean(site.name),
        "label": label_of(site.name) if site.layer is None else str(site.layer),
        "heads": [[head, ROLE_OF[role].key if role in ROLE_OF else None] for head, role in site.heads],
        "tokens": own,
        "keys": None if keys == own else keys,
        "padding": list(site.padding),
        "packed": base64.b64encode(zlib.compress(levels.tobytes())).decode("ascii"),
    }
