"""What the page shows without scripts: key figures, groups of alarms, the table of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from attemper.readings.alarms import by_kind, is_heard, level_of, urgency
from attemper.readings.reading import Alarm, HeadReading, Reading, SiteReading, column_of
from attemper.readings.roles import ROLE_OF, ROLES
from attemper.report.document import Quantity, Tower, by_name, mode_of, place_of, site_of, spoken_labels
from attemper.report.texts import (
    Date,
    Message,
    advice,
    alarm_title,
    basis,
    brief,
    message,
    own_name,
    place_of_alarm,
    place_said,
    severity_title,
)
from attemper.text import clean, cut, number

MOST_PLACES = 60
"""Alarms of a kind that are listed; the map marks all of them."""
MOST_TOLD = 3
"""Alarms of a kind, of a run, that are told in full."""
MOST_ROWS = 200
"""Heads up to which the table without scripts has a row for each; beyond, a row for each layer."""


@dataclass(frozen=True)
class Place:
    """A head, or a whole site where ``head`` is None, as something to click on."""

    site: int | None
    head: int | None
    label: Message | str
    title: Message
    when: Message | str = ""
    """When an alarm of a run stood, and how bad it became."""
    said: Message | str = ""


@dataclass(frozen=True)
class Group:
    """Alarms of one severity and kind."""

    severity: Message | str
    level: str
    """The severity, or the one that an unknown one counts as."""
    kind: Message | str
    many: int
    advice: Message | str
    of: Message | str
    """Over what its values are; empty where that is all rows."""
    told: tuple[Place, ...]
    """The first alarms of a run, which are told in full."""
    places: tuple[Place, ...]
    more: int

    @property
    def order(self) -> str:
        """In which order the heads stand: the key of the hint before them."""
        if self.many == 1:
            return "alarms.hint"
        return "alarms.earliest_first" if self.told else "alarms.worst_first"


@dataclass(frozen=True)
class Figure:
    """A number that says something of the whole model, and the head it is of."""

    title: Message
    value: float | Message
    unit: Message | str
    place: Place | None = None
    when: Message | str = ""


def groups(
    reading: Reading, towers: tuple[Tower, ...], alarms: Sequence[Alarm] | None = None, most: int = MOST_PLACES
) -> tuple[Group, ...]:
    """Alarms by severity, worst first, then by kind in the order met; those of the reading, or others. Of a kind, those
    of a run stand in the order in which they began, and what began together, or is of a scan, the worst first.

    Args:
        most: heads of a kind that are listed.
    """
    labels, named, found = spoken_labels(towers), by_name(reading.sites), []
    for (severity, kind, by_job), own in by_kind(tuple(reading.alarms if alarms is None else alarms)).items():
        places = [_alarm_place(one, site_of(one, named), labels) for one in own[: most + MOST_TOLD]]
        told = tuple(places[:MOST_TOLD]) if places[0].when else ()
        rest = tuple(places[len(told) :][:most])
        group = Group(
            severity=severity_title(severity),
            level=level_of(severity),
            kind=message("role.group", kind=alarm_title(kind)) if by_job else alarm_title(kind),
            many=len(own),
            advice=advice(own[0]),
            of=basis(kind, reading.fewest_keys),
            told=told,
            places=rest,
            more=len(own) - len(told) - len(rest),
        )
        found.append(group)
    return tuple(found)


def _alarm_place(alarm: Alarm, site: int | None, labels: dict[int, str]) -> Place:
    place, (words, when, _) = _place(site, alarm.head, alarm.site, labels), brief(alarm)
    told, where = cut(words, 400) if isinstance(words, str) else words, place_of_alarm(alarm)
    label = where if where.key == "loss.title" else place.label
    return replace(place, label=label, title=message("head.alarm", place=where, said=told), when=when, said=words)


def _place(site: int | None, head: int | None, name: str, labels: dict[int, str]) -> Place:
    label = cut(clean(name), 24) if site is None or site not in labels else labels[site]
    title = place_said(name, head)
    if head is not None:
        return Place(site, head, f"{label} · {head}", title)
    return Place(site, head, label if label == cut(clean(name), 24) else message("head.layer", label=label), title)


def first_heard(alarms: Sequence[Alarm]) -> Alarm | None:
    """The first alarm of a run that is a warning or worse."""
    heard = [alarm for alarm in alarms if is_heard(alarm) and alarm.since is not None]
    return min(heard, key=urgency, default=None)


def first_warning(reading: Reading, towers: tuple[Tower, ...], alarms: Sequence[Alarm]) -> Figure | None:
    """When and where a run first had an alarm that is a warning or worse."""
    first = first_heard(alarms)
    if first is None:
        return None
    labels, site = spoken_labels(towers), site_of(first, by_name(reading.sites))
    place = _alarm_place(first, site, labels)
    label = _spoken(site, first.head, place, labels)
    together = [one for one in alarms if is_heard(one) and one.since == first.since]
    heads = {(one.site, one.head) for one in together if None not in (one.head, first.head)}
    if len(heads) > 1:
        label = message("figure.at_once", place=label, n=len(heads) - 1)
    return Figure(
        message("figure.first"), message("figure.at_step", step=first.since), "",
        replace(place, label=label),
    )  # fmt: skip


def _spoken(site: int | None, head: int | None, place: Place, labels: dict[int, str]) -> Message | str:
    """``layer 3, head 5``."""
    if site is None or site not in labels:
        return place.label
    layer = message("head.layer", label=labels[site])
    return layer if head is None else message("head.spoken", layer=layer, head=head)


def picture_places(
    reading: Reading, towers: tuple[Tower, ...], pictures: Sequence[Mapping[str, Any]]
) -> tuple[Place, ...]:
    """The heads that have a picture, to click on."""
    labels = spoken_labels(towers)
    return tuple(_place(one["site"], one["head"], reading.sites[one["site"]].name, labels) for one in pictures)


def origin(reading: Reading) -> tuple[tuple[Message, Message | Date | str], ...]:
    """What was read, when and with what, as titles and values; what the reading does not tell is left out."""
    versions = ", ".join(f"{name} {version}" for name, version in (reading.versions or {}).items())
    told = {
        "text": reading.text,
        "date": None if reading.date is None else Date(clean(reading.date)),
        "dtype": reading.dtype,
        "revision": None if reading.revision is None else reading.revision[:12],
        "versions": versions or None,
    }
    return tuple(
        (
            message(f"origin.{name}"),
            message("as_is", said=value if isinstance(value, Date) else own_name(cut(clean(value), 160))),
        )
        for name, value in told.items()
        if value is not None
    )


def figures(reading: Reading, towers: tuple[Tower, ...], when: Message | str = "") -> tuple[Figure, ...]:
    """The mean and the extremes of normalised entropy and the largest logit; those that have a number. ``when``: the
    step that they are of.
    """
    labels = spoken_labels(towers)
    entropies = _values(reading, "normalized_entropy")
    if not entropies:
        return ()
    mean = sum(value for value, _, _ in entropies) / len(entropies)

    def extreme(title: str, unit: Message | str, found: tuple[float, int, int]) -> Figure:
        value, at, head = found
        place = _place(at, head, reading.sites[at].name, labels)
        place = replace(place, label=_spoken(at, head, place, labels))
        return Figure(message(f"figure.{title}"), _three_places(value, unit), unit, place, when)

    of_log, logits = message("statistic.normalized_entropy.unit"), _values(reading, "max_logit")
    largest = "logit" if reading.sampled_rows is None else "logit_at_least"
    return (
        Figure(message("figure.mean"), _three_places(mean, of_log), of_log, None, when),
        extreme("sharpest", of_log, min(entropies, key=itemgetter(0))),
        extreme("diffuse", of_log, max(entropies, key=itemgetter(0))),
        *([extreme(largest, "", max(logits, key=itemgetter(0)))] if logits else []),
    )


def _three_places(value: float, unit: Message | str) -> float:
    """Shares to three places: a reader does nothing with more."""
    return round(float(value), 3) if unit else float(value)


def _values(reading: Reading, key: str) -> list[tuple[float, int, int]]:
    """Value, place of the site and number of the head, in the order of the model; heads without one left out."""
    return [
        (value, at, head.head)
        for at, site in enumerate(reading.sites)
        for head in site.heads
        if (value := getattr(head, key)) is not None
    ]


def role_choices(reading: Reading) -> list[tuple[int, Message]]:
    """The roles that heads have, by their places among ``ROLES``, with how many heads have them; then those with none.
    Empty where no role was read.
    """
    own = [place_of(head) for head in reading.heads if head.roles]
    names = {place: message(f"role.{role.key}.name") for place, role in enumerate(ROLES)} | {-1: message("role.none")}
    return [
        (place, message("role.choice", role=name, n=own.count(place))) for place, name in names.items() if place in own
    ]


def unknown_roles(reading: Reading) -> list[Message]:
    """Which roles no head has a score of, and what such a score needs."""
    keys = [f"role.{ROLE_OF[name].key}" for name in reading.unknown_roles]
    return [message("role.needs", role=message(f"{key}.name"), needs=message(f"{key}.needs")) for key in keys]


Row = tuple[str, str, Message | str, str, list[str], int]
"""One line of the table without scripts: site, layer, mode, head, numbers, and how many rows they are of."""


def rows(reading: Reading, kinds: tuple[Quantity, ...]) -> list[Row]:
    """A row for each head; for each layer, with means over heads, where there are more than ``MOST_ROWS``."""
    if len(reading.heads) <= MOST_ROWS:
        return [_row(site, str(head.head), (head,), kinds) for site, head in reading.placed_heads]
    return [_row(site, f"mean of {len(site.heads)}", site.heads, kinds) for site in reading.sites]


def _row(site: SiteReading, name: str, heads: tuple[HeadReading, ...], kinds: tuple[Quantity, ...]) -> Row:
    layer = "–" if site.layer is None else str(site.layer)
    values = [number(_mean(heads, kind.name)) for kind in kinds]
    return clean(site.name), layer, mode_of(site.mode), name, values, sum(head.rows for head in heads)


def _mean(heads: tuple[HeadReading, ...], key: str) -> float | None:
    known = [value for head in heads if (value := column_of(head, key)) is not None]
    return sum(known) / len(known) if known else None
