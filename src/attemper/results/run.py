"""A stored run as its users hold it: numbers over steps, alarms, one step as a scan, its page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from attemper.files import write_whole
from attemper.readings.reading import Reading
from attemper.results.comparison import Comparison, compare_readings
from attemper.results.scan import Scan
from attemper.store.folder import open_stored
from attemper.store.run import StoredRun


class Run(StoredRun):
    """A stored run: every statistic of every head, as far as written.

    Steps are those that were sampled. A resumed run has no step twice: what was written later replaces what it
    overlaps. Ask for a site by name; where one name was seen in training and in evaluation, or in self and cross
    attention, by ``(name, kind, mode)``, or say ``mode=``.
    """

    # --- one step ---

    def at(self, step: int, *, alarms: bool = True) -> Scan:
        """Returns the scan of one step. A run stores no histograms, curves or rows.

        Args:
            step: one of ``steps``.
            alarms: whether to find the alarms that stood then. For that the run is judged from its beginning.

        Raises:
            InputError: the step was not sampled; the message names the nearest that were.
        """
        reading, notes = self.reading_at(step, alarms=alarms)
        return Scan(reading, None, notes)

    def compare(self, other: Run | Scan) -> Comparison:
        """Compares the last sample of this run with another run or scan.

        Raises:
            InputError: they are of different models: no site in common, or other heads.
        """
        theirs = other.name if isinstance(other, Run) else other.model
        return compare_readings(self, other, names=(self.name, theirs))

    def to_html(self, path: str | os.PathLike[str], *, last: Reading | None = None, beside: Sequence[Run] = ()) -> Path:
        """Writes this run as one HTML page that opens offline, with every head's history. The file has at most 2 MB.

        It is written whole or not at all, and the same samples give the same bytes.

        Args:
            last: the last sample with its histograms and its entropy by visible keys, which no run keeps; None without.
            beside: up to 7 other runs: the page then lays the losses and statistics of all over each other.

        Returns:
            Where the file is, links followed.

        Raises:
            InputError: there is no sample yet, the runs are more than 8 or one and the same, or no file can be
                written there.
        """
        if beside:
            from attemper.report.runs import runs_page

            return write_whole(path, runs_page([self, *beside]))
        from attemper.report.run_page import run_page

        return write_whole(path, run_page(self, last))


def open_run(path: str | os.PathLike[str]) -> Run:
    """The run in a folder, a file or at a URL: what :func:`attemper.open` gives of one.

    Where a rank has a file and parts, the one that goes further is read, and ``remarks`` says so.

    Raises:
        InputError: there is no run at ``path``, or none of its files can be read: not of attemper, damaged, or written
            by a newer version.
        MissingExtraError: the run is of Parquet parts, or at a URL, and pyarrow or fsspec is not installed.
    """
    return open_stored(path, Run)
