"""What a scan found, as frozen records of plain numbers: no tensors, no torch. A missing value is None, never NaN."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = 1
SEVERITIES = ("notice", "warning", "critical")


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
        }


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

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "mode": self.mode,
            "queries": self.queries,
            "keys": self.keys,
            "heads": [head.to_dict() for head in self.heads],
            # The document of softmax is what it was before there was anything else.
            **({} if self.normalizer == "softmax" else {"normalizer": self.normalizer}),
        }


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

    def to_dict(self) -> dict[str, Any]:
        """The document of ``attemper scan --json``."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "tokens": self.tokens,
            "backend": self.backend,
            "sampled_rows": self.sampled_rows,
            "sites": [site.to_dict() for site in self.sites],
            "skipped": [asdict(skipped) for skipped in self.skipped],
            "alarms": [asdict(alarm) for alarm in self.alarms],
        }

    def to_json(self, indent: int | None = None) -> str:
        """``to_dict`` as JSON text. Strict: a NaN here would be a bug and raises."""
        return json.dumps(self.to_dict(), allow_nan=False, ensure_ascii=False, indent=indent)


def number(value: float) -> float | None:
    """A float, or None where there is none (NaN) or JSON has no word for it (infinite)."""
    return float(value) if math.isfinite(value) else None
