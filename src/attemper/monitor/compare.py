"""``attemper.compare``: what changed between two scans, as a table, a page, a data frame or JSON."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attemper.errors import InputError, MissingExtraError
from attemper.readings.comparison import STATISTICS, Changes
from attemper.readings.reading import Reading

if TYPE_CHECKING:
    import pandas
    from rich.console import Console, ConsoleOptions, RenderResult

    from attemper.monitor.result import Scan


class Comparison(Changes):
    """What changed from one scan to another. ``print(comparison)`` shows a table.

    Attributes:
        before, after: the names of the two sides.
        tokens: how many each has read, if that is known. Other texts change the numbers, too.
        heads: a ``HeadChange`` for each head of the sites that both have, the largest change of normalised entropy
            first; then by the other statistics in their order. A head that lost its number, or got one, comes first.
        only_before, only_after: names of sites that the other scan does not have.
    """

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


def compare(
    before: Scan | Reading | Mapping[str, Any] | str | os.PathLike[str],
    after: Scan | Reading | Mapping[str, Any] | str | os.PathLike[str],
    *,
    names: tuple[str, str] | None = None,
) -> Comparison:
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
    return Comparison.between(_reading_of("before", before), _reading_of("after", after), names)


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
