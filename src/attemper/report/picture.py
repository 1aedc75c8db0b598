"""Attention pictures: the exact weights of some heads on the first tokens of a text, as the page draws them."""

from __future__ import annotations

import base64
import zlib
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from attemper.readings.reading import Reading
from attemper.text import cut, token_text

MOST_TOKENS = 128
"""On each side."""
MOST_PICTURES = 12
MOST_PAIRS = 6
"""Heads whose pictures a comparison shows, before and after."""
STEPS = 65535
"""A weight is a whole number of these: 1.5e-5."""


_EXTREMES = (("normalized_entropy", 1), ("normalized_entropy", -1), ("max_logit", -1), ("first_token_mass", -1))
"""Of these the least (1) or the largest (-1) numbers are interesting."""


class Weights(Protocol):
    """What :func:`attemper.pattern` gives."""

    @property
    def weights(self) -> Any:
        """[Q, K], with ``tolist``."""

    @property
    def tokens(self) -> Sequence[str]: ...
    @property
    def key_tokens(self) -> Sequence[str]: ...
    @property
    def site(self) -> str: ...
    @property
    def head(self) -> int: ...


def pictures(reading: Reading, patterns: Iterable[Weights]) -> list[dict[str, Any]]:
    """The pictures of a page's data: of at most ``MOST_PICTURES`` heads, of the first tokens each."""
    places = {site.name: place for place, site in reversed(list(enumerate(reading.sites)))}
    found = [one for one in patterns if one.site in places][:MOST_PICTURES]
    return [{"site": places[one.site], "head": one.head, **_picture(one)} for one in found]


def pairs(before: Iterable[Weights], after: Iterable[Weights]) -> list[tuple[Weights, Weights]]:
    """The heads that both sides of a comparison have a picture of, as the first has them, at most ``MOST_PAIRS``."""
    others = {(one.site, one.head): one for one in after}
    found = [(one, others[one.site, one.head]) for one in before if (one.site, one.head) in others]
    return found[:MOST_PAIRS]


def paired_pictures(both: Sequence[tuple[Weights, Weights]]) -> list[list[dict[str, Any]]]:
    """The pictures of a comparison's data: before and after of each head."""
    return [[_picture(one) for one in pair] for pair in both]


def _picture(one: Weights) -> dict[str, Any]:
    rows = [row[:MOST_TOKENS] for row in one.weights.tolist()[:MOST_TOKENS]]
    steps = array("H", (round(min(max(weight, 0.0), 1.0) * STEPS) for row in rows for weight in row))
    packed = base64.b64encode(zlib.compress(steps.tobytes(), 9)).decode("ascii")
    return {**tokens_of(one, MOST_TOKENS), "packed": packed}


def tokens_of(one: Weights, most: int) -> dict[str, Any]:
    """The first tokens as a page draws them; ``keys`` are None where they are those of the queries."""
    own, keys = ([cut(token_text(token), 24) for token in names[:most]] for names in (one.tokens, one.key_tokens))
    return {"tokens": own, "keys": None if keys == own else keys}


def interesting_heads(reading: Reading) -> list[tuple[str, int]]:
    """The heads whose picture tells most: those of alarms, the sharpest, the most diffuse, the largest logit, the
    first token's; then one of each layer.
    """
    found = [(alarm.site, alarm.head) for alarm in reading.alarms if alarm.head is not None][: MOST_PICTURES // 2]
    placed = [(site.name, head) for site, head in reading.placed_heads]
    for name, sign in _EXTREMES:
        values = [(getattr(head, name), site, head.head) for site, head in placed]
        known = sorted((sign * value, site, number) for value, site, number in values if value is not None)
        found += [(site, number) for _, site, number in known[:2]]
    found += [(site.name, site.heads[0].head) for site in reading.sites if site.heads]
    return list(dict.fromkeys(found))[:MOST_PICTURES]
