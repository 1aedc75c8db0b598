"""What the page's scripts know: a reading in few bytes, its sites gathered into stacks of like layers.

A page must stay small, and most of it is heads: each is an array in the order of ``FIELDS``, numbers are rounded to
what can be seen, and empty bins of a histogram are left out.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from attemper.readings.alarms import KINDS, level_of, value_at
from attemper.readings.reading import (
    SCORES,
    Alarm,
    HeadReading,
    Reading,
    SiteReading,
    column_of,
    heads_as_csv,
)
from attemper.readings.roles import ROLE_OF, ROLES, Role
from attemper.readings.sample import MODES, SITE_KINDS
from attemper.readings.stacks import Stack, stacks
from attemper.report.texts import Message, basis, brief, encode, message, page_texts, reason, severity_title
from attemper.statistics import SHOWN, SHOWN_BY_NAME, Display
from attemper.text import clean, cut, number, round_digits

FIELDS = ("head", "rows", "empty_rows", "nonfinite_rows", "values", "histogram", "by_visible_keys")
"""``values`` in the order of the quantities; ``histogram`` is the first filled bin, then counts;
``by_visible_keys`` is first, last, rows, entropy in nats and normalised entropy, again and again."""


@dataclass(frozen=True)
class Tower:
    """A stack as the page draws it: one map, whose layers are told from another's by a letter."""

    letter: str
    """``A``, ``B``, ...; empty if there is only one."""
    stack: Stack

    @property
    def pattern(self) -> str:
        return clean(self.stack.pattern)

    @property
    def labels(self) -> dict[int, str]:
        """Place of a site -> what tells it from the others of its stack; a dash where nothing does."""
        labels = (cut(label, 24) for label in self.stack.labels)
        return dict(zip(self.stack.places, labels, strict=True))

    @property
    def what(self) -> Message:
        stack, many = self.stack, len(self.stack.sites)
        return message(
            "heads.what", kind=kind_of(stack.kind), mode=mode_of(stack.mode), layers=message("count.layers", n=many),
            heads=message("count.heads", n=stack.heads), queries=stack.queries, keys=stack.keys,
        )  # fmt: skip


def kind_of(kind: str) -> Message | str:
    """ "self attention"; of a kind that nobody knows, its name."""
    return message(f"kind.{kind}") if kind in SITE_KINDS else cut(clean(kind), 200)


def mode_of(mode: str) -> Message | str:
    """ "training"; of a mode that nobody knows, its name."""
    return message(f"mode.{mode}") if mode in MODES else cut(clean(mode), 200)


def towers(sites: tuple[SiteReading, ...]) -> tuple[Tower, ...]:
    """The stacks of a reading; sites of another number of heads are another stack."""
    found = stacks(sites, equal_heads=True)
    return tuple(Tower(_letter(place) if len(found) > 1 else "", stack) for place, stack in enumerate(found))


def _letter(place: int) -> str:
    """A to Z, then AA, AB, ..."""
    letters = ""
    place += 1
    while place:
        place, rest = divmod(place - 1, 26)
        letters = chr(ord("A") + rest) + letters
    return letters


@dataclass(frozen=True)
class Quantity:
    """A number of a head that the page shows, in words of every language."""

    display: Display
    title: Message
    meaning: Message
    unit: Message | str

    @property
    def name(self) -> str:
        """Field of ``HeadReading``."""
        return self.display.name


def quantities(reading: Reading) -> tuple[Quantity, ...]:
    """The numbers of a head that the page shows, normalised entropy first: it colours the maps at the start.

    A number that is measured only if asked for is there if some head has it. Of a sample of the rows, the largest
    logit is that of the rows that were measured.
    """
    heads = reading.heads
    found = [
        shown
        for name, shown in SHOWN.items()
        if name not in SHOWN_BY_NAME or any(getattr(head, name) is not None for head in heads)
    ]
    found.sort(key=lambda shown: shown.name != "normalized_entropy")
    told = tuple(quantity(one.name, of_sample=reading.sampled_rows is not None) for one in found)
    return (
        *told,
        *(_score(role) for role in ROLES if any((head.roles or {}).get(role.name) is not None for head in heads)),
    )


def _score(role: Role) -> Quantity:
    """The score of a role as the page shows it."""
    shown = Display(role.column, role.name, "", role.meaning, low=0.0, high=1.0)
    return Quantity(
        shown, message("role.score", role=message(f"role.{role.key}.name")), message(f"role.{role.key}.meaning"), ""
    )


def quantity(name: str, *, of_sample: bool = False) -> Quantity:
    """A statistic as the page shows it; ``of_sample``: of a sample of the rows."""
    title, unit = message(f"statistic.{name}.title"), message(f"statistic.{name}.unit") if SHOWN[name].unit else ""
    meaning = message(f"statistic.{name}.meaning")
    if of_sample and name == "max_logit":
        title, meaning = message("quantity.at_least", title=title), message("quantity.meaning_at_least")
    return Quantity(SHOWN[name], title, meaning, unit)


def number_said(name: str, value: float | None) -> Message | str:
    """A number as a comparison says it: of some statistics in percent."""
    if value is None or not SHOWN[name].percent:
        return number(value)
    return message("as_percent", value=SHOWN[name].scale * value)


def document(
    reading: Reading, drawn: tuple[Tower, ...], *, details: bool = True, alarms: Iterable[Alarm] | None = None
) -> dict[str, Any]:
    """Everything the scripts draw.

    Args:
        details: whether histograms and curves are in it.
        alarms: all alarms of a run, where there is one; else those of the reading.
    """
    kinds, named = quantities(reading), by_name(reading.sites)
    shown = tuple(reading.alarms if alarms is None else alarms)
    # Of thousands of alarms each says the place of its basis.
    bases = {kind: of for kind in dict.fromkeys(one.kind for one in shown) if (of := basis(kind, reading.fewest_keys))}
    place_of = {kind: place for place, kind in enumerate(bases)}
    labels = {place: label for tower in drawn for place, label in tower.labels.items()}
    return {
        "texts": page_texts(reason(skipped.reason) for skipped in reading.skipped),
        "details": details,
        "quantities": [_quantity(one) for one in kinds],
        "roles": [
            encode(message(f"role.{role.key}.title")) for role in ROLES if any(head.roles for head in reading.heads)
        ],
        "stacks": [
            {"letter": one.letter, "pattern": one.pattern, "heads": one.stack.heads, "sites": list(one.stack.places)}
            for one in drawn
        ],
        "sites": [_site(site, labels[at], kinds, details) for at, site in enumerate(reading.sites)],
        "bases": [encode(of) for of in bases.values()],
        "alarms": [_alarm(alarm, site_of(alarm, named), place_of.get(alarm.kind)) for alarm in shown],
    }


def _quantity(one: Quantity) -> dict[str, Any]:
    fields = ("low", "high", "logarithmic", "ascending")
    words = {"title": encode(one.title), "unit": encode(one.unit), "meaning": encode(one.meaning)}
    of_role = one.name in SCORES
    superlative = encode(message("role.superlative" if of_role else f"statistic.{one.name}.superlative"))
    return {"key": one.name, **words, "superlative": superlative, "role": of_role} | {
        n: getattr(one.display, n) for n in fields
    }


def _site(site: SiteReading, label: str, kinds: tuple[Quantity, ...], details: bool) -> dict[str, Any]:
    return {
        "name": clean(site.name),
        "label": label,
        "layer": site.layer,
        "kind": encode(kind_of(site.kind)),
        "mode": encode(mode_of(site.mode)),
        "heads": [_head(head, kinds, site.keys if details else None) for head in site.heads],
        **({"roles": [place_of(head) for head in site.heads]} if any(head.roles for head in site.heads) else {}),
    }


def place_of(head: HeadReading) -> int:
    return -1 if head.role is None else ROLES.index(ROLE_OF[head.role])


def _head(head: HeadReading, kinds: tuple[Quantity, ...], most_keys: int | None) -> list[Any]:
    """``most_keys`` of its site; None: without a histogram and a curve."""
    values = [round_digits(column_of(head, one.name)) for one in kinds]
    counts = [head.head, head.rows, head.empty_rows, head.nonfinite_rows]
    return [*counts, values] if most_keys is None else [*counts, values, _histogram(head), _curve(head, most_keys)]


def _histogram(head: HeadReading) -> list[int]:
    """The first filled bin, then the counts up to the last filled one; empty if no bin is filled."""
    filled = [place for place, rows in enumerate(head.normalized_entropy_histogram) if rows]
    return [filled[0], *head.normalized_entropy_histogram[filled[0] : filled[-1] + 1]] if filled else []


def _curve(head: HeadReading, most_keys: int) -> list[Any]:
    """Buckets end at powers of two; the last one is said to end at the most keys that any row had."""
    curve: list[Any] = []
    for bucket in head.by_visible_keys:
        curve += [bucket.first, max(bucket.first, min(bucket.last, most_keys)), bucket.rows]
        curve += [round_digits(bucket.entropy_nats, 4), round_digits(bucket.normalized_entropy, 4)]
    return curve


def _alarm(alarm: Alarm, place: int | None, basis: int | None) -> dict[str, Any]:
    level = level_of(alarm.severity)
    words, when, more = brief(alarm)
    found = {"site": place, "head": alarm.head, "level": level, "text": encode(words)}
    rest = {
        "severity": None if level == alarm.severity else encode(severity_title(alarm.severity)),
        "since": alarm.since,
        "ended": alarm.ended,
        "when": encode(when) or None,
        "more": encode(more) or None,
        "of": basis,
    }
    return found | {name: value for name, value in rest.items() if value is not None}


def spoken_labels(drawn: tuple[Tower, ...]) -> dict[int, str]:
    """Place of a site -> the letter of its stack and its label, ``A3``; sites without a label are left out."""
    return {place: f"{tower.letter}{label}" for tower in drawn for place, label in tower.labels.items() if label != "–"}


def by_name(sites: tuple[SiteReading, ...]) -> dict[str, list[tuple[int, SiteReading]]]:
    """Sites of each name with their places: a model seen in training and in evaluation has two of a name."""
    named: dict[str, list[tuple[int, SiteReading]]] = {}
    for place, site in enumerate(sites):
        named.setdefault(site.name, []).append((place, site))
    return named


def site_of(alarm: Alarm, named: dict[str, list[tuple[int, SiteReading]]]) -> int | None:
    """The place of the site an alarm is of, None if there is none. Of several with its name, the one whose head comes
    nearest to the alarm's value, if that is one of its numbers: an alarm says where, but not in which mode.
    """

    def distance(candidate: tuple[int, SiteReading]) -> float:
        statistic = KINDS[alarm.kind].statistic
        values = [getattr(head, statistic) for head in candidate[1].heads if head.head == alarm.head]
        latest = value_at(alarm, "latest")
        return math.inf if not values or values[0] is None or latest is None else abs(values[0] - latest)

    candidates = named.get(alarm.site, [])
    if len(candidates) < 2 or alarm.kind not in KINDS or not KINDS[alarm.kind].has_statistic:
        return candidates[0][0] if candidates else None
    return min(candidates, key=distance)[0]


def archive(reading: Reading, kind: str) -> str:
    """A file that the page can save ("json" or "csv"), compressed, in base64: so the page stays one file that loads
    nothing. The same reading gives the same text.
    """
    text = as_csv(reading) if kind == "csv" else json.dumps(reading.to_dict(), allow_nan=False)
    # A lone surrogate, which no encoding holds, is written out.
    data = gzip.compress(text.encode("utf-8", "backslashreplace"), mtime=0)
    return base64.b64encode(data).decode("ascii")


def as_csv(reading: Reading) -> str:
    """``heads_as_csv``; empty without heads."""
    return heads_as_csv(reading.placed_heads) if reading.heads else ""


def file_name(name: str) -> str:
    """What the files are called, without their endings: letters, digits, dots and dashes of the model's name."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:60].strip("-.")
    return f"attemper-{plain}" if plain else "attemper"
