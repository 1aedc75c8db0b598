"""Two scans of one architecture, head by head: what has changed, the largest changes first."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attemper._checks import one_of
from attemper.errors import InputError, MissingExtraError
from attemper.monitor.result import Scan
from attemper.records import SCHEMA, Reading

if TYPE_CHECKING:
    import pandas
    from rich.console import Console, ConsoleOptions, RenderResult

STATISTICS = ("normalized_entropy", "effective_tokens", "max_logit", "first_token_mass")
"""What is compared of each head, in the order of columns."""
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

    def change(self, statistic: str) -> float | None:
        """After minus before; None where either is missing."""
        before, after = getattr(self, statistic)
        return None if before is None or after is None else after - before


class Comparison:
    """What changed from one scan to another. ``print(comparison)`` shows a table.

    Attributes:
        before, after: the names of the models.
        heads: a ``HeadChange`` for each head of the sites that both have, the largest change of normalised entropy
            first; then by the other statistics in their order. A head that lost its number, or got one, comes first.
        only_before, only_after: names of sites that the other scan has not.
    """

    def __init__(
        self, before: str, after: str, heads: tuple[HeadChange, ...], only_before: tuple[str, ...],
        only_after: tuple[str, ...],
    ) -> None:  # fmt: skip
        self.before, self.after = before, after
        self.heads, self.only_before, self.only_after = heads, only_before, only_after

    def largest(self, statistic: str, count: int = 10) -> tuple[HeadChange, ...]:
        """The heads in which a statistic changed most, whichever way.

        Raises:
            InputError: the statistic is not one of ``STATISTICS``.
        """
        one_of("largest(statistic)", statistic, STATISTICS)
        return tuple(sorted(self.heads, key=lambda head: _size(head, statistic), reverse=True)[:count])

    def to_dict(self) -> dict[str, Any]:
        """Names of both models, heads with before, after and change of each statistic, and sites without a partner."""
        return {
            "schema": SCHEMA,
            "before": self.before,
            "after": self.after,
            "heads": [_document(head) for head in self.heads],
            "only_before": list(self.only_before),
            "only_after": list(self.only_after),
        }

    def to_json(self, indent: int | None = None) -> str:
        """``to_dict`` as JSON text; a missing number is null."""
        return json.dumps(self.to_dict(), allow_nan=False, ensure_ascii=False, indent=indent)

    def to_pandas(self) -> pandas.DataFrame:
        """A row for each head: site, kind, mode, head, and of each statistic ``_before``, ``_after`` and ``_change``.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise MissingExtraError("Comparison.to_pandas", "pandas", "pandas") from error
        rows = []
        for head in self.heads:
            row: dict[str, Any] = {"site": head.site, "kind": head.kind, "mode": head.mode, "head": head.head}
            for statistic in STATISTICS:
                before, after = getattr(head, statistic)
                row |= {
                    f"{statistic}_before": before,
                    f"{statistic}_after": after,
                    f"{statistic}_change": head.change(statistic),
                }
            rows.append(row)
        return pandas.DataFrame(rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from attemper.monitor.compare_table import table

        yield table(self)

    def __str__(self) -> str:
        from rich.console import Console

        file = io.StringIO()
        Console(file=file, width=120, color_system=None).print(self)
        return file.getvalue().rstrip()

    def __repr__(self) -> str:
        alone = len(self.only_before) + len(self.only_after)
        return f"Comparison({self.before!r} -> {self.after!r}: {len(self.heads)} heads, {alone} sites on one side only)"


def compare(before: Given, after: Given) -> Comparison:
    """What changed between two scans of one architecture: a checkpoint and a later one, a model before and after a fix.

    Sites are matched by name, kind and mode, heads by number. ::

        print(attemper.compare(attemper.scan(old, batches), attemper.scan(new, batches)))

    Args:
        before, after: a ``Scan``, its ``reading``, the document of ``to_dict`` or ``scan --json``, or the path of a
            file that holds it. Compare scans of the same texts: other texts change the numbers, too.

    Returns:
        A :class:`Comparison`; sites that only one has are listed in it.

    Raises:
        InputError: a site has not the same number of heads in both; the two have no site in common; or what is given
            is not a scan.
    """
    first, second = _document_of("before", before), _document_of("after", after)
    sites, others = _sites("before", first), _sites("after", second)
    shared = [key for key in sites if key in others]
    if not shared:
        raise InputError(
            f"compare: the two scans have no site in common. Before: {_names(sites)}. After: {_names(others)}. They "
            "must be of the same architecture, and both in training or both in evaluation."
        )
    heads = [change for key in shared for change in _changes(key, sites[key], others[key])]
    heads.sort(key=lambda head: [_size(head, statistic) for statistic in STATISTICS], reverse=True)
    return Comparison(
        str(first["model"]), str(second["model"]), tuple(heads),
        tuple(key[0] for key in sites if key not in others), tuple(key[0] for key in others if key not in sites),
    )  # fmt: skip


def _document_of(side: str, given: Given) -> Mapping[str, Any]:
    if isinstance(given, Scan | Reading):
        return given.to_dict()
    document: Any = given
    if isinstance(given, str | os.PathLike):
        try:
            document = json.loads(Path(given).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"compare({side}): {os.fspath(given)!r} is no file with a scan in it: {error}.") from error
    if not isinstance(document, Mapping) or not {"schema", "model", "sites"} <= set(document):
        raise InputError(
            f"compare({side}) must be a Scan, its reading, or what `attemper scan --json` prints; got "
            f"{type(document).__name__}."
        )
    if document["schema"] != SCHEMA:
        raise InputError(f"compare({side}): a scan of schema {document['schema']}, and this version reads {SCHEMA}.")
    return document


def _sites(side: str, document: Mapping[str, Any]) -> dict[Key, list[Mapping[str, Any]]]:
    try:
        return {
            (site["name"], site["kind"], site["mode"]): [
                {name: head[name] for name in ("head", *STATISTICS)} for head in site["heads"]
            ]
            for site in document["sites"]
        }
    except (KeyError, TypeError) as error:
        raise InputError(f"compare({side}): its sites are not those of a scan: {error!r}.") from error


def _changes(key: Key, before: list[Mapping[str, Any]], after: list[Mapping[str, Any]]) -> list[HeadChange]:
    others = {head["head"]: head for head in after}
    if {head["head"] for head in before} != set(others):
        raise InputError(
            f"compare: {key[0]} has {len(before)} heads before and {len(after)} after: head by head there is nothing "
            "to compare. The two must be of the same architecture."
        )
    return [
        HeadChange(*key, one["head"], **{name: (one[name], other[name]) for name in STATISTICS})
        for one, other in ((head, others[head["head"]]) for head in before)
    ]


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


def _names(sites: Mapping[Key, Any]) -> str:
    shown = [f"{name} ({mode})" for name, _, mode in list(sites)[:3]]
    return ", ".join(shown) + (", ..." if len(sites) > 3 else "") if shown else "none"
