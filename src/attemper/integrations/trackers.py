"""The trackers of a training run together: numbers and pictures for all of them, and none that ends the run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from attemper.integrations.pictures import Pictures, Table, draw_method, table, table_method
from attemper.integrations.sinks import Values, sink
from attemper.results.scan import Scan

MAP = "attention/map"
"""Names of pictures begin so; that of a table is this."""


class Trackers:
    """Several trackers. One that raises is reported once by a warning and asked again next time: training goes on."""

    def __init__(self, trackers: Iterable[Any]) -> None:
        trackers = list(trackers)
        self._names = [type(tracker).__name__ for tracker in trackers]
        self._sinks = [sink(tracker) for tracker in trackers]
        self._trackers = trackers
        self._pictures = Pictures()
        self._reported: set[int] = set()
        self.failures = 0
        """Calls that raised."""

    def write(self, values: Values, step: int) -> None:
        """Sends ``values`` to every tracker."""
        for place, write in enumerate(self._sinks):
            self._try(place, lambda write=write: write(values, step))

    def write_map(self, scan: Scan, statistics: Iterable[str], step: int) -> None:
        """Sends every head to each tracker that takes it: as a picture for each statistic, or else as a table."""
        pictures = {f"{MAP}/{name}": self._pictures.pixels(scan, name) for name in statistics}
        rows = table(scan, statistics)
        for place, tracker in enumerate(self._trackers):
            self._try(place, lambda tracker=tracker: _send_map(tracker, pictures, rows, step))

    def _try(self, place: int, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:  # a tracker's network must not end somebody's training run
            self.failures += 1
            if place not in self._reported:
                self._reported.add(place)
                warnings.warn(
                    f"attemper: the tracker {self._names[place]} raised {type(error).__name__}: {error}. Training goes "
                    "on, and further failures of it are only counted.",
                    stacklevel=3,
                )


def _send_map(tracker: Any, pictures: Mapping[str, np.ndarray], columns: Table, step: int) -> None:
    draw, tabulate = draw_method(tracker), table_method(tracker)
    if draw is not None:
        for name, pixels in pictures.items():
            draw(name, pixels, step)
    elif tabulate is not None:
        tabulate(MAP, *columns, step)
