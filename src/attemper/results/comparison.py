"""What changed between two scans of one architecture, head by head."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from attemper.checks import indentation, one_of
from attemper.errors import InputError, needs
from attemper.files import write_whole
from attemper.readings.labels import apart, first_call
from attemper.readings.reading import SCHEMA, Reading, SiteReading
from attemper.readings.sample import SiteKey
from attemper.statistics import COUNTED, SHOWN, SHOWN_BY_NAME
from attemper.text import clean, columns_that_fit, count, counts, decimals, first_of, plain_table, plain_text

if TYPE_CHECKING:
    import pandas
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table
    from rich.text import Text

    from attemper.results.floor import Floor


ALWAYS = tuple(name for name, shown in SHOWN.items() if shown.brief)
STATISTICS = (*ALWAYS, *sorted(SHOWN_BY_NAME, key=COUNTED.__contains__))  # what was asked for has room first
"""What is compared of each head, in the order of columns; after ``ALWAYS``, what a scan has if it was asked for."""
MOST_HEADS = 20
"""Heads in a table that is not told how many."""
Pair = tuple[float | None, float | None]
"""(before, after); None where a reading has no number."""


@dataclass(frozen=True, repr=False)
class HeadChange:
    """One head in both readings. Each of ``STATISTICS`` is an attribute: the pair (before, after)."""

    site: str
    kind: str
    mode: str
    head: int
    layer: int | None
    pairs: Mapping[str, Pair]
    """By statistic, all of ``STATISTICS``."""
    floors: Mapping[str, float | None] = field(default_factory=dict, hash=False)
    """By statistic, how far rounding, sampled rows and other texts alone may move it; None where that is not known."""

    def __getattr__(self, name: str) -> Pair:
        # Only names that are no field arrive here. A copy that is being made has no ``pairs`` yet.
        if name in self.__dict__.get("pairs", {}):
            return self.pairs[name]
        raise AttributeError(f"HeadChange has no attribute {name!r}. Statistics here: {', '.join(STATISTICS)}.")

    def __repr__(self) -> str:
        parts = {"site": self.site, "kind": self.kind, "mode": self.mode, "head": self.head, **self.pairs}
        told = ", ".join(f"{name}={value!r}" for name, value in parts.items())
        return f"HeadChange({told}, layer={self.layer!r})"

    def change(self, statistic: str) -> float | None:
        """After minus before; None where either is missing."""
        before, after = self.pairs[statistic]
        return None if before is None or after is None else after - before

    def size(self, statistic: str) -> float:
        """How much it changed; infinite where a number came or went, 0 where there was none."""
        change = self.change(statistic)
        if change is not None:
            return abs(change)
        return float("inf") if self.differs(statistic) else 0.0

    def differs(self, statistic: str) -> bool:
        before, after = self.pairs[statistic]
        return before != after

    def is_beyond(self, statistic: str) -> bool | None:
        """Whether it changed by more than its floor, or a number came or went; None where the floor is not known."""
        floor = self.floors.get(statistic)
        return None if floor is None else self.size(statistic) > floor

    def to_dict(self) -> dict[str, Any]:
        place = {"site": self.site, "kind": self.kind, "mode": self.mode, "head": self.head}
        pairs = {
            name: {"before": before, "after": after, "change": self.change(name), "floor": self.floors.get(name)}
            for name, (before, after) in self.pairs.items()
        }
        return {**place, **pairs, "layer": self.layer}


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """The changes from one scan to another. ``print(comparison)`` shows a table.

    Attributes:
        before, after: the names of the two sides.
        tokens: how many each has read, if that is known. Other texts change the numbers, too.
        heads: a ``HeadChange`` for each head of the sites that both have, the largest change of normalised entropy
            first; then by the other statistics in their order. A head that lost its number, or got one, comes first.
        only_before, only_after: names of sites that the other scan does not have.
        means: names of sites that are the mean over all calls of a module in one scan and its first call in the other:
            they are not compared, and no site of these calls is among the others.
    """

    before: str
    after: str
    heads: tuple[HeadChange, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    tokens: tuple[int, int] | None = None
    runs: tuple[Any, Any] | None = None
    """The two runs, where runs were compared: the page shows their histories, and reads them then."""
    means: tuple[str, ...] = ()
    sides: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None
    """Of each side what its numbers depend on: name, dtype, text, text_digest, date, tokens, sampled_rows."""
    texts: str = "unknown"
    """Whether both have read the same text: "same", "other" or "unknown"."""

    @classmethod
    def between(cls, before: Reading, after: Reading, names: tuple[str, str] | None = None) -> Self:
        """What changed from one reading to another.

        Args:
            before: the earlier one.
            after: the later one, of the same architecture.
            names: what to call the two sides; None for the names of their models.

        Raises:
            InputError: a site has not the same number of heads in both, or the two have no site in common.
        """
        from attemper.results.floor import Floor, facts_of

        sites, others = _sites(before), _sites(after)
        shared = [key for key in sites if key in others]
        if not shared:
            raise InputError(
                f"compare: the two scans have no site in common. Before: {_names(sites)}. After: {_names(others)}. "
                f"{_why_apart(sites, others)}"
            )
        means = (_means(sites, others) | _means(others, sites)) & set(shared)
        keys = [key for key in shared if key not in means]
        floor = Floor(before, after, len(ALWAYS) * sum(len(sites[key].heads) for key in keys))
        heads = [one for place, key in enumerate(keys) for one in _changes(key, sites[key], others[key], floor, place)]
        heads.sort(key=lambda head: [head.size(statistic) for statistic in STATISTICS], reverse=True)
        first, second = names or (before.model, after.model)
        only_before, only_after = (
            tuple(key[0] for key in one if key not in other and first_call(*key) not in means)
            for one, other in ((sites, others), (others, sites))
        )
        told = tuple(key[0] for key in shared if key in means)
        tokens, sides = (before.tokens, after.tokens), (facts_of(before, first), facts_of(after, second))
        return cls(
            *(first, second, tuple(heads), only_before, only_after, tokens), means=told, sides=sides, texts=floor.texts
        )

    @property
    def judged(self) -> tuple[HeadChange, ...]:
        """The heads with a known floor."""
        return tuple(head for head in self.heads if any(floor is not None for floor in head.floors.values()))

    @property
    def beyond(self) -> tuple[HeadChange, ...]:
        """The heads that differ beyond their floor in any statistic."""
        return tuple(head for head in self.judged if any(map(head.is_beyond, head.floors)))

    def largest(self, statistic: str, count: int = 10) -> tuple[HeadChange, ...]:
        """The heads in which a statistic changed most, up or down.

        Raises:
            InputError: the statistic is not one of ``STATISTICS``.
        """
        one_of("largest(statistic)", statistic, STATISTICS)
        return tuple(sorted(self.heads, key=lambda head: head.size(statistic), reverse=True)[:count])

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the statistics to show: four always, the others if a scan has them."""
        known = {name for head in self.heads for name, pair in head.pairs.items() if pair != (None, None)}
        return tuple(name for name in STATISTICS if name in ALWAYS or name in known)

    def summary(self, statistic: str = STATISTICS[0]) -> str:
        """One line: how many heads differ beyond their floors, the mean of ``statistic`` on both sides, where it
        changed most, and what is not known.

        Raises:
            InputError: the statistic is not one of ``STATISTICS``.
        """
        one_of("summary(statistic)", statistic, STATISTICS)
        from attemper.report.comparison import summary
        from attemper.report.texts import say

        return say(summary(self, statistic)).replace("→", "->")

    def to_dict(self) -> dict[str, Any]:
        """Names of both models, heads with before, after and change of each statistic, and sites without a partner."""
        return {
            "schema": SCHEMA,
            "before": self.before,
            "after": self.after,
            "tokens": None if self.tokens is None else dict(zip(("before", "after"), self.tokens, strict=True)),
            "sides": None if self.sides is None else dict(zip(("before", "after"), map(dict, self.sides), strict=True)),
            "texts": self.texts,
            "judged": len(self.judged),
            "beyond": len(self.beyond),
            "heads": [head.to_dict() for head in self.heads],
            "only_before": list(self.only_before),
            "only_after": list(self.only_after),
            **({"means": list(self.means)} if self.means else {}),
        }

    def to_json(self, indent: int | None = None) -> str:
        """``to_dict`` as JSON text; a missing number is null."""
        return json.dumps(self.to_dict(), allow_nan=False, ensure_ascii=False, indent=indentation(indent, "found"))

    def to_html(
        self, path: str | os.PathLike[str], *, patterns: tuple[Sequence[Any], Sequence[Any]] = ((), ())
    ) -> Path:
        """Writes this comparison as one HTML page that opens offline, with exact numbers.

        It is written whole or not at all, and the same comparison gives the same bytes.

        Args:
            patterns: heads whose weights on one text the page shows side by side, before and after, as
                :func:`attemper.pattern` gives them for each model: at most 6 that both sides have, of the first 128
                tokens each. The page then holds these tokens, and says so; else it holds no text.

        Returns:
            Where the file is, links followed.

        Raises:
            InputError: no file can be written there.
        """
        from attemper.report.comparison import comparison_page

        return write_whole(path, comparison_page(self, patterns))

    def to_pandas(self) -> pandas.DataFrame:
        """A row for each head: site, layer, kind, mode, head; of each statistic ``_before``, ``_after``, ``_change``.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        with needs("Comparison.to_pandas", "pandas", "pandas"):
            import pandas
        rows = []
        for head in self.heads:
            row: dict[str, Any] = {name: getattr(head, name) for name in ("site", "layer", "kind", "mode", "head")}
            for statistic, (before, after) in head.pairs.items():
                row |= {
                    f"{statistic}_before": before,
                    f"{statistic}_after": after,
                    f"{statistic}_change": head.change(statistic),
                }
            rows.append(row)
        frame = pandas.DataFrame(rows)
        return frame.astype({"layer": "Int64"}) if rows else frame

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield table(self, options.max_width)

    def _repr_html_(self) -> str:
        from attemper.report.notebook import comparison_html

        return comparison_html(self, STATISTICS)

    def __str__(self) -> str:
        return plain_text(self)

    def __repr__(self) -> str:
        alone = len(self.only_before) + len(self.only_after)
        size = counts(head=len(self.heads), site=alone)
        return f"Comparison({self.before!r} -> {self.after!r}: {size} on one side only)"


class HasReading(Protocol):
    """A scan, or a run with its last sample."""

    @property
    def reading(self) -> Reading: ...


def compare_readings(before: Any, after: Any, *, names: tuple[str, str] | None = None) -> Comparison:
    """What changed between two readings, or what has one, as :func:`attemper.compare` takes them."""
    found = Comparison.between(_reading_of("before", before), _reading_of("after", after), names)
    are_runs = all(hasattr(one, "history") for one in (before, after))
    return replace(found, runs=(before, after)) if are_runs else found


def _reading_of(side: str, given: Any) -> Reading:
    reading = getattr(given, "reading", given)
    if isinstance(reading, Reading):
        return reading
    if not isinstance(given, str | os.PathLike | Mapping):
        raise InputError(
            f"compare({side}) must be a Scan, its reading, or what `attemper scan --json` prints; got "
            f"{type(given).__name__}."
        )
    try:
        return Reading.from_dict(given) if isinstance(given, Mapping) else Reading.from_json(given)
    except InputError as error:
        raise InputError(f"compare({side}): {error}") from error


def _sites(reading: Reading) -> dict[SiteKey, SiteReading]:
    return {site.key: site for site in reading.sites}


def _changes(key: SiteKey, before: SiteReading, after: SiteReading, floor: Floor, place: int) -> Iterator[HeadChange]:
    others = {head.head: head for head in after.heads}
    if {head.head for head in before.heads} != set(others):
        raise InputError(
            f"compare: {key[0]} has {count(len(before.heads), 'head')} before and {len(after.heads)} after: head by "
            "head there is nothing to compare. The two must be of the same architecture."
        )
    for head in before.heads:
        other = others[head.head]
        pairs = {name: (getattr(head, name), getattr(other, name)) for name in STATISTICS}
        floors = floor.limits(place, before, head, other, STATISTICS)
        yield HeadChange(*key, head.head, before.layer, pairs, floors)


def _means(sites: Mapping[SiteKey, SiteReading], others: Mapping[SiteKey, SiteReading]) -> set[SiteKey]:
    """Sites of modules each of whose calls is a site here, and none but the first there."""
    return apart(sites.values()) - {first_call(*key) for key in others if first_call(*key) != key}


def _why_apart(sites: Mapping[SiteKey, SiteReading], others: Mapping[SiteKey, SiteReading]) -> str:
    """What two readings without a common site may have in common, and what to do."""
    modes = [{mode for _, _, mode in one} for one in (sites, others)]
    if {key[:2] for key in sites} & {key[:2] for key in others}:
        before, after = (" and ".join(sorted(one)) for one in modes)
        return (
            f"The sites are the same, but before is in mode {before} and after in mode {after}. Compare two of one "
            "mode: attemper.scan measures in the mode of the model, so call model.train() or model.eval() before it."
        )
    for where, inner, outer in (("After", sites, others), ("Before", others, sites)):
        names = {name for name, _, _ in outer}
        shortest = min((name for name, _, _ in inner), key=len, default="")
        prefixes = {name.removesuffix(shortest) for name in names if name.endswith(f".{shortest}")}
        for prefix in sorted(prefixes):
            if all(prefix + name in names for name, _, _ in inner):
                return (
                    f"{where} has the same names behind {prefix!r}: it is of a model that holds the other. Scan "
                    f"the same part of both, such as attemper.scan(model.{prefix.rstrip('.')}, batches)."
                )
    return "They must be of the same architecture, and both in training or both in evaluation."


def _names(sites: Mapping[SiteKey, SiteReading]) -> str:
    return first_of([f"{name} ({mode})" for name, _, mode in sites], 3) or "none"


def table(comparison: Comparison, width: int, *, statistic: str | None = None, top: int = MOST_HEADS) -> RenderableType:
    """A line on everything, the ``top`` heads that changed most, and the sites that only one of the two has.

    Args:
        width: of the terminal. Columns that have no room are left out, and named; ``--json`` has them.
        statistic: by whose change the heads are in order; None for that of ``comparison.heads``.
    """
    from rich.console import Group
    from rich.text import Text

    from attemper.report.comparison import side_lines
    from attemper.report.texts import say

    heads = comparison.heads if statistic is None else comparison.largest(statistic, len(comparison.heads))
    first = statistic or comparison.statistics[0]
    names = Text.assemble((clean(comparison.before), "bold"), " -> ", (clean(comparison.after), "bold"))
    sides = [Text(clean(line), style="dim") for line in map(say, side_lines(comparison))]
    parts: list[RenderableType] = [names, *sides, Text(clean(comparison.summary(first))), Text("")]
    if statistic is None and not any(_stands_out(head) for head in heads):
        heads = ()  # their differences are rounding, or that of the texts: the line above says so
    grid, left_out = _grid(comparison, heads[:top], first, width)
    parts += [grid] if heads else []
    if heads and left_out:
        parts.append(Text(f"no room for: {', '.join(left_out)} (--json has all)", style="dim"))
    if len(heads) > top:
        parts.append(Text(f"and {count(len(heads) - top, 'head')} that changed less", style="dim"))
    for side, sites in (("before", comparison.only_before), ("after", comparison.only_after)):
        parts += [Text.assemble((f"only {side} ", "yellow"), clean(site)) for site in sites]
    return Group(*parts)


def _stands_out(head: HeadChange) -> bool:
    """Whether a statistic of a head changed beyond its floor, or changed and has none."""
    return any(head.is_beyond(name) is not False and (head.size(name) != 0) for name in head.pairs)


def _grid(comparison: Comparison, heads: tuple[HeadChange, ...], first: str, width: int) -> tuple[Table, list[str]]:
    """The table, and the titles of columns that have no room in it."""
    from rich.text import Text

    modes = {head.mode for head in heads}
    sites = [f"{clean(head.site)} ({clean(head.mode)})" if len(modes) > 1 else clean(head.site) for head in heads]
    title = f"{'points' if SHOWN[first].percent else 'change'} (floor)"
    columns: dict[str, list[str]] = {"change": [title, *(_change(head, first) for head in heads)]}
    for name in dict.fromkeys((first, *comparison.statistics)):
        columns[name] = [SHOWN[name].compared or SHOWN[name].column, *(_pair(head, name) for head in heads)]
    order = {first: columns[first], **columns}
    room, longest = width - len("  layer  head  "), max(map(len, sites), default=4)
    fitting = columns_that_fit(order, room - min(longest, width // 3))
    if "change" not in fitting:  # names of sites fold further, and the change comes before its statistic
        roomy = columns_that_fit({"change": columns["change"], **order}, room - min(longest, width // 5))
        fitting = [name for name in (first, "change") if name in roomy]
    grid = plain_table(("site",), ("layer", "head", *(columns[name][0] for name in fitting)))
    for row, (site, head) in enumerate(zip(sites, heads, strict=True), 1):
        layer = "-" if head.layer is None else str(head.layer)
        grid.add_row(Text(site), layer, str(head.head), *(_dim(columns[name][row]) for name in fitting))
    return grid, [columns[name][0] for name in order if name not in fitting]


def _pair(head: HeadChange, statistic: str) -> str:
    """``before -> after``, one digit behind the point."""
    scale = SHOWN[statistic].scale
    before, after = (decimals(None if value is None else value * scale, 1) for value in head.pairs[statistic])
    return f"{before} -> {after}"


def _change(head: HeadChange, statistic: str) -> str:
    """With three digits, so that a small one is not taken for none; behind it its floor, where that is known."""
    change, floor, scale = head.change(statistic), head.floors.get(statistic), SHOWN[statistic].scale
    if change is None:
        return "-"
    return (f"{change * scale:+.3g}" if change else "0") + ("" if floor is None else f" ({floor * scale:.2g})")


def _dim(cell: str) -> Text:
    """Darker where nothing changed."""
    from rich.text import Text

    before, arrow, after = cell.partition(" -> ")
    return Text(cell, style="dim" if cell.partition(" ")[0] == "0" or (arrow and before == after) else "")
