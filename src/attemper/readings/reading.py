"""What a scan found, as frozen records of plain numbers: no tensors, no torch. A missing value is None, never NaN."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from attemper.checks import indentation
from attemper.errors import InputError
from attemper.file_schema import AbsentError, fields_of, load_record, parse_json
from attemper.readings.labels import kind_of, layer_of
from attemper.readings.roles import ROLES, role_of
from attemper.text import count, csv_cell

SCHEMA = 2
READABLE = (1, SCHEMA)
"""Schemas that ``Reading.from_dict`` loads."""
FEWEST_KEYS = 32
"""How many keys a row must see before its sharpness is judged, by default."""


@dataclass(frozen=True)
class VisibleKeyBucket:
    """Rows that see ``first`` to ``last`` keys, both included, and their mean entropy."""

    first: int = field(metadata={"name": "from"})
    last: int = field(metadata={"name": "to"})
    rows: int
    entropy_nats: float | None
    normalized_entropy: float | None
    first_token_mass: float | None = None


_LISTS = ("normalized_entropy_histogram", "by_visible_keys")
_SPREAD = ("batches", "standard_errors")
"""How batches differ: in documents of scans that know it."""


@dataclass(frozen=True)
class HeadReading:
    """One head of one site: means over its valid rows; ``max_logit`` is the largest.

    Entropies are in nats, normalised entropy is in parts of log n, weights are shares of 1, and logits have no unit.
    ``logit_std`` is the logit spread under the weights, sqrt(mean ``logit_variance``): a key counts by its weight. It
    is near 0 where one key takes all the weight, however large the largest logit is.
    """

    head: int
    entropy_nats: float | None
    normalized_entropy: float | None
    effective_tokens: float | None
    max_weight: float | None
    max_logit: float | None
    logit_std: float | None
    mass: float | None
    first_token_mass: float | None
    gini: float | None
    normalized_entropy_histogram: tuple[int, ...]
    """Rows in 32 equal bins of [0, 1]."""
    by_visible_keys: tuple[VisibleKeyBucket, ...]
    rows: int
    empty_rows: int
    nonfinite_rows: int
    layer: int | None = None
    """The block that its site is in; see ``layer_of``."""
    judged: bool = False
    """Whether a valid row sees at least ``Reading.fewest_keys`` keys. Without one, no alarm judges its sharpness."""
    support_size: float | None = None
    """Keys whose weight is not 0. Under softmax only if asked for by ``stats=``, as the others of ``SHOWN_BY_NAME``."""
    mean_distance: float | None = None
    """Mean distance between a query and its keys under the weights, in positions."""
    entropy_with_sink_nats: float | None = None
    """Entropy of the weights with the sink as one more outcome."""
    score_variance: float | None = None
    """Mean variance of the visible scores without weights, in logit^2; ``logit_std`` is under the weights."""
    self_weight: float | None = None
    """Mean weight on the query's own key."""
    span_mass: float | None = None
    """Mean weight on the keys of the spans that were given."""
    missed_mass: float | None = None
    """Mean weight that keys would have had which a layer with an indexer did not choose; None of other layers."""
    visible_keys: float | None = None
    """Mean number of keys that a row sees."""
    expected_keys: float | None = None
    """Mean number that it should see, of the same rows; None where nothing declares it."""
    leaked_keys: float | None = None
    """Mean number of visible keys of other documents; None where the batch declares none."""
    batches: int | None = None
    """How many batches of a scan had rows of it; None of one batch, of a watch, and of scans of earlier versions."""
    standard_errors: Mapping[str, float] | None = field(default=None, hash=False)
    """Statistic -> standard error of its mean, by how the batches differ. ``logit_variance`` is in logit^2."""
    roles: Mapping[str, float | None] | None = field(default=None, hash=False)
    """Role -> its score on the first text, None where it is not known; None where roles were not read."""

    @property
    def role(self) -> str | None:
        """The role that it has, of ``attemper.readings.roles.ROLES``; None where it has none, or none were read."""
        return role_of(self.roles)

    def to_dict(self) -> dict[str, Any]:
        plain = {name: value for name, value in vars(self).items() if value is not None or name not in _SPREAD}
        document = plain | {
            "normalized_entropy_histogram": list(self.normalized_entropy_histogram),
            "by_visible_keys": [fields_of(bucket) for bucket in self.by_visible_keys],
        }
        # Documents without roles are older than the fields, and stay as they were.
        roles = document.pop("roles")
        return document if roles is None else document | {"role": self.role, "roles": dict(roles)}


@dataclass(frozen=True)
class SiteReading:
    """One attention site: a module (and which of its calls), self or cross attention, train or eval."""

    name: str
    kind: str
    mode: str
    queries: int
    keys: int
    heads: tuple[HeadReading, ...]
    normalizer: str = "softmax"
    """What computes its weights from scores."""
    layer: int | None = None
    """The block that it is in; see ``layer_of``."""

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells it from all others; see ``SiteKey``."""
        return self.name, self.kind, self.mode

    def to_dict(self) -> dict[str, Any]:
        # Documents of softmax are older than the field ``normalizer``, and stay as they were.
        normalizer = {} if self.normalizer == SiteReading.normalizer else {"normalizer": self.normalizer}
        return {
            "name": self.name,
            "layer": self.layer,
            "kind": self.kind,
            "mode": self.mode,
            "queries": self.queries,
            "keys": self.keys,
            "heads": [head.to_dict() for head in self.heads],
            **normalizer,
        }


@dataclass(frozen=True)
class Skipped:
    """Something that attends, or may, or mixes tokens in another way, and was not measured, and why."""

    name: str
    reason: str

    @property
    def kind(self) -> str | None:
        """The kind of a layer without attention weights ("state space"), with which its reason begins; else None."""
        return kind_of(self.reason)

    def to_dict(self) -> dict[str, Any]:
        # Documents of models whose every layer attends are older than the field ``kind``, and stay as they were.
        return asdict(self) | ({} if self.kind is None else {"kind": self.kind})


@dataclass(frozen=True)
class Alarm:
    """A value beyond its limit. ``head`` is None where the whole site is meant.

    Of a watch, ``value``, ``limit`` and ``message`` are those of the sample with which it began.
    """

    site: str
    head: int | None
    kind: str
    severity: str
    value: float | None
    limit: float | None
    message: str
    advice: str
    step: int | None = None
    """The training step of ``value``, for a watch; None for a scan."""
    since: int | None = None
    """The step at which it began."""
    ended: int | None = None
    """The step at which it ended; None while it stands."""
    worst: float | None = None
    """What ``value`` was at its worst, while the alarm stood. None for a scan, as the three that follow."""
    worst_step: int | None = None
    latest: float | None = None
    """What it was in the last sample of its head in which the alarm stood."""
    latest_step: int | None = None
    continues_as: str | None = None
    """The kind of the alarm of its site that took its place as it ended: ``layer_fallen`` of all heads."""
    continues_since: int | None = None
    """The step at which that one began."""


@dataclass(frozen=True)
class Reading:
    """Everything one scan found, in the order of the model."""

    model: str
    tokens: int
    backend: str
    sites: tuple[SiteReading, ...]
    skipped: tuple[Skipped, ...] = ()
    alarms: tuple[Alarm, ...] = field(default=())
    sampled_rows: int | None = None
    """Rows measured of each sequence, if not all: then ``max_logit`` is a lower bound."""
    fewest_keys: int = FEWEST_KEYS
    """How many keys a row must see to count for alarms about sharpness and first tokens."""
    text: str | None = None
    """The name of what was read, never the text itself."""
    date: str | None = None
    """When it was read, in UTC: ``2026-01-31T09:30:00Z``."""
    dtype: str | None = None
    """Type of the weights; several names, joined by commas, where they differ, or queries have another (autocast)."""
    revision: str | None = None
    """The commit of a hub model, where it is known."""
    versions: Mapping[str, str] | None = field(default=None, hash=False)
    """Versions of attemper, Python, torch and transformers when it was read."""
    untrained_heads: int | None = None
    """How many near uniform heads raise no alarm because the watched model looks untrained; else None."""
    missing_shards: str | None = None
    """Shards of the whole that are not in a merged reading: ``3/64, 17/64 to 19/64``."""
    computed_on: str | None = None
    """Processors, threads and versions of torch, where the parts of a merged reading differ in them."""
    text_digest: str | None = None
    """Of the token ids of all sequences, whatever the batches and the order; None where it is not known."""

    @property
    def heads(self) -> tuple[HeadReading, ...]:
        """All heads, in the order of the model."""
        return tuple(head for site in self.sites for head in site.heads)

    @property
    def placed_heads(self) -> list[tuple[SiteReading, HeadReading]]:
        """All heads with their sites, in the order of the model."""
        return [(site, head) for site in self.sites for head in site.heads]

    @property
    def notes(self) -> tuple[str, ...]:
        """What the alarms do not cover: heads that were not judged, or raised no alarm of their own, and why."""
        short = {site.name: sum(bool(head.rows) and not head.judged for head in site.heads) for site in self.sites}
        silent = {site.name: sum(not head.rows for head in site.heads) for site in self.sites}
        total, advice = len(self.heads), "; give longer inputs or lower fewest_keys"
        parts = (
            (f"too few keys to judge ({self.fewest_keys} needed)", short, advice),
            ("no valid row to judge", silent, ""),
        )
        notes = [f"{what}: {_extent(many, total)}{more}." for what, many, more in parts if any(many.values())]
        missing, machines = self.missing_shards, self.computed_on
        gap = f"shards are missing, so the numbers leave out their texts: {missing}."
        bits = f"the parts come from different machines, which affects the last bits: {machines}."
        more = (self.nothing_note, *notes, self.untrained_note, missing and gap, machines and bits)
        return tuple(note for note in more if note)

    @property
    def nothing_note(self) -> str | None:
        """The first of the notes, where nothing was measured: then no alarm is no good news; else None."""
        if self.alarms or any(head.rows for head in self.heads):
            return None
        heads, skipped = len(self.heads), len(self.skipped)
        if heads:
            return f"nothing was measured: no row of {count(heads, 'head')} was valid."
        why = f"{count(skipped, 'part was', 'parts were')} skipped" if skipped else "no attention was seen"
        return f"nothing was measured: {why}."

    @property
    def unknown_roles(self) -> dict[str, str]:
        """Each role that no head has a score of, and what such a score needs; empty where no roles were read."""
        read = [head.roles for head in self.heads if head.roles is not None]
        return {role.name: role.needs for role in ROLES if read and all(one.get(role.name) is None for one in read)}

    @property
    def untrained_note(self) -> str | None:
        """The last of the notes, where the watched model looks untrained; else None."""
        return untrained_note(self.untrained_heads, len(self.heads))

    def to_dict(self) -> dict[str, Any]:
        """The document of ``attemper scan --json``."""
        plain = {name: value for name, value in vars(self).items() if name not in ("sites", "skipped", "alarms")}
        return {
            "schema": SCHEMA,
            **plain,
            "versions": None if self.versions is None else dict(self.versions),
            **({"unknown_roles": self.unknown_roles} if any(head.roles for head in self.heads) else {}),
            "notes": list(self.notes),
            "sites": [site.to_dict() for site in self.sites],
            "skipped": [skipped.to_dict() for skipped in self.skipped],
            "alarms": [asdict(alarm) for alarm in self.alarms],
        }

    def to_json(self, indent: int | None = None) -> str:
        """``to_dict`` as JSON text. Strict: a NaN here would be a bug and raises."""
        return json.dumps(self.to_dict(), allow_nan=False, ensure_ascii=False, indent=indentation(indent, "scan"))

    @classmethod
    def from_dict(cls, document: Any) -> Self:
        """The reading of a document that ``to_dict`` wrote, in this version or (schema 1) an earlier one.

        Fields that schema 1 lacks follow from the others: ``layer`` from the site's name, ``judged`` from the rows by
        visible keys. Statistics that were not measured are None.

        Raises:
            InputError: the document is not that of a scan, is of a schema this version does not know, or a field is
                missing or of another type.
        """
        schema = _check_schema(document)
        try:
            reading = load_record(cls, document, "")
        except AbsentError as error:
            raise InputError(f"{str(error)[:-1]}: it is not what `attemper scan --json` prints.") from error
        return reading if schema > 1 else replace(reading, sites=tuple(map(_upgrade, reading.sites)))

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> Self:
        """As ``from_dict``, of JSON text or of the path of a file that holds it. A string that begins with ``{``
        is text.

        Raises:
            InputError: as ``from_dict``; or the file cannot be read, or holds no JSON.
        """
        return cls.from_dict(_parse(source))


def _parse(source: str | os.PathLike[str]) -> Any:
    if not isinstance(source, str | os.PathLike):
        raise InputError(f"from_json(source) must be JSON text or the path of a file, got {type(source).__name__}.")
    if isinstance(source, str) and source.lstrip("\ufeff \t\r\n").startswith("{"):
        return parse_json(source, "this text")
    what = f"the file {os.fspath(source)!r}"
    try:
        text = Path(source).read_text("utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{what} cannot be read: {reason}. Name one that `attemper scan --json` wrote.") from error
    return parse_json(text, what)


def _check_schema(document: Any) -> int:
    if not isinstance(document, Mapping) or not {"schema", "sites"} <= set(document):
        given = f"fields {', '.join(map(str, document))}" if isinstance(document, Mapping) else type(document).__name__
        raise InputError(
            f"a scan is an object with 'schema' and 'sites', as `attemper scan --json` prints it; got {given:.200}."
        )
    schema = document["schema"]
    if isinstance(schema, bool) or schema not in READABLE:
        known = " and ".join(map(str, READABLE))
        raise InputError(
            f"this scan is of schema {schema!r:.60}; this version of attemper reads {known}, a newer one may read it."
        )
    return schema


def untrained_note(many: int | None, heads: int) -> str | None:
    """What to say where so many of all heads raise no alarm because the model looks untrained; None where none does."""
    near = f"{many} of {count(heads, 'head')} {'is' if many == 1 else 'are'} near uniform"
    return f"the model looks untrained: {near}. Until this changes, they raise no alarm." if many else None


def number(value: float) -> float | None:
    """``value``; None for NaN and infinity, for which JSON has no word."""
    return float(value) if math.isfinite(value) else None


SCORES = {role.column: role.name for role in ROLES}
"""Column -> the role whose score it has."""
HEAD_COLUMNS = (
    *("site", "layer", "kind", "mode"),
    *(one.name for one in fields(HeadReading) if one.name not in ("layer", "roles", *_LISTS, *_SPREAD)),
    *("role", *SCORES),
)
"""Columns of a table with a row for each head: its place, every number but histogram and buckets, its role and the
scores of all.
"""


def column_of(head: HeadReading, name: str) -> Any:
    """What a head has in one of ``HEAD_COLUMNS``; None where it has nothing."""
    return (head.roles or {}).get(SCORES[name]) if name in SCORES else getattr(head, name, None)


def head_rows(heads: Iterable[tuple[SiteReading, HeadReading]]) -> list[dict[str, Any]]:
    """A row of ``HEAD_COLUMNS`` for each head, exact; a missing number is None."""
    return [
        {name: column_of(head, name) for name in HEAD_COLUMNS}
        | {"site": site.name, "layer": site.layer, "kind": site.kind, "mode": site.mode}
        for site, head in heads
    ]


def heads_as_csv(heads: Iterable[tuple[SiteReading, HeadReading]]) -> str:
    """A line for each head below the names of columns, exact; a missing number is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEAD_COLUMNS)
    writer.writerows(map(csv_cell, row.values()) for row in head_rows(heads))
    return text.getvalue()


def _extent(many: Mapping[str, int], total: int) -> str:
    """How many of ``total`` heads, and at which sites."""
    found = sum(many.values())
    if found == total:
        return "the only head" if total == 1 else f"all {count(total, 'head')}"
    names = [f"{name} ({count})" for name, count in many.items() if count]
    more = f" and {count(len(names) - 3, 'more site')}" if len(names) > 3 else ""
    return f"{found} of {count(total, 'head')}, at {', '.join(names[:3])}{more}"


def _upgrade(site: SiteReading) -> SiteReading:
    """A site of schema 1 with the fields that schema 2 added."""
    layer = layer_of(site.name)
    heads = (
        replace(head, layer=layer, judged=any(b.rows and b.first >= FEWEST_KEYS for b in head.by_visible_keys))
        for head in site.heads
    )
    return replace(site, layer=layer, heads=tuple(heads))
