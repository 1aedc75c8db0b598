"""The result of a scan as an object: readings, tables, JSON."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attemper.errors import InputError, MissingExtraError
from attemper.functional.accumulated import Accumulated
from attemper.functional.stats import AttentionStats
from attemper.records import Alarm, Reading, SiteReading, Skipped

if TYPE_CHECKING:
    import pandas
    from rich.console import Console, ConsoleOptions, RenderResult


class Scan:
    """What a scan found. ``print(scan)`` shows a table; in a terminal ``rich.print(scan)`` colours it.

    Attributes:
        reading: everything, as one frozen record.
    """

    def __init__(self, reading: Reading, last: Mapping[str, AttentionStats | Accumulated]) -> None:
        self.reading = reading
        self._last = last

    @property
    def model(self) -> str:
        return self.reading.model

    @property
    def tokens(self) -> int:
        """Real tokens read: query rows of the first site, padding left out."""
        return self.reading.tokens

    @property
    def backend(self) -> str:
        """What computed the statistics; several names, joined by commas, where sites differ."""
        return self.reading.backend

    @property
    def sites(self) -> tuple[SiteReading, ...]:
        return self.reading.sites

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        return self.reading.skipped

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        return self.reading.alarms

    def to_dict(self) -> dict[str, Any]:
        """The document of ``attemper scan --json``, schema 1."""
        return self.reading.to_dict()

    def to_json(self, indent: int | None = None) -> str:
        """The document of ``attemper scan --json`` as text."""
        return self.reading.to_json(indent)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Writes the page of this scan: one HTML file of at most 2 MB that opens offline, for people.

        It is written whole or not at all, and the same scan gives the same bytes.

        Returns:
            Where the file is, links followed.

        Raises:
            InputError: no file can be written there.
        """
        from attemper.report import write

        return write(self.reading, path)

    def to_pandas(self) -> pandas.DataFrame:
        """One row per head: site, kind, mode, and every number of ``HeadReading``.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise MissingExtraError("Scan.to_pandas", "pandas", "pandas") from error
        left_out = ("normalized_entropy_histogram", "by_visible_keys")
        return pandas.DataFrame(
            {"site": site.name, "kind": site.kind, "mode": site.mode}
            | {name: value for name, value in head.to_dict().items() if name not in left_out}
            for site in self.sites
            for head in site.heads
        )

    def row_statistics(self, site: str) -> AttentionStats:
        """Per-row statistics [B, H, Q] of the last batch at ``site``.

        Raises:
            InputError: no site has this name, or its rows were summed inside a CUDA graph.
        """
        if site in self._last:
            last = self._last[site]
            return last.statistics() if isinstance(last, Accumulated) else last
        if any(reading.name == site for reading in self.sites):
            raise InputError(
                f"row_statistics({site!r}): its rows were summed on the device, in compiled code that may be a CUDA "
                "graph, and none of them was kept. Run the model without torch.compile to see them."
            )
        raise InputError(f"no site {site!r} was seen. Sites: {', '.join(self._last)}.")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from attemper.monitor.table import table

        yield table(self.reading, options.max_width)

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=120, color_system=None)
        console.print(self)
        return console.file.getvalue().rstrip() if isinstance(console.file, io.StringIO) else ""

    def __repr__(self) -> str:
        heads = sum(len(site.heads) for site in self.sites)
        counts = f"{len(self.sites)} sites, {heads} heads, {self.tokens} tokens, {len(self.alarms)} alarms"
        return f"Scan({self.model!r}: {counts})"
