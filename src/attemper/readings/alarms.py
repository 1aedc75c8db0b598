"""What is alarming in a reading: plain limits on plain numbers, each alarm with what it may mean and what to do.

``ALARMS`` is the one list of them. Limits, advice, pages, tables, trackers and the command line iterate over it: to add
an alarm is to add a record to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Literal

from attemper.checks import one_of
from attemper.errors import InputError
from attemper.readings.reading import FEWEST_KEYS, Alarm, HeadReading, SiteReading, VisibleKeyBucket

SEVERITIES: tuple[str, ...] = ("notice", "warning", "critical")
JUDGED = tuple(field.name for field in fields(VisibleKeyBucket) if field.name not in ("first", "last", "rows"))
"""The statistics that are known of rows that see enough keys: those of buckets by visible keys."""


@dataclass(frozen=True)
class AlarmKind:
    """One kind of alarm: when it rings, and how it is told."""

    name: str
    statistic: str
    """The number of a ``HeadReading`` that it judges."""
    side: Literal["above", "below"]
    """On which side of its limit it rings."""
    limit: float | None
    """The default of ``limits={name: ...}``. None: it rings above 0, and has no limit that can be set."""
    severity: str
    message: str
    """What is said of a head, after its place: a format of ``value``, ``total`` (rows) and, if relative, ``before``."""
    clause: tuple[str, str]
    """What follows the number of heads in the sentence of the page: for one head, and for several."""
    title: str
    """The name on the card of the page."""
    advice: str
    worst: str = ""
    """What the sentence calls the largest value. Empty: it tells no value."""
    judged: bool = True
    """Whether it judges only rows that see enough keys: a statistic of ``JUDGED``."""
    relative: bool = False
    """Whether the limit is a share of the head's value in the first sample of a watch. A scan has no first sample."""

    def __post_init__(self) -> None:
        if self.judged and self.statistic not in JUDGED:
            raise InputError(
                f"AlarmKind({self.name!r}): {self.statistic} is not known of only the rows that see enough keys, as "
                f"{', '.join(JUDGED)} are: judge one of these, or pass judged=False."
            )

    def value(self, head: HeadReading, fewest_keys: int) -> float | None:
        """The number that it judges; None where there is none."""
        if self.judged:
            return over_enough_keys(head, self.statistic, fewest_keys)
        value = getattr(head, self.statistic)
        return None if value is None else float(value)

    def rings(self, value: float, limit: float | None) -> bool:
        bound = 0.0 if limit is None else limit
        return value < bound if self.side == "below" else value > bound

    def alarm(
        self, site: SiteReading, head: HeadReading, value: float, limit: float | None, before: float | None = None
    ) -> Alarm:
        """The alarm of a head whose ``value`` is beyond ``limit``; ``before``: its value in the first sample."""
        total = head.rows + head.empty_rows + head.nonfinite_rows
        message = f"{site.name} head {head.head}: " + self.message.format(value=value, total=total, before=before)
        return Alarm(site.name, head.head, self.name, self.severity, value, limit, message, self.advice)


ALARMS = (
    AlarmKind(
        name="nonfinite",
        statistic="nonfinite_rows",
        side="above",
        limit=None,
        judged=False,
        severity="critical",
        message="{value:.0f} of {total} rows have a NaN or infinite score",
        clause=("has NaN or infinite scores", "have NaN or infinite scores"),
        title="NaN or infinite scores",
        advice="Scores hold NaN or infinity: find the first layer where they appear, look for NaN weights and for "
        "overflow in half precision. These rows are left out of every mean.",
    ),
    AlarmKind(
        name="collapsed",
        statistic="normalized_entropy",
        side="below",
        limit=0.05,
        severity="notice",
        message="normalised entropy {value:.3f} is very low",
        clause=("is nearly one-hot", "are nearly one-hot"),
        title="nearly one-hot",
        advice="Healthy models have sharp heads. If this one was not sharp before, look at the size of its logits and "
        "the learning rate; a temperature above 1 or a clip on query and key weights widens it.",
    ),
    AlarmKind(
        name="diffuse",
        statistic="normalized_entropy",
        side="above",
        limit=0.95,
        severity="notice",
        message="normalised entropy {value:.3f} is near uniform",
        clause=("is nearly uniform", "are nearly uniform"),
        title="nearly uniform",
        advice="The head spreads its weight over all keys alike: common in first layers and for averaging heads. If it "
        "should select, a temperature below 1 sharpens it.",
    ),
    AlarmKind(
        name="logits",
        statistic="max_logit",
        side="above",
        limit=100.0,
        judged=False,
        severity="warning",
        message="largest score {value:.1f}",
        clause=("has logits", "have logits"),
        worst="the largest",
        title="large logits",
        advice="Scores this large saturate the softmax and are where training in half precision breaks. Clip query and "
        "key weights, normalise queries and keys, or lower the learning rate.",
    ),
    AlarmKind(
        name="first_token",
        statistic="first_token_mass",
        side="above",
        limit=0.8,
        severity="notice",
        message="{value:.0%} of the weight rests on the first token",
        clause=("rests on the first token", "rest on the first token"),
        title="on the first token",
        advice="The head rests on the first token (an attention sink): healthy in most decoders. Mind it before "
        "evicting or compressing the first keys of a cache.",
    ),
    AlarmKind(
        name="fallen",
        statistic="normalized_entropy",
        side="below",
        limit=0.02,
        relative=True,
        severity="warning",
        message="normalised entropy has fallen from {before:.2g} in the first sample to {value:.2g}",
        clause=("is far sharper than in the first sample", "are far sharper than in the first sample"),
        title="fallen",
        advice="The head has become much sharper than it was when the watch began. If the loss suffers too, lower the "
        "learning rate, or hold its entropy by a temperature above 1, a penalty on entropy or a clip of query and key "
        "weights.",
    ),
)
KINDS = {kind.name: kind for kind in ALARMS}

WATCH_LIMITS = {kind.name: kind.limit for kind in ALARMS if kind.limit is not None}
"""The default limits of a watch, by kind."""

LIMITS = {name: limit for name, limit in WATCH_LIMITS.items() if not KINDS[name].relative}
"""Those of a scan, which has no first sample."""


def check_limits(limits: Mapping[str, float] | None, known: Mapping[str, float] = LIMITS) -> dict[str, float]:
    """The default limits, ``known``, with those given in their place.

    Raises:
        InputError: a name that is not a limit, or a value that is not a number.
    """
    merged = dict(known)
    for name, value in (limits or {}).items():
        one_of("limits", name, known)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise InputError(f"limits[{name!r}] must be a number, got {value!r}.")
        merged[name] = float(value)
    return merged


def check_fewest_keys(where: str, fewest_keys: int) -> int:
    """``fewest_keys`` if it is a whole number of at least 2.

    Raises:
        InputError: it is not.
    """
    if isinstance(fewest_keys, bool) or not isinstance(fewest_keys, int) or fewest_keys < 2:
        raise InputError(
            f"{where}(fewest_keys=...) must be a whole number of at least 2, got {fewest_keys!r}. It is how many keys "
            f"a row must see before its sharpness is judged ({FEWEST_KEYS} unless told); a row with one key has none."
        )
    return fewest_keys


def alarms(
    sites: tuple[SiteReading, ...], limits: Mapping[str, float] | None = None, fewest_keys: int = FEWEST_KEYS
) -> tuple[Alarm, ...]:
    """Alarms of a scan. Sharpness is a notice: only a history or a baseline tells trouble from a healthy sharp head.

    Args:
        sites: their buckets by visible keys have an edge at ``fewest_keys``.
        limits: by kind, in the place of ``LIMITS``.
        fewest_keys: rows that see fewer say nothing about sharpness or first tokens.
    """
    merged = check_limits(limits, WATCH_LIMITS)
    return tuple(alarm for site in sites for head in site.heads for alarm in _of_head(site, head, merged, fewest_keys))


def _of_head(site: SiteReading, head: HeadReading, limits: Mapping[str, float], fewest_keys: int) -> Iterator[Alarm]:
    for kind in ALARMS:
        value, limit = kind.value(head, fewest_keys), limits.get(kind.name, kind.limit)
        if not kind.relative and value is not None and kind.rings(value, limit):
            yield kind.alarm(site, head, value, limit)


def over_enough_keys(head: HeadReading, statistic: str, fewest_keys: int) -> float | None:
    """Mean over rows that see at least ``fewest_keys`` keys; None if no row does."""
    buckets = [bucket for bucket in head.by_visible_keys if bucket.first >= fewest_keys]
    rows = sum(bucket.rows for bucket in buckets)
    values = [getattr(bucket, statistic) for bucket in buckets]
    if not rows or None in values:
        return None
    return sum(value * bucket.rows for value, bucket in zip(values, buckets, strict=True)) / rows


def level_of(severity: str) -> str:
    """The severity, or warning for one that this version does not know: better looked at than missed."""
    return severity if severity in SEVERITIES else "warning"


def by_kind(alarms: tuple[Alarm, ...]) -> dict[tuple[str, str], list[Alarm]]:
    """Alarms by severity and kind, the worst severity first, then in the order in which kinds are first met."""
    groups: dict[tuple[str, str], list[Alarm]] = {}
    for alarm in sorted(alarms, key=lambda alarm: -SEVERITIES.index(level_of(alarm.severity))):
        groups.setdefault((alarm.severity, alarm.kind), []).append(alarm)
    return groups
