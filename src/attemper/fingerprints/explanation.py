"""What explains the difference of two runs, as a plain record."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from attemper.fingerprints.advice import AGAIN, advice
from attemper.fingerprints.finding import Finding
from attemper.fingerprints.levels import SiteLevels
from attemper.fingerprints.pair import SitePair
from attemper.text import clean_name, count

HARMLESS = ("none", "rounding", "few_tokens", "equivalent", "too_small")
"""Kinds that are no fault."""
UNKNOWN = ("input", "weights", "values", "scores")
"""Kinds of what differs, where no cause is known."""
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
class Runs:
    """The two runs, as a page shows them.

    Attributes:
        models: their names, a and b.
        sites: how far each site is apart, stage by stage.
        skipped: run, site and reason of what was not read.
    """

    models: tuple[str, str] = ("", "")
    sites: tuple[SiteLevels, ...] = ()
    skipped: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True)
class FirstDifference:
    """Where two runs first differ, and why. Users hold it as :class:`attemper.types.Explanation`, which says what each
    field is.
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
    advice: str = ""
    runs: Runs = field(default=Runs(), repr=False, compare=False)

    @property
    def is_fault(self) -> bool:
        """Whether the difference changes what the model computes."""
        return self.kind not in HARMLESS

    @classmethod
    def plain(cls, kind: str, message: str) -> Self:
        """One without a site."""
        return cls(kind, None, None, "no site", None, None, "high", (), f"{kind}: {message}.", advice(kind, None))

    @classmethod
    def of(cls, pair: SitePair, found: Finding, sites: int | None, of: int, also: tuple[Remark, ...]) -> Self:
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
        said = found.advice or advice(found.kind, found.stage)
        if sites is None and found.kind not in (*HARMLESS, "output"):
            said = AGAIN.format(then=said)
        return cls(
            found.kind, site, found.stage, extent, found.value, residual, _confidence(found), also, message, said
        )  # fmt: skip


def _confidence(found: Finding) -> str:
    if found.kind in HARMLESS or (found.own and found.residual <= 0.05):
        return "high"
    if found.kind in UNKNOWN:
        return "medium"
    return "high" if found.residual <= 0.05 else "medium" if found.residual <= 0.15 else "low"


Explanation = FirstDifference
"""Where pickles of earlier versions look."""
