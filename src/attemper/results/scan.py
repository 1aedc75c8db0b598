"""The result of a scan, or a sample of a watch, as an object: readings, tables, JSON."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attemper.errors import InputError, needs
from attemper.files import write_whole
from attemper.readings.reading import HEAD_COLUMNS, Alarm, Reading, SiteReading, Skipped, head_rows
from attemper.text import clean_name, counts, plain_text

if TYPE_CHECKING:
    import pandas
    from rich.console import Console, ConsoleOptions, RenderResult

    from attemper.readings.part import Part
    from attemper.readings.rows import Rows


class Scan:
    """The result of a scan. ``print(scan)`` shows a table; in a terminal ``rich.print(scan)`` colours it.

    Attributes:
        reading: everything, as one frozen record.
    """

    def __init__(
        self,
        reading: Reading,
        last: Mapping[str, Any] | None,
        not_judged: tuple[str, ...] = (),
        part: Part | None = None,
        rows: Rows | None = None,
    ) -> None:
        """
        Args:
            reading: everything but rows.
            last: rows of the last batch by site, as ``AttentionStats`` or as what has a method ``statistics`` that
                gives them. None: the reading was loaded, or merged.
            not_judged: which alarms on history have nothing to judge yet, and why; the table shows it.
            part: the sums that the reading follows from. None: there are none to save or to merge.
            rows: of chosen queries, where they were kept.
        """
        self.not_judged = not_judged
        self.reading = reading
        self._loaded = last is None
        self._last = last or {}
        self._part = part
        self._rows = rows

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> Scan:
        """Reads a scan from JSON. ``source`` is the text of ``to_json`` or ``attemper scan --json``, or a file's path.

        It has every reading and no statistics of rows: ``row_statistics`` raises.

        Raises:
            InputError: the file cannot be read, or is not the JSON of a scan of a schema that this version knows.
        """
        return cls(Reading.from_json(source), None)

    @property
    def model(self) -> str:
        return self.reading.model

    @property
    def tokens(self) -> int:
        """Real tokens read: query rows of the first site, padding left out."""
        return self.reading.tokens

    @property
    def backend(self) -> str:
        """Name of the backend that computed the statistics; several, with commas, if sites differ."""
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

    @property
    def notes(self) -> tuple[str, ...]:
        """What the alarms do not cover: heads that were not judged, and why."""
        return self.reading.notes

    @property
    def shards(self) -> tuple[str, ...]:
        """Labels of the shards read: ``3/64`` for a shard; ``#`` and a digest of the sums for a whole scan.

        Empty where there is nothing to merge: loaded from JSON, or a watch's sample.
        """
        return () if self._part is None else tuple(shard.label for shard in self._part.shards)

    @property
    def missing(self) -> tuple[str, ...]:
        """Labels of the shards that this scan lacks."""
        return () if self._part is None else self._part.missing

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the sums of every head to a file. :func:`attemper.open` reads it; scans merge from such files.

        The file is written whole or not at all. It holds no text, no token and no path.

        Returns:
            Where the file is, links followed.

        Raises:
            InputError: there are no sums, or no file can be written there.
        """
        from attemper.readings.part_file import save

        return save(self._sums("save"), path)

    def merge(self, *others: Scan) -> Scan:
        """Merges scans into the scan of all their texts. Bits do not depend on their order.

        Sums are added in the order of the shards' numbers, so bits depend on the number of shards alone. The result
        has no statistics of rows; the limits of its alarms are those of its first shard.

        Raises:
            InputError: scans are of different models, were made with other arguments that the numbers depend on, or
                hold the same shard; one was loaded from JSON, or is a watch's sample, and has no sums.
        """
        from attemper.readings.part import merge

        if wrong := [type(other).__name__ for other in others if not isinstance(other, Scan)]:
            raise InputError(f"Scan.merge takes scans, got {wrong[0]}: attemper.open(path) reads one from a file.")
        merged = merge([scan._sums("merge") for scan in (self, *others)])
        return Scan(merged.reading(), None, part=merged)

    def _sums(self, what: str) -> Part:
        if self._part is None:
            raise InputError(
                f"Scan.{what}: this scan has means of heads and no sums, because it was loaded from JSON, "
                "or is a sample of a watch; means do not add up. Scan again, or load a file of Scan.save."
            )
        return self._part

    def to_dict(self) -> dict[str, Any]:
        """The document of ``attemper scan --json``, schema 2."""
        return self.reading.to_dict()

    def to_json(self, indent: int | None = None) -> str:
        """The document of ``attemper scan --json`` as text."""
        return self.reading.to_json(indent)

    def to_html(self, path: str | os.PathLike[str], *, patterns: Sequence[Any] = ()) -> Path:
        """Writes this scan as one HTML page that opens offline. The file has at most 2 MB.

        It is written whole or not at all, and the same scan gives the same bytes.

        Args:
            patterns: heads whose weights on a text the page shows, as :func:`attemper.pattern` gives them: at most 12,
                of the first 128 tokens each. The page then holds these tokens, and says so; else it holds no text.

        Returns:
            Where the file is, links followed.

        Raises:
            InputError: no file can be written there.
        """
        from attemper.report.page import scan_page

        return write_whole(path, scan_page(self.reading, patterns))

    def to_pandas(self) -> pandas.DataFrame:
        """One row per head: site, layer, kind, mode, and every number of ``HeadReading``.

        ``frame.attrs["skipped"]`` lists what was not measured: its name, the reason, and where a layer does not attend
        its kind.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        with needs("Scan.to_pandas", "pandas", "pandas"):
            import pandas
        frame = pandas.DataFrame(head_rows(self.reading.placed_heads), columns=pandas.Index(HEAD_COLUMNS))
        frame = frame.astype({"layer": "Int64"})  # whole numbers, also where some sites have none
        frame.attrs["skipped"] = [one.to_dict() for one in self.skipped]
        return frame

    def row_statistics(self, site: str) -> Any:
        """Returns per-row statistics of the last batch at ``site``. An :class:`attemper.types.AttentionStats` of
        tensors [B, H, Q].

        Raises:
            InputError: no site has this name; its rows were summed inside a CUDA graph;
                or the scan was loaded, or merged.
        """
        if site in self._last:
            last = self._last[site]
            return last.statistics() if hasattr(last, "statistics") else last
        if self._loaded:
            raise InputError(
                f"row_statistics({site!r}): this scan was loaded from JSON or a file, or merged, and holds readings of "
                "heads and no rows. Scan the model again to see them."
            )
        if any(reading.name == site for reading in self.sites):
            raise InputError(
                f"row_statistics({site!r}): its rows were summed on the device, in compiled code that may be a CUDA "
                "graph, and none of them was kept. Run the model without torch.compile to see them."
            )
        raise InputError(f"no site {site!r} was seen. Sites: {', '.join(site.name for site in self.sites)}.")

    def rows(self) -> Rows:
        """Returns the rows that ``keep_rows=`` kept: every statistic by query, site and head.

        They are in memory alone, in no JSON and in no file of ``save``: ``rows().to_pandas()`` writes them anywhere.

        Raises:
            InputError: none were kept.
        """
        if self._rows is None:
            raise InputError(
                "rows(): this scan kept none. Pass keep_rows='last' (or a list of places) to attemper.scan. Loaded, "
                "merged and watched results have no rows."
            )
        return self._rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from attemper.report.scan_table import table

        yield table(self.reading, options.max_width, self.not_judged)

    def _repr_html_(self) -> str:
        from attemper.report.notebook import scan_html

        return scan_html(self.reading)

    def __str__(self) -> str:
        return plain_text(self)

    def __repr__(self) -> str:
        size = counts(site=len(self.sites), head=len(self.reading.heads), token=self.tokens, alarm=len(self.alarms))
        return f"Scan({self.model!r}: {'; '.join((size, *self.notes))})"


def load_scan(path: str | os.PathLike[str]) -> Scan:
    """A scan from a file of :meth:`Scan.save`, of ``attemper scan --out`` or of ``attemper merge --out``.

    It has every reading, and merges. The JSON of ``attemper scan --json`` loads, too: to read and to compare, not to
    merge, because its numbers are means. Neither has statistics of rows.

    Raises:
        InputError: the file cannot be read, is cut off, is of a newer version, or is something else.
    """
    from attemper.readings.part_file import is_json, load

    path = Path(path)
    if is_json(path):
        try:
            return Scan.from_json(path)
        except InputError as error:
            raise InputError(f"{clean_name(path)}: {error}") from error
    part = load(path)
    return Scan(part.reading(), None, part=part)
