"""What a scan found, as frozen records of plain numbers: no tensors, no torch. A missing value is None, never NaN."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self, TypeVar

from attemper.errors import InputError

SCHEMA = 2
READABLE = (1, SCHEMA)
"""Schemas of documents that ``Reading.from_dict`` loads."""
SEVERITIES = ("notice", "warning", "critical")

FEWEST_KEYS = 32
"""A row must see this many keys before its sharpness says anything, unless told otherwise."""

BY_NAME = ("support_size", "mean_distance", "gini", "entropy_with_sink_nats", "score_variance")
"""Numbers of a head that are None unless they were asked for."""

Record = TypeVar("Record")


@dataclass(frozen=True)
class VisibleKeyBucket:
    """Rows that see ``first`` to ``last`` keys, both included, and their mean entropy."""

    first: int
    last: int
    rows: int
    entropy_nats: float | None
    normalized_entropy: float | None
    first_token_mass: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "from": self.first,
            "to": self.last,
            "rows": self.rows,
            "entropy_nats": self.entropy_nats,
            "normalized_entropy": self.normalized_entropy,
            "first_token_mass": self.first_token_mass,
        }

    @classmethod
    def from_dict(cls, document: Any, where: str = "bucket") -> Self:
        """What ``to_dict`` wrote. ``where`` stands in errors."""
        ends = _renamed(document, {"from": "first", "to": "last"})
        return _loaded(cls, ends, where)


@dataclass(frozen=True)
class HeadReading:
    """One head of one site: means over its valid rows; ``max_logit`` is the largest.

    ``logit_std`` is the logit spread under the weights, sqrt(mean ``logit_variance``): a key counts by its weight. It
    is near 0 where one key takes all, beside a largest logit of any size.
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
    """Whether a valid row sees ``Reading.fewest_keys`` keys or more: without one, no alarm speaks of its sharpness."""
    support_size: float | None = None
    """Keys whose weight is not 0. Under softmax only if asked for by ``stats=``, as the others of ``BY_NAME``."""
    mean_distance: float | None = None
    """Mean distance between a query and its keys under the weights, in positions."""
    entropy_with_sink_nats: float | None = None
    """Entropy of the weights with the sink as one more outcome."""
    score_variance: float | None = None
    """Mean variance of the visible scores without weights, in logit^2; ``logit_std`` is under the weights."""

    def to_dict(self) -> dict[str, Any]:
        plain = {name: value for name, value in vars(self).items() if name != "by_visible_keys"}
        plain["normalized_entropy_histogram"] = list(self.normalized_entropy_histogram)
        ordered = list(plain)
        buckets = [bucket.to_dict() for bucket in self.by_visible_keys]
        at = ordered.index("normalized_entropy_histogram") + 1
        return {name: plain[name] for name in ordered[:at]} | {
            "by_visible_keys": buckets,
            **{name: plain[name] for name in ordered[at:]},
        }

    @classmethod
    def from_dict(cls, document: Any, where: str = "head") -> Self:
        """What ``to_dict`` wrote. ``where`` stands in errors."""
        buckets = tuple(
            VisibleKeyBucket.from_dict(bucket, f"{where}.by_visible_keys[{place}]")
            for place, bucket in enumerate(_list(document, "by_visible_keys", where))
        )
        histogram = tuple(
            _checked("int", rows, f"{where}.normalized_entropy_histogram[{place}]")
            for place, rows in enumerate(_list(document, "normalized_entropy_histogram", where))
        )
        return _loaded(cls, document, where, by_visible_keys=buckets, normalized_entropy_histogram=histogram)


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
    """What its weights come from."""
    layer: int | None = None
    """The block that it is in; see ``layer_of``."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "layer": self.layer,
            "kind": self.kind,
            "mode": self.mode,
            "queries": self.queries,
            "keys": self.keys,
            "heads": [head.to_dict() for head in self.heads],
            # The document of softmax is what it was before there was anything else.
            **({} if self.normalizer == "softmax" else {"normalizer": self.normalizer}),
        }

    @classmethod
    def from_dict(cls, document: Any, where: str = "site") -> Self:
        """What ``to_dict`` wrote. ``where`` stands in errors."""
        heads = tuple(
            HeadReading.from_dict(head, f"{where}.heads[{place}]")
            for place, head in enumerate(_list(document, "heads", where))
        )
        return _loaded(cls, document, where, heads=heads)


@dataclass(frozen=True)
class Skipped:
    """Something that attends, or may, and was not measured, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Alarm:
    """A value beyond its limit. ``head`` is None where the whole site is meant."""

    site: str
    head: int | None
    kind: str
    severity: str
    value: float | None
    limit: float | None
    message: str
    advice: str
    step: int | None = None
    """The step that was sampled, of a watch; None of a scan."""


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
    """Keys that a row must see to count for alarms about sharpness and first tokens."""
    text: str | None = None
    """What was read, by a name: never the text itself."""
    date: str | None = None
    """When it was read, in UTC: ``2026-01-31T09:30:00Z``."""
    dtype: str | None = None
    """Type of the weights; several names, joined by commas, where they differ."""
    revision: str | None = None
    """The commit of a hub model, where it is known."""
    versions: Mapping[str, str] | None = field(default=None, hash=False)
    """Of attemper, Python, torch and transformers when it was read."""
    untrained_heads: int | None = None
    """Near uniform heads that no alarm tells, of a watched model that looks untrained; else None."""

    @property
    def heads(self) -> tuple[HeadReading, ...]:
        """All heads, in the order of the model."""
        return tuple(head for site in self.sites for head in site.heads)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the alarms do not cover: heads that were not judged, or not told one by one, and why. Else empty."""
        short = {site.name: sum(bool(head.rows) and not head.judged for head in site.heads) for site in self.sites}
        silent = {site.name: sum(not head.rows for head in site.heads) for site in self.sites}
        total, advice = len(self.heads), "; give longer inputs or lower fewest_keys"
        parts = (
            (f"too few keys to judge ({self.fewest_keys} needed)", short, advice),
            ("no valid row to judge", silent, ""),
        )
        found = [f"{what}: {_extent(many, total)}{more}." for what, many, more in parts if any(many.values())]
        if self.untrained_heads:
            near = (
                f"{self.untrained_heads} of {total} heads {'is' if self.untrained_heads == 1 else 'are'} near uniform"
            )
            found.append(f"the model looks untrained: {near}, and not told one by one until it is not so.")
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """The document of ``attemper scan --json``."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "tokens": self.tokens,
            "backend": self.backend,
            "sampled_rows": self.sampled_rows,
            "fewest_keys": self.fewest_keys,
            "text": self.text,
            "date": self.date,
            "dtype": self.dtype,
            "revision": self.revision,
            "versions": None if self.versions is None else dict(self.versions),
            "untrained_heads": self.untrained_heads,
            "notes": list(self.notes),
            "sites": [site.to_dict() for site in self.sites],
            "skipped": [asdict(skipped) for skipped in self.skipped],
            "alarms": [asdict(alarm) for alarm in self.alarms],
        }

    def to_json(self, indent: int | None = None) -> str:
        """``to_dict`` as JSON text. Strict: a NaN here would be a bug and raises."""
        return json.dumps(self.to_dict(), allow_nan=False, ensure_ascii=False, indent=indent)

    @classmethod
    def from_dict(cls, document: Any) -> Self:
        """The reading of a document that ``to_dict`` wrote, in this version or (schema 1) an earlier one.

        Fields that came later read as they would have been measured: ``layer`` from the site's name, ``judged`` from
        the rows by visible keys; statistics that nobody asked for are None.

        Raises:
            InputError: the document is not that of a scan, is of a schema this version does not know, or a field is
                missing or of another type.
        """
        checked = _of_known_schema(document)
        sites = tuple(
            SiteReading.from_dict(site, f"sites[{place}]") for place, site in enumerate(_list(checked, "sites", ""))
        )
        others = {
            name: tuple(
                _loaded(record, entry, f"{name}[{place}]") for place, entry in enumerate(_list(checked, name, ""))
            )
            for name, record in (("skipped", Skipped), ("alarms", Alarm))
        }
        return _loaded(cls, checked, "", sites=sites, versions=_versions(checked.get("versions")), **others)

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> Self:
        """As ``from_dict``, of JSON text or of the path of a file that holds it. A string that begins with ``{``
        is text.

        Raises:
            InputError: as ``from_dict``; or the file cannot be read, or holds no JSON.
        """
        return cls.from_dict(_parsed(source))


def number(value: float) -> float | None:
    """A float, or None where there is none (NaN) or JSON has no word for it (infinite)."""
    return float(value) if math.isfinite(value) else None


def _extent(many: Mapping[str, int], total: int) -> str:
    """How many of ``total`` heads, and at which sites."""
    found = sum(many.values())
    if found == total:
        return "the only head" if total == 1 else f"all {total} heads"
    names = [f"{name} ({count})" for name, count in many.items() if count]
    more = f" and {len(names) - 3} more sites" if len(names) > 3 else ""
    return f"{found} of {total} heads, at {', '.join(names[:3])}{more}"


_BLOCKS = re.compile(r"(?:.*(?:layer|block|group|stage)s?|h)")
"""Names of lists that hold the blocks of a model: ``layers``, ``resblocks``, GPT-2's ``h``."""
_INDEX = re.compile(r"[0-9]{1,9}")
_SUBLAYER = re.compile(r"(?:^|\.)block\.([0-9]{1,9})\.layer\.[0-9]{1,9}(?:\.|$)")
"""T5 numbers the parts of a block as well."""


def layer_of(name: str) -> int | None:
    """The number of the block that a site is in, from its name. None where there is none, or several might be meant.

    A lone number is that of the block. Of several it is the one after a list of blocks (``layers``, ``blocks``, ``h``),
    if there is one such list; T5's ``block.3.layer.0`` is block 3. Towers of one model keep their own numbers.

    Example:
        >>> [layer_of(name) for name in ("model.layers.7.self_attn", "blocks.2.attn.0#2", "stages.1.blocks.0.attn")]
        [7, 2, None]
    """
    name = name.partition("#")[0]
    if sublayer := _SUBLAYER.search(name):
        name = name[: sublayer.end(1)]
    parts = name.split(".")
    numbered = [place for place, part in enumerate(parts) if _INDEX.fullmatch(part)]
    in_lists = [place for place in numbered if place and _BLOCKS.fullmatch(parts[place - 1])]
    meant = numbered if len(numbered) == 1 else in_lists
    return int(parts[meant[0]]) if len(meant) == 1 else None


def _of_known_schema(document: Any) -> dict[str, Any]:
    """``document`` with the fields of this schema, if it is that of a scan."""
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
    return _upgraded(document) if schema == 1 else dict(document)


def _upgraded(document: Mapping[str, Any]) -> dict[str, Any]:
    """A document of schema 1 with what schema 2 added."""
    sites = []
    for place, site in enumerate(_list(document, "sites", "")):
        where = f"sites[{place}]"
        heads = _list(site, "heads", where)
        layer = layer_of(_checked("str", _present(site, "name", where), f"{where}.name"))
        sites.append({**site, "layer": layer, "heads": [_with_judged(head, layer, where) for head in heads]})
    return {**document, "sites": sites}


def _with_judged(head: Any, layer: int | None, where: str) -> Any:
    if not isinstance(head, Mapping):
        return head  # told with its place when the head is loaded
    buckets = [VisibleKeyBucket.from_dict(bucket, where) for bucket in _list(head, "by_visible_keys", where)]
    return {**head, "layer": layer, "judged": any(bucket.rows and bucket.first >= FEWEST_KEYS for bucket in buckets)}


def _parsed(source: str | os.PathLike[str]) -> Any:
    """JSON of a file or a text."""
    if not isinstance(source, str | os.PathLike):
        raise InputError(f"from_json(source) must be JSON text or the path of a file, got {type(source).__name__}.")
    if isinstance(source, str) and source.lstrip("\ufeff \t\r\n").startswith("{"):
        what, text = "this text", source
    else:
        what = f"the file {os.fspath(source)!r}"
        try:
            text = Path(source).read_text("utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"{what} cannot be read: {reason}. Name one that `attemper scan --json` wrote.") from error
    try:
        return json.loads(text.removeprefix("\ufeff"), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{what} is not JSON: {error}.") from error


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON; a missing value is null")


_KINDS = {
    "str": ("text", (str,)),
    "str | None": ("text or null", (str, type(None))),
    "int": ("a whole number", (int,)),
    "int | None": ("a whole number or null", (int, type(None))),
    "float | None": ("a number or null", (int, float, type(None))),
    "bool": ("true or false", (bool,)),
}
"""What may stand in a field, by its annotation."""


def _checked(kind: str, value: Any, where: str) -> Any:
    said, types = _KINDS[kind]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise InputError(f"{where.removeprefix('.')} must be {said}, got {value!r:.60}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{where.removeprefix('.')} must be {said}, got {value!r}: a missing value is null.")
    if isinstance(value, int) and abs(value) > 2**63:
        raise InputError(f"{where.removeprefix('.')} is beyond what a number of a scan can be.")
    return float(value) if "float" in kind and value is not None else value


def _versions(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InputError(f"versions must be an object or null, got {value!r:.60}.")
    return {str(name): _checked("str", of, f"versions.{name}") for name, of in value.items()}


def _present(document: Any, name: str, where: str) -> Any:
    """The value of a field that must be there."""
    if not isinstance(document, Mapping):
        raise InputError(f"{where or 'the document'} must be an object, got {document!r:.60}.")
    if name not in document:
        raise InputError(f"{where or 'the document'} has no {name!r}: it is not what `attemper scan --json` prints.")
    return document[name]


def _list(document: Any, name: str, where: str) -> list[Any]:
    value = _present(document, name, where)
    if not isinstance(value, list | tuple):
        raise InputError(f"{f'{where}.{name}'.removeprefix('.')} must be a list, got {value!r:.60}.")
    return list(value)


def _renamed(document: Any, names: Mapping[str, str]) -> Any:
    if not isinstance(document, Mapping):
        return document
    return {names.get(name, name): value for name, value in document.items()}


def _loaded(record: type[Record], document: Any, where: str, **given: Any) -> Record:
    """``document`` as a record. ``given``: fields that are no plain values. What has a default may be missing."""
    values = dict(given)
    for part in fields(record):  # type: ignore[arg-type]
        if part.name in given or (
            isinstance(document, Mapping) and part.name not in document and part.default is not MISSING
        ):
            continue
        values[part.name] = _checked(str(part.type), _present(document, part.name, where), f"{where}.{part.name}")
    return record(**values)
