"""What explains the difference of two runs, as a record that prints, and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from attemper.checks import indentation
from attemper.fingerprints.finding import Finding
from attemper.fingerprints.pair import SitePair
from attemper.text import clean_name, count

HARMLESS = ("none", "rounding", "few_tokens", "equivalent", "too_small")
"""Kinds that are no fault."""
TRANSFORMS = ("rescaled", "rotated", "centred", "folded", "permuted", "repeated", "shifted", "rounded")
"""Kinds of remarks: how other weights make the same function."""


@dataclass(frozen=True)
class Remark:
    """Something else that the runs show."""

    kind: str
    site: str
    stage: str
    value: float | None
    message: str


@dataclass(frozen=True)
class Explanation:
    """Where two runs first differ, and why.

    Attributes:
        kind: "none", "rounding", "few_tokens", "equivalent", "too_small", "input", "scale", "softcap", "logn",
            "key_shift", "distance_bias", "window", "causality", "padding", "sink", "rotary", "swapped", "not_loaded",
            "transposed", "order_of_layers", "documents",
            "head_order", "grouping", "key_rounding", "bias", "weights", "values" or "scores" (which differ, by no rule
            that is known), "output" (what is behind the last attention).
        site: name in run a of the first site that differs; None where none does.
        stage: "residual", "input", "q and k", "visible keys", "final score", "kept mass", "head output" or
            "model output".
        extent: how many sites show it, and which heads where not all do. Where only what both runs have tells it, as
            in queries and keys, later sites differ already by what enters them: "from site 3 of 12 on".
        value: its number: factor, cap, length, base, bits; None where there is none.
        residual: what the cause leaves of the squared difference, 0 to 1.
        confidence: "high", "medium" or "low".
        also: other findings, and how other weights make the same function: "rescaled", "rotated", "centred", "folded",
            "permuted", "repeated", "shifted", "rounded".
        message: all of it in words.
    """

    kind: str
    site: str | None
    stage: str | None
    extent: str
    value: float | None
    residual: float | None
    confidence: str
    also: tuple[Remark, ...]
    message: str

    @property
    def is_fault(self) -> bool:
        """Whether the difference changes what the model computes."""
        return self.kind not in HARMLESS

    @classmethod
    def plain(cls, kind: str, message: str) -> Explanation:
        """One without a site."""
        return cls(kind, None, None, "no site", None, None, "high", (), f"{kind}: {message}.")

    @classmethod
    def of(cls, pair: SitePair, found: Finding, sites: int | None, of: int, also: tuple[Remark, ...]) -> Explanation:
        """Of a finding at ``sites`` of so many sites; None: at the first, and what later ones have of their own cannot
        be told.
        """
        site = clean_name(pair.a.name)
        extent = f"from site {pair.number + 1} of {of} on" if sites is None else f"{sites} of {count(of, 'site')}"
        if sites == of > 1:
            extent = "all sites"
        if found.heads is not None:
            extent += f", heads {', '.join(map(str, found.heads))} of {pair.a.heads}"
        where = f"at {site}, {found.stage}"
        more = "".join(f" Also {one.kind} at {one.site}: {one.message}." for one in also)
        message = f"{found.kind} {where} ({extent}): {found.message}.{more}"
        residual = round(float(found.residual), 6)
        return cls(
            found.kind, site, found.stage, extent, found.value, residual, _confidence(found), also, message
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Its fields, for JSON."""
        return asdict(self)

    def to_json(self, indent: int | None = 2) -> str:
        """One JSON document."""
        return json.dumps(self.to_dict(), allow_nan=False, ensure_ascii=False, indent=indentation(indent, "found"))

    def __str__(self) -> str:
        return self.message


def _confidence(found: Finding) -> str:
    if found.kind in HARMLESS or (found.own and found.residual <= 0.05):
        return "high"
    if found.kind in ("weights", "scores", "input", "values"):
        return "medium"
    return "high" if found.residual <= 0.05 else "medium" if found.residual <= 0.15 else "low"
