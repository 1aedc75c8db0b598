"""What the page shows without scripts: key figures, groups of alarms, the table of numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from attemper.readings.alarms import KINDS, by_kind, level_of
from attemper.readings.reading import Alarm, HeadReading, Reading, SiteReading
from attemper.report.document import Tower, by_name, said, site_of, spoken_labels
from attemper.statistics import Display
from attemper.text import clean, cut, number

MOST_PLACES = 60
"""Alarms of a kind that are listed; the map marks all of them."""
MOST_ROWS = 600
"""Heads up to which the table without scripts has a row for each; beyond, a row for each layer."""


@dataclass(frozen=True)
class Place:
    """A head, or a whole site where ``head`` is None, as something to click on."""

    site: int | None
    head: int | None
    label: str
    title: str


@dataclass(frozen=True)
class Group:
    """Alarms of one severity and kind."""

    severity: str
    level: str
    """The severity, or the one that an unknown one counts as."""
    kind: str
    many: int
    advice: str
    places: tuple[Place, ...]
    more: int


@dataclass(frozen=True)
class Figure:
    """A number that says something of the whole model, and the head it is of."""

    title: str
    value: str
    unit: str
    place: Place | None = None


def groups(reading: Reading, towers: tuple[Tower, ...]) -> tuple[Group, ...]:
    """Alarms by severity, worst first, then by kind in the order met."""
    labels, named = spoken_labels(towers), by_name(reading.sites)
    return tuple(
        Group(
            severity=clean(severity),
            level=level_of(severity),
            kind=KINDS[kind].title if kind in KINDS else clean(kind),
            many=len(alarms),
            advice=clean(alarms[0].advice),
            places=tuple(_alarm_place(alarm, site_of(alarm, named), labels) for alarm in alarms[:MOST_PLACES]),
            more=max(0, len(alarms) - MOST_PLACES),
        )
        for (severity, kind), alarms in by_kind(reading.alarms).items()
    )


def _alarm_place(alarm: Alarm, site: int | None, labels: dict[int, str]) -> Place:
    place = _place(site, alarm.head, alarm.site, labels)
    return replace(place, title=cut(f"{place.title}: {said(alarm)}", 400))


def _place(site: int | None, head: int | None, name: str, labels: dict[int, str]) -> Place:
    label = cut(clean(name), 24) if site is None or site not in labels else labels[site]
    of_head = "" if head is None else f" · {head}"
    return Place(site, head, f"{label}{of_head}", cut(clean(name), 300) + ("" if head is None else f", head {head}"))


def origin(reading: Reading) -> tuple[tuple[str, str], ...]:
    """What was read, when and with what, as titles and values; what the reading does not tell is left out."""
    date = None if reading.date is None else reading.date.replace("T", " ").replace("Z", " UTC")
    versions = ", ".join(f"{name} {version}" for name, version in (reading.versions or {}).items())
    told = {
        "text": reading.text,
        "read on": date,
        "weights": reading.dtype,
        "revision": None if reading.revision is None else reading.revision[:12],
        "with": versions or None,
    }
    return tuple((title, cut(clean(value), 160)) for title, value in told.items() if value is not None)


def figures(reading: Reading, towers: tuple[Tower, ...]) -> tuple[Figure, ...]:
    """The mean and the extremes of normalised entropy and the largest logit; those that have a number."""
    labels = spoken_labels(towers)
    entropies = _values(reading, "normalized_entropy")
    if not entropies:
        return ()
    mean = sum(value for value, _, _ in entropies) / len(entropies)

    def extreme(title: str, unit: str, found: tuple[float, int, int]) -> Figure:
        value, at, head = found
        place = _place(at, head, reading.sites[at].name, labels)
        label = f"layer {place.label}" if at in labels else place.label
        return Figure(title, number(value, 3), unit, replace(place, label=label.replace(" · ", ", head ")))

    logits = _values(reading, "max_logit")
    largest = "Largest logit" if reading.sampled_rows is None else "Largest logit, at least"
    return (
        Figure("Mean normalised entropy", number(mean, 3), "of log n"),
        extreme("Sharpest head", "of log n", min(entropies, key=_value)),
        extreme("Most diffuse head", "of log n", max(entropies, key=_value)),
        *([extreme(largest, "", max(logits, key=_value))] if logits else []),
    )


def _values(reading: Reading, key: str) -> list[tuple[float, int, int]]:
    """Value, place of the site and number of the head, in the order of the model; heads without one left out."""
    return [
        (value, at, head.head)
        for at, site in enumerate(reading.sites)
        for head in site.heads
        if (value := getattr(head, key)) is not None
    ]


def _value(found: tuple[float, int, int]) -> float:
    return found[0]


@dataclass(frozen=True)
class Row:
    """One line of the table without scripts."""

    site: str
    layer: str
    mode: str
    head: str
    values: tuple[str, ...]
    rows: int


def rows(reading: Reading, kinds: tuple[Display, ...]) -> tuple[Row, ...]:
    """A row for each head; for each layer, with means over heads, where there are more than ``MOST_ROWS``."""
    if len(reading.heads) <= MOST_ROWS:
        return tuple(_row(site, str(head.head), (head,), kinds) for site, head in reading.placed_heads)
    return tuple(_row(site, f"mean of {len(site.heads)}", site.heads, kinds) for site in reading.sites)


def _row(site: SiteReading, name: str, heads: tuple[HeadReading, ...], kinds: tuple[Display, ...]) -> Row:
    layer = "–" if site.layer is None else str(site.layer)
    values = tuple(number(_mean(heads, kind.name)) for kind in kinds)
    return Row(clean(site.name), layer, clean(site.mode), name, values, sum(head.rows for head in heads))


def _mean(heads: tuple[HeadReading, ...], key: str) -> float | None:
    known = [value for head in heads if (value := getattr(head, key)) is not None]
    return sum(known) / len(known) if known else None
