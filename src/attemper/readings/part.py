"""Readings that merge: sums of every head with what they are of, and the law by which parts become one reading.

Texts are cut by their place in the input: block b holds the texts ``BLOCK * b`` to ``BLOCK * b + BLOCK - 1``, and shard
I of N holds the blocks b with b mod N = I. Sums of a shard are added in the order of its blocks, shards in the order of
their numbers. So the bits of a merged reading follow from the texts and from N, not from who computed what, or when.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Any

from attemper.errors import InputError
from attemper.readings.labels import Modules, joint_label, reasons, runs, uneven
from attemper.readings.limits import AlarmLimits, alarms
from attemper.readings.reading import Reading, Skipped
from attemper.readings.sample import SiteKey, SiteLabel
from attemper.readings.sums import SiteTotals
from attemper.text import clean, clean_name, count

ELSEWHERE = "in other texts"
BLOCK = 64
"""Texts in a block."""
Totals = Mapping[SiteKey, SiteTotals]


@dataclass(frozen=True)
class Shard:
    """Some of the texts, and how much was read of them."""

    label: str
    """``3/64``; of a scan that is no shard, ``#`` and a digest of its sums."""
    index: int | None
    """3 of ``3/64``."""
    tokens: int
    texts: int | None = None
    blocks: int | None = None
    digest: str | None = None
    """Sum of hashes of the sequences, 16 hexadecimal digits; None where token ids were not seen."""

    @property
    def order(self) -> tuple[int, str]:
        return -1 if self.index is None else self.index, self.label


@dataclass(frozen=True, eq=False)
class Segment:
    """Shards whose sums are added up: the first ones of a whole, without a gap, or a single one."""

    shards: tuple[Shard, ...]
    sites: Totals

    def plus(self, other: Segment) -> Segment:
        """The shards of both. ``other`` follows; sites with another number of heads than here stay as they are here."""
        return Segment((*self.shards, *other.shards), add(self.sites, other.sites))

    def is_followed_by(self, other: Segment) -> bool:
        first, last = self.shards[0].index, self.shards[-1].index
        return first == 0 and last is not None and other.shards[0].index == last + 1


@dataclass(frozen=True, eq=False)
class Part:
    """What was read of some shards, as sums that add up."""

    model: str
    """Its name."""
    model_hash: str
    """Of its weights, from a sample of each."""
    law: Mapping[str, Any]
    """What must agree: statistics, spans of keys, ``fewest_keys``, how texts became batches, the input and the number
    of shards.
    """
    limits: Mapping[str, Any]
    """Of alarms, as ``AlarmLimits.to_dict`` has them."""
    segments: tuple[Segment, ...]
    """In the order of their shards."""
    backends: tuple[str, ...]
    computed_on: tuple[str, ...]
    """Processors, threads and versions of torch: what the last bits depend on."""
    skipped: tuple[Skipped, ...] = ()
    dropped: Mapping[SiteKey, str] = field(default_factory=dict)
    """Sites whose numbers cannot be trusted, and why."""
    text: str | None = None
    date: str | None = None
    dtype: str | None = None
    revision: str | None = None
    versions: Mapping[str, str] | None = None

    @property
    def shards(self) -> tuple[Shard, ...]:
        return tuple(shard for segment in self.segments for shard in segment.shards)

    @property
    def of(self) -> int | None:
        """How many shards the whole has; None where it was not cut."""
        return self.law.get("shards")

    @property
    def missing(self) -> tuple[str, ...]:
        here = {shard.index for shard in self.shards}
        return tuple(f"{index}/{self.of}" for index in range(self.of or 0) if index not in here)

    @cached_property
    def sites(self) -> tuple[SiteTotals, ...]:
        """The sums of all shards, in the order of the model."""
        total: Totals = {}
        for segment in self.segments:
            total = add(total, segment.sites)
        found = (site for key, site in total.items() if key not in self.dropped)
        return tuple(sorted(found, key=lambda site: site.order))

    def reading(self) -> Reading:
        """Means over all rows, and the alarms that they raise."""
        fewest_keys = int(self.law["fewest_keys"])
        sites = tuple(site.reading(fewest_keys) for site in self.sites)
        measured = {site.name for site in sites}
        reasons = {skip.name: skip.reason for skip in self.skipped} | {key[0]: why for key, why in self.dropped.items()}
        return Reading(
            self.model,
            sum(shard.tokens for shard in self.shards),
            ", ".join(self.backends),
            sites,
            tuple(Skipped(name, why) for name, why in reasons.items() if name not in measured),
            alarms(sites, AlarmLimits.of(self.limits), fewest_keys),
            fewest_keys=fewest_keys,
            text=self.text,
            date=self.date,
            dtype=self.dtype,
            revision=self.revision,
            versions=self.versions,
            missing_shards=label_list(self.missing) or None,
            computed_on="; ".join(self.computed_on) if len(self.computed_on) > 1 else None,
            text_digest=_joint_digest(self.shards),
        )


def _joint_digest(shards: Sequence[Shard]) -> str | None:
    if any(shard.digest is None for shard in shards):
        return None
    return f"{sum(int(shard.digest or '', 16) for shard in shards) % 2**64:016x}"


def add(one: Totals, two: Totals) -> Totals:
    """Sums of both; of a site with another number of heads in ``two`` those of ``one``: see ``conflicts``."""
    both = dict(one)
    for key, site in two.items():
        if key not in both:
            both[key] = site
        elif both[key].label.head_numbers == site.label.head_numbers:
            both[key] = both[key].plus(site)
    return both


def level(parts: Sequence[Totals]) -> tuple[list[Totals], Modules, dict[SiteKey, str]]:
    """The parts with one site for all calls of modules that ran another number of times in some of them, these modules,
    and the sites that cannot be shown, with the reason.
    """
    modules, dropped = uneven([site.label for site in part.values()] for part in parts), {}
    found: list[Totals] = [] if modules else list(parts)
    for part in parts if modules else ():
        calls = [replace(site.without_spread(), label=joint_label(site.label, modules)) for site in part.values()]
        each: list[Totals] = [{site.key: site} for site in calls]
        dropped |= conflicts(each)
        found.append(reduce(add, each, {}))
    return found, modules, dropped | conflicts(found)


def conflicts(parts: Iterable[Totals]) -> dict[SiteKey, str]:
    """Sites whose heads are not the same everywhere, and the reason not to show them."""
    heads: dict[SiteKey, range] = {}
    found = {}
    for sites in parts:
        for key, site in sites.items():
            here = site.label.head_numbers
            before = heads.setdefault(key, here)
            if len(before) != len(here):
                found[key] = changed_heads(min(len(before), len(here)), max(len(before), len(here)))
            elif before != here:
                found[key] = "its parts have different heads of it: of a tensor-parallel model merge one rank's parts"
    return found


def changed_heads(one: int, two: int) -> str:
    """Why a site that had one number of heads and then another is not shown."""
    return f"its number of heads changed from {one} to {two}: its queries are not [batch, heads, ...]"


def digest_label(sites: Totals) -> str:
    """A label for a scan that is no shard, from its sums: the same scan again has the same label."""
    digest = hashlib.blake2b(digest_size=6)
    for key, site in sites.items():
        digest.update(repr(key).encode())
        digest.update(site.sums.tobytes())
    return f"#{digest.hexdigest()}"


def check_shard(shard: Any) -> tuple[int, int]:
    whole = isinstance(shard, tuple | list) and len(shard) == 2 and all(type(number) is int for number in shard)
    if not whole or not 0 <= shard[0] < shard[1]:
        raise InputError(f"scan(shard=...) must be (I, N), I of N shards, with I from 0 to N - 1; got {shard!r:.60}.")
    return shard[0], shard[1]


def merge(parts: Sequence[Part]) -> Part:
    """One part of all shards, the same whatever the order of ``parts``."""
    parts = sorted(parts, key=lambda part: part.segments[0].shards[0].order)
    first = parts[0]
    # Of several ranks of one model weights differ as those of two models do: that is told first.
    _check_labels((segment for part in parts for segment in part.segments), "first_head")
    for other in parts[1:]:
        _check_alike(first, other)
    _check_overlap(parts)
    segments = sorted((one for part in parts for one in part.segments), key=lambda one: one.shards[0].order)
    _check_labels(segments, "normalizer")
    leveled, modules, more = level([segment.sites for segment in segments])
    segments = [replace(segment, sites=sites) for segment, sites in zip(segments, leveled, strict=True)]
    dropped = {key: why for part in parts for key, why in part.dropped.items()} | more
    # The reason of the first part that has one of its own.
    skipped = {skip.name: skip.reason for part in reversed(parts) for skip in part.skipped}
    skipped = reasons(modules, ELSEWHERE) | skipped
    whole = [segments[0]]
    for segment in segments[1:]:
        if whole[-1].is_followed_by(segment):
            whole[-1] = whole[-1].plus(segment)
        else:
            whole.append(segment)
    return replace(
        first,
        segments=tuple(whole),
        backends=_union(part.backends for part in parts),
        computed_on=_union(part.computed_on for part in parts),
        skipped=tuple(Skipped(name, skipped[name]) for name in sorted(skipped)),
        dropped=dict(sorted(dropped.items())),
        text=", ".join(dict.fromkeys(part.text for part in parts if part.text)) or None,
        date=max((part.date for part in parts if part.date), default=None),
        versions=_versions(parts),
    )


def _union(names: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(sorted({name for several in names for name in several}))


def _versions(parts: Sequence[Part]) -> dict[str, str] | None:
    """Versions by package; where parts differ, all of them."""
    found: dict[str, set[str]] = {}
    for part in parts:
        for name, version in (part.versions or {}).items():
            found.setdefault(name, set()).update(version.split(", "))
    return {name: ", ".join(sorted(several)) for name, several in found.items()} or None


def _check_alike(one: Part, other: Part) -> None:
    """Raises InputError if two parts are not of one whole."""
    shards = f"{_labels(one)} and {_labels(other)}"
    if one.model_hash != other.model_hash:
        names = f"{clean_name(one.model)} and {clean_name(other.model)}"
        same = " (same name, other weights)" if one.model == other.model else ""
        raise InputError(f"shards {shards} are of different models, {names}{same}: only readings of one model merge.")
    for name in dict.fromkeys((*one.law, *other.law)):
        mine, theirs = one.law.get(name), other.law.get(name)
        if mine != theirs:
            what = _LAWS.get(name, name)
            raise InputError(
                f"shards {shards} differ in {what}: {_words(mine)} and {_words(theirs)}. Their sums are of other "
                "things and do not add up; scan one of them again with the arguments of the other."
            )


def _words(value: Any) -> str:
    return "none" if value is None else clean(value)[:80]


_LAWS = {
    "input": "the texts that were cut into shards (digests of the whole input)",
    "shards": "the number of shards",
    "spans": "the spans of keys that span_mass sums",
    "stats": "the statistics",
    "tokenizer": "the tokenizer (digests of its vocabulary and of what it makes of a sample)",
}
"""How a difference of a law is told, where its name says too little."""


def _check_overlap(parts: Sequence[Part]) -> None:
    seen: set[str] = set()
    for part in parts:
        for shard in part.shards:
            if shard.label in seen:
                raise InputError(
                    f"shard {clean_name(shard.label)} is there twice: its texts would count double. Leave one out."
                )
            seen.add(shard.label)


_DIFFERENCES = {
    "first_head": "begins with head {} in one part and with head {} in another: they are of ranks that split a model "
    "by heads, and parts split texts. Merge those of one rank; attemper.watch(model, store=...) on all ranks keeps a "
    "run that shows all heads.",
    "normalizer": "has weights of {} in one part and of {} in another: their means do not add up.",
}
"""What is said of a site whose label differs in this from part to part."""


def _check_labels(segments: Iterable[Segment], name: str) -> None:
    """Raises InputError if the label of a site is another in some part, in one of ``_DIFFERENCES``."""
    labels: dict[SiteKey, SiteLabel] = {}
    for label in (site.label for segment in segments for site in segment.sites.values()):
        one, two = (getattr(each, name) for each in (labels.setdefault(label.key, label), label))
        if one != two:
            raise InputError(f"site {clean_name(label.name)} {_DIFFERENCES[name].format(one, two)}")


def _labels(part: Part) -> str:
    return clean_name(label_list([shard.label for shard in part.shards]))


def label_list(labels: Sequence[str]) -> str:
    """Labels of shards in a line, ``0/64 to 62/64, 17/64``: neighbours as a range, and not too many."""
    told = [run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs(labels)]
    rest = len(told) - 12
    return ", ".join(told[:12]) + (f" and {count(rest, 'other')}" if rest > 0 else "")
