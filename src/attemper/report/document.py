"""What the page's scripts know: a reading in few bytes, its sites gathered into stacks of like layers.

A page must stay small, and most of it is heads: each is an array in the order of ``FIELDS``, numbers are rounded to
what can be seen, and empty bins of a histogram are left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from attemper.readings.labels import labels_of, pattern_of
from attemper.records import BY_NAME, SEVERITIES, Alarm, HeadReading, Reading, SiteReading
from attemper.report.quantities import QUANTITIES, Quantity, of_sample
from attemper.text import cut, rounded, shown

FIELDS = ("head", "rows", "empty_rows", "nonfinite_rows", "values", "histogram", "by_visible_keys")
"""``values`` in the order of the quantities; ``histogram`` is the first filled bin, then counts;
``by_visible_keys`` is first, last, rows, entropy in nats and normalised entropy, again and again."""

LONGEST_MESSAGE = 600


@dataclass(frozen=True)
class Stack:
    """Sites that differ only in the numbers of their names: the layers of one tower, drawn as one map."""

    letter: str
    """``A``, ``B``, ...: what tells its layers from another stack's; empty if there is only one."""
    pattern: str
    kind: str
    mode: str
    heads: int
    sites: tuple[int, ...]
    labels: tuple[str, ...]
    """What tells its sites from each other, in their order: layers, or a dash."""
    queries: int
    keys: int

    @property
    def what(self) -> str:
        layers = f"{len(self.sites)} layer{'s' if len(self.sites) > 1 else ''}"
        heads = f"{self.heads} head{'s' if self.heads != 1 else ''}"
        return f"{self.kind} attention, {self.mode} mode, {layers} × {heads}"

    @property
    def size(self) -> str:
        return f"up to {self.queries:,} queries × {self.keys:,} keys"


def stacks(sites: tuple[SiteReading, ...]) -> tuple[Stack, ...]:
    """Sites gathered by pattern, kind, mode and number of heads, in the order in which each is first met.

    Unlike neighbours are gathered, too: a decoder's self and cross attention alternate.
    """
    gathered: dict[tuple[str, str, str, int], list[int]] = {}
    for place, site in enumerate(sites):
        gathered.setdefault((pattern_of(site.name), site.kind, site.mode, len(site.heads)), []).append(place)
    several = len(gathered) > 1
    return tuple(
        Stack(
            letter=_letter(place) if several else "",
            pattern=shown(pattern),
            kind=shown(kind),
            mode=shown(mode),
            heads=heads,
            sites=tuple(places),
            labels=tuple(cut(label, 24) for label in labels_of(sites[at] for at in places)),
            queries=max(sites[at].queries for at in places),
            keys=max(sites[at].keys for at in places),
        )
        for place, ((pattern, kind, mode, heads), places) in enumerate(gathered.items())
    )


def _letter(place: int) -> str:
    """A to Z, then AA, AB, ..."""
    letters = ""
    place += 1
    while place:
        place, rest = divmod(place - 1, 26)
        letters = chr(ord("A") + rest) + letters
    return letters


def quantities(reading: Reading) -> tuple[Quantity, ...]:
    """Those that the reading has: what is measured only if asked for, only if some head has it."""
    kinds = QUANTITIES if reading.sampled_rows is None else map(of_sample, QUANTITIES)
    return tuple(
        kind for kind in kinds
        if kind.key not in BY_NAME or any(getattr(head, kind.key) is not None for head in reading.heads)
    )  # fmt: skip


def document(reading: Reading, towers: tuple[Stack, ...], *, details: bool = True) -> dict[str, Any]:
    """Everything the scripts draw; without ``details`` no histograms and no curves."""
    kinds, named = quantities(reading), by_name(reading.sites)
    labels = {at: label for tower in towers for at, label in zip(tower.sites, tower.labels, strict=True)}
    return {
        "details": details,
        "quantities": [quantity.to_dict() for quantity in kinds],
        "stacks": [_stack(stack) for stack in towers],
        "sites": [_site(site, labels[at], kinds, details) for at, site in enumerate(reading.sites)],
        "alarms": [_alarm(alarm, site_of(alarm, named)) for alarm in reading.alarms],
    }


def _stack(stack: Stack) -> dict[str, Any]:
    return {"letter": stack.letter, "pattern": stack.pattern, "heads": stack.heads, "sites": list(stack.sites)}


def _site(site: SiteReading, label: str, kinds: tuple[Quantity, ...], details: bool) -> dict[str, Any]:
    return {
        "name": shown(site.name),
        "label": label,
        "layer": site.layer,
        "kind": shown(site.kind),
        "mode": shown(site.mode),
        "heads": [_head(head, kinds, details) for head in site.heads],
    }


def _head(head: HeadReading, kinds: tuple[Quantity, ...], details: bool) -> list[Any]:
    values = [rounded(getattr(head, quantity.key)) for quantity in kinds]
    counts = [head.head, head.rows, head.empty_rows, head.nonfinite_rows]
    return [*counts, values, _histogram(head), _curve(head)] if details else [*counts, values]


def _histogram(head: HeadReading) -> list[int]:
    """The first filled bin, then the counts up to the last filled one; empty if no bin is filled."""
    filled = [place for place, rows in enumerate(head.normalized_entropy_histogram) if rows]
    return [filled[0], *head.normalized_entropy_histogram[filled[0] : filled[-1] + 1]] if filled else []


def _curve(head: HeadReading) -> list[Any]:
    return [
        value
        for bucket in head.by_visible_keys
        for value in (
            bucket.first, bucket.last, bucket.rows,
            rounded(bucket.entropy_nats, 4), rounded(bucket.normalized_entropy, 4),
        )
    ]  # fmt: skip


def _alarm(alarm: Alarm, place: int | None) -> dict[str, Any]:
    return {
        "site": place,
        "head": alarm.head,
        "severity": shown(alarm.severity),
        "level": level_of(alarm.severity),
        "text": said(alarm),
    }


def spoken_labels(towers: tuple[Stack, ...]) -> dict[int, str]:
    """Place of a site -> the letter of its stack and its label, ``A3``; sites without a label are left out."""
    return {
        at: f"{tower.letter}{label}"
        for tower in towers
        for at, label in zip(tower.sites, tower.labels, strict=True)
        if label != "–"
    }


def by_name(sites: tuple[SiteReading, ...]) -> dict[str, list[tuple[int, SiteReading]]]:
    """Sites of each name with their places: a model seen in training and in evaluation has two of a name."""
    named: dict[str, list[tuple[int, SiteReading]]] = {}
    for place, site in enumerate(sites):
        named.setdefault(site.name, []).append((place, site))
    return named


def level_of(severity: str) -> str:
    """The severity, or warning for one that this version does not know: better looked at than missed."""
    return severity if severity in SEVERITIES else "warning"


_CAUSE = {
    "collapsed": "normalized_entropy",
    "diffuse": "normalized_entropy",
    "fallen": "normalized_entropy",
    "first_token": "first_token_mass",
    "logits": "max_logit",
    "nonfinite": "nonfinite_rows",
}


def site_of(alarm: Alarm, named: dict[str, list[tuple[int, SiteReading]]]) -> int | None:
    """The place of the site an alarm is of, None if there is none. Of several with its name, the one whose head comes
    nearest to the alarm's value: an alarm says where, but not in which mode.
    """

    def distance(candidate: tuple[int, SiteReading]) -> float:
        values = [getattr(head, _CAUSE[alarm.kind], None) for head in candidate[1].heads if head.head == alarm.head]
        if not values or values[0] is None or alarm.value is None:
            return math.inf
        return abs(values[0] - alarm.value)

    candidates = named.get(alarm.site, [])
    if len(candidates) < 2 or alarm.kind not in _CAUSE:
        return candidates[0][0] if candidates else None
    return min(candidates, key=distance)[0]


def said(alarm: Alarm) -> str:
    """An alarm's message without the place, which is shown beside it."""
    head = "" if alarm.head is None else f" head {alarm.head}"
    return cut(shown(alarm.message.removeprefix(f"{alarm.site}{head}: ")), LONGEST_MESSAGE)
