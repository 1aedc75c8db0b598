"""Two scans of one architecture, head by head: what has changed, the largest changes first."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attemper.checks import one_of
from attemper.errors import InputError, MissingExtraError
from attemper.monitor.result import Scan
from attemper.readings.reading import BY_NAME, Reading, SiteReading
from attemper.readings.schema import SCHEMA

if TYPE_CHECKING:
    import pandas
    from rich.console import Console, ConsoleOptions, RenderResult

ALWAYS = ("normalized_entropy", "effective_tokens", "max_logit", "first_token_mass")
STATISTICS = (*ALWAYS, *BY_NAME)
"""What is compared of each head, in the order of columns; after ``ALWAYS``, what a scan has if it was asked for."""
Given = Scan | Reading | Mapping[str, Any] | str | os.PathLike[str]
Key = tuple[str, str, str]
"""(name, kind, mode): a site in training is not the same in evaluation."""


@dataclass(frozen=True)
class HeadChange:
    """One head in both scans. A statistic is (before, after); None where a scan has no number for it."""

    site: str
    kind: str
    mode: str
    head: int
    normalized_entropy: tuple[float | None, float | None]
    effective_tokens: tuple[float | None, float | None]
    max_logit: tuple[float | None, float | None]
    first_token_mass: tuple[float | None, float | None]
    support_size: tuple[float | None, float | None] = (None, None)
    mean_distance: tuple[float | None, float | None] = (None, None)
    gini: tuple[float | None, float | None] = (None, None)
    entropy_with_sink_nats: tuple[float | None, float | None] = (None, None)
    score_variance: tuple[float | None, float | None] = (None, None)
    layer: int | None = None

    def change(self, statistic: str) -> float | None:
        """After minus before; None where either is missing."""
        before, after = getattr(self, statistic)
        return None if before is None or after is None else after - before


class Comparison:
    """What changed from one scan to another. ``print(comparison)`` shows a table.

    Attributes:
        before, after: the names of the two sides.
        tokens: how many each has read, if that is known. Other texts change the numbers, too.
        heads: a ``HeadChange`` for each head of the sites that both have, the largest change of normalised entropy
            first; then by the other statistics in their order. A head that lost its number, or got one, comes first.
        only_before, only_after: names of sites that the other scan has not.
    """

    def __init__(
        self, before: str, after: str, heads: tuple[HeadChange, ...], only_before: tuple[str, ...],
        only_after: tuple[str, ...], tokens: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        self.before, self.after, self.tokens = before, after, tokens
        self.heads, self.only_before, self.only_after = heads, only_before, only_after

    def largest(self, statistic: str, count: int = 10) -> tuple[HeadChange, ...]:
        """The heads in which a statistic changed most, whichever way.

        Raises:
            InputError: the statistic is not one of ``STATISTICS``.
        """
        one_of("largest(statistic)", statistic, STATISTICS)
        return tuple(sorted(self.heads, key=lambda head: _size(head, statistic), reverse=True)[:count])

    @property
    def statistics(self) -> tuple[str, ...]:
        """Those of ``STATISTICS`` that there is something to show of: four always, the rest if a scan has it."""
        return tuple(
            name
            for name in STATISTICS
            if name in ALWAYS or any(getattr(head, name) != (None, None) for head in self.heads)
        )

    def summary(self, statistic: str = STATISTICS[0]) -> str:
        """One line: how many heads differ, the mean of ``statistic`` on both sides, and where it changed most.

        Raises:
            InputError: the statistic is not one of ``STATISTICS``.
        """
        one_of("summary(statistic)", statistic, STATISTICS)
        return "; ".join(_sentence(self, statistic)) + "."

    def to_dict(self) -> dict[str, Any]:
        """Names of both models, heads with before, after and change of each statistic, and sites without a partner."""
        return {
            "schema": SCHEMA,
            "before": self.before,
            "after": self.after,
            "tokens": None if self.tokens is None else dict(zip(("before", "after"), self.tokens, strict=True)),
            "heads": [_document(head) for head in self.heads],
            "only_before": list(self.only_before),
            "only_after": list(self.only_after),
        }

    def to_json(self, indent: int | None = None) -> str:
        """``to_dict`` as JSON text; a missing number is null."""
        return json.dumps(self.to_dict(), allow_nan=False, ensure_ascii=False, indent=indent)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Writes the page of this comparison: one HTML file that opens offline, with every number exact.

        It is written whole or not at all, and the same comparison gives the same bytes.

        Returns:
            Where the file is, links followed.

        Raises:
            InputError: no file can be written there.
        """
        from attemper.report import write_comparison

        return write_comparison(self.to_dict(), self.summary(), path)

    def to_pandas(self) -> pandas.DataFrame:
        """A row for each head: site, layer, kind, mode, head; of each statistic ``_before``, ``_after``, ``_change``.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise MissingExtraError("Comparison.to_pandas", "pandas", "pandas") from error
        rows = []
        for head in self.heads:
            row: dict[str, Any] = {
                "site": head.site, "layer": head.layer, "kind": head.kind, "mode": head.mode, "head": head.head,
            }  # fmt: skip
            for statistic in STATISTICS:
                before, after = getattr(head, statistic)
                row |= {
                    f"{statistic}_before": before,
                    f"{statistic}_after": after,
                    f"{statistic}_change": head.change(statistic),
                }
            rows.append(row)
        frame = pandas.DataFrame(rows)
        return frame.astype({"layer": "Int64"}) if rows else frame

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from attemper.monitor.compare_table import table

        yield table(self, options.max_width)

    def _repr_html_(self) -> str:
        from attemper.monitor.notebook import comparison_html

        return comparison_html(self, STATISTICS)

    def __str__(self) -> str:
        from rich.console import Console

        file = io.StringIO()
        Console(file=file, width=120, color_system=None).print(self)
        return file.getvalue().rstrip()

    def __repr__(self) -> str:
        alone = len(self.only_before) + len(self.only_after)
        return f"Comparison({self.before!r} -> {self.after!r}: {len(self.heads)} heads, {alone} sites on one side only)"


def compare(before: Given, after: Given, *, names: tuple[str, str] | None = None) -> Comparison:
    """What changed between two scans of one architecture: a checkpoint and a later one, a model before and after a fix.

    Sites are matched by name, kind and mode, heads by number. ::

        print(attemper.compare(attemper.scan(old, batches), attemper.scan(new, batches)))

    Args:
        before, after: a ``Scan``, its ``reading``, the document of ``to_dict``, the JSON of ``scan --json``, or the
            path of a file that holds it. Compare scans of the same texts: other texts change the numbers, too.
        names: what to call the two sides; None for the names of their models.

    Returns:
        A :class:`Comparison`; sites that only one has are listed in it.

    Raises:
        InputError: a site has not the same number of heads in both; the two have no site in common; or what is given
            is not a scan.
    """
    first, second = _reading_of("before", before), _reading_of("after", after)
    sites, others = _sites(first), _sites(second)
    shared = [key for key in sites if key in others]
    if not shared:
        raise InputError(
            f"compare: the two scans have no site in common. Before: {_names(sites)}. After: {_names(others)}. They "
            "must be of the same architecture, and both in training or both in evaluation."
        )
    heads = [change for key in shared for change in _changes(key, sites[key], others[key])]
    heads.sort(key=lambda head: [_size(head, statistic) for statistic in STATISTICS], reverse=True)
    return Comparison(
        *(names or (first.model, second.model)), tuple(heads),
        tuple(key[0] for key in sites if key not in others), tuple(key[0] for key in others if key not in sites),
        (first.tokens, second.tokens),
    )  # fmt: skip


def _reading_of(side: str, given: Given) -> Reading:
    if isinstance(given, Scan | Reading):
        return given.reading if isinstance(given, Scan) else given
    if not isinstance(given, str | os.PathLike | Mapping):
        raise InputError(
            f"compare({side}) must be a Scan, its reading, or what `attemper scan --json` prints; got "
            f"{type(given).__name__}."
        )
    try:
        return Reading.from_dict(given) if isinstance(given, Mapping) else Reading.from_json(given)
    except InputError as error:
        raise InputError(f"compare({side}): {error}") from error


def _sites(reading: Reading) -> dict[Key, SiteReading]:
    return {(site.name, site.kind, site.mode): site for site in reading.sites}


def _changes(key: Key, before: SiteReading, after: SiteReading) -> list[HeadChange]:
    others = {head.head: head for head in after.heads}
    if {head.head for head in before.heads} != set(others):
        raise InputError(
            f"compare: {key[0]} has {len(before.heads)} heads before and {len(after.heads)} after: head by head there "
            "is nothing to compare. The two must be of the same architecture."
        )
    return [
        HeadChange(
            *key, head.head, **{name: (getattr(head, name), getattr(others[head.head], name)) for name in STATISTICS},
            layer=before.layer,
        )
        for head in before.heads
    ]  # fmt: skip


def _size(head: HeadChange, statistic: str) -> float:
    """How much it changed; infinite where a number came or went, 0 where there was none."""
    change = head.change(statistic)
    if change is not None:
        return abs(change)
    before, after = getattr(head, statistic)
    return 0.0 if before is after else float("inf")


def _document(head: HeadChange) -> dict[str, Any]:
    plain = asdict(head)
    for statistic in STATISTICS:
        before, after = getattr(head, statistic)
        plain[statistic] = {"before": before, "after": after, "change": head.change(statistic)}
    return plain


def _names(sites: Mapping[Key, SiteReading]) -> str:
    shown = [f"{name} ({mode})" for name, _, mode in list(sites)[:3]]
    return ", ".join(shown) + (f" and {len(sites) - 3} more" if len(sites) > 3 else "") if shown else "none"


def _sentence(comparison: Comparison, statistic: str) -> Iterator[str]:
    """Its parts: how many differ, the mean, where most, and what it does not cover."""
    heads = comparison.heads
    many = sum(any(_differs(head, name) for name in STATISTICS) for head in heads)
    yield f"{_count(len(heads), 'head')}, {many or 'none'} differ{'' if many > 1 else 's'}"
    both = [head for head in heads if head.change(statistic) is not None]
    if both:
        before, after = (sum(getattr(head, statistic)[side] for head in both) / len(both) for side in (0, 1))
        mean = f"mean {statistic} {before:.4g} -> {after:.4g}"
        most = max(both, key=lambda head: abs(head.change(statistic) or 0.0))
        yield f"{mean}, most in {_largest_change(most, statistic)}" if _differs(most, statistic) else mean
    if lost := sum(_differs(head, statistic) for head in heads if head.change(statistic) is None):
        yield f"{_count(lost, 'head has', 'heads have')} a number on one side only"
    if alone := len(comparison.only_before) + len(comparison.only_after):
        yield f"{_count(alone, 'site is', 'sites are')} on one side only"
    if comparison.tokens is not None and comparison.tokens[0] != comparison.tokens[1]:
        first, second = comparison.tokens
        yield f"the texts differ ({first:,} and {second:,} tokens), which changes numbers, too"


def _differs(head: HeadChange, statistic: str) -> bool:
    before, after = getattr(head, statistic)
    return before != after


def _largest_change(head: HeadChange, statistic: str) -> str:
    before, after = getattr(head, statistic)
    return f"{head.site} head {head.head}: {before:.4g} -> {after:.4g}"


def _count(many: int, one: str, several: str | None = None) -> str:
    return f"{many:,} {one if many == 1 else several or one + 's'}"
