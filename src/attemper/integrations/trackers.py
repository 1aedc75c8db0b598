"""The trackers of a training run together: numbers and pictures for all of them, and none that ends the run."""

from __future__ import annotations

import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from attemper.errors import InputError
from attemper.report.notebook import colours
from attemper.results.scan import Scan
from attemper.statistics import SHOWN

Values = Mapping[str, float | None]
Sink = Callable[[Values, int], None]
"""``sink(values, step)`` sends named numbers to a tracker."""

ACCEPTED = (
    "something with .log_metrics(dict, step=) (a Lightning logger, mlflow, a Comet experiment), .log(dict, step=) (a "
    "Weights & Biases run, trackio, an accelerate tracker), .add_scalar(name, value, step) (a SummaryWriter), "
    ".track(value, name=, step=) (an Aim run), or a function (dict, step)"
)


def sink(tracker: Any) -> Sink:
    """A function ``(values, step)`` that logs to ``tracker`` through the tracker's own method.

    Looked for in this order, and taken where the arguments fit: ``log_metrics(dict, step=)``, ``log(dict, step=)``,
    ``add_scalar(name, value, step)``, ``track(value, name=, step=)``, a call ``tracker(dict, step)``. Values that are
    None, NaN or infinite are left out; nothing is called for an empty dict.

    Raises:
        InputError: the tracker is a class, or has none of these.

    Example:
        >>> sink(print)({"attention/normalized_entropy/min": 0.25, "attention/normalized_entropy/max": None}, 50)
        {'attention/normalized_entropy/min': 0.25} 50
    """
    if isinstance(tracker, type):
        raise InputError(f"trackers: {tracker.__name__} is a class. Pass an instance of it.")
    send = _dict_method(tracker) or _scalar_method(tracker)
    if send is None:
        raise InputError(f"trackers: {type(tracker).__name__} is not a known tracker. Accepted: {ACCEPTED}.")
    write = send

    def clean(values: Values, step: int) -> None:
        kept = {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}
        if kept:
            write(kept, step)

    return clean


def _dict_method(tracker: Any) -> Callable[[dict[str, float], int], Any] | None:
    for name in ("log_metrics", "log"):
        method = getattr(tracker, name, None)
        if callable(method) and takes(method, {}, step=0):
            return lambda values, step, method=method: method(values, step=step)
    return None


def _scalar_method(tracker: Any) -> Callable[[dict[str, float], int], Any] | None:
    add, track = getattr(tracker, "add_scalar", None), getattr(tracker, "track", None)
    if callable(add) and takes(add, "", 0.0, 0):
        return lambda values, step: [add(name, value, step) for name, value in values.items()]
    if callable(track) and takes(track, 0.0, name="", step=0):
        return lambda values, step: [track(value, name=name, step=step) for name, value in values.items()]
    if callable(tracker) and takes(tracker, {}, 0):
        return tracker
    return None


def takes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Whether a function can be called so, as far as its signature says."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


Draw = Callable[[str, np.ndarray, int], Any]
"""``draw(name, pixels, step)`` sends a picture, [rows, columns, 3] bytes."""
Tabulate = Callable[[str, list[str], list[list[Any]], int], Any]
"""``tabulate(name, columns, rows, step)`` sends a table."""
Table = tuple[list[str], list[list[Any]]]
"""Names of columns, and rows."""

WITH_IMAGES = ("wandb", "trackio", "swanlab")
"""Packages whose ``log`` takes an object of their class ``Image`` as a value."""
WRAPPED = ("experiment", "tracker")
"""Where a Lightning logger and a tracker of accelerate keep what they log to."""
LARGEST_CELL, WIDEST = 16, 512
"""Pixels of a head at most, and of a picture where heads have more than 4."""


class Range:
    """From which value to which the colours of a statistic reach. Without bounds of its own, it only grows."""

    def __init__(self, statistic: str) -> None:
        shown = SHOWN[statistic]
        self._fixed = shown.low, shown.high
        self._logarithmic = shown.logarithmic
        self._low, self._high = math.inf, -math.inf

    def shares(self, values: np.ndarray) -> np.ndarray:
        """``values`` as shares of the range, from 0 to 1; NaN where there is none."""
        scaled = np.log(np.maximum(values, 1e-12)) if self._logarithmic else values
        known = scaled[np.isfinite(scaled)]
        if known.size:
            self._low, self._high = min(self._low, float(known.min())), max(self._high, float(known.max()))
        low, high = self._bound(0, self._low), self._bound(1, self._high)
        if not high > low:
            return np.where(np.isfinite(scaled), 0.0, np.nan)
        return np.clip((scaled - low) / (high - low), 0.0, 1.0)

    def _bound(self, side: int, seen: float) -> float:
        fixed = self._fixed[side]
        return seen if fixed is None else math.log(fixed) if self._logarithmic else fixed


def grid(scan: Scan, statistic: str) -> np.ndarray:
    """[sites, heads] of a statistic, NaN where a site has fewer heads or no number."""
    values = np.full((len(scan.sites), max((len(site.heads) for site in scan.sites), default=0)), np.nan)
    for row, site in enumerate(scan.sites):
        for column, head in enumerate(site.heads):
            value = getattr(head, statistic)
            values[row, column] = np.nan if value is None else value
    return values


def pixels(shares: np.ndarray) -> np.ndarray:
    """[rows, columns] from 0 to 1 as a picture, bytes; a square of some pixels for each."""
    cell = max(4, min(LARGEST_CELL, WIDEST // max(1, *shares.shape)))
    return np.ascontiguousarray(colours(shares).repeat(cell, 0).repeat(cell, 1))


def table(scan: Scan, statistics: Iterable[str]) -> Table:
    """Names of columns, and a row for each head: its site, layer and number, then its statistics."""
    names = list(statistics)
    rows = [
        [site.name, site.layer, head.head, *(getattr(head, name) for name in names)]
        for site, head in scan.reading.placed_heads
    ]
    return ["site", "layer", "head", *names], rows


def draw_method(tracker: Any) -> Draw | None:
    """The way to send a picture to a tracker, or to what it wraps; None if it takes none."""
    for owner in _with_wrapped(tracker):
        for method in (_add_image, _log_image, _log_object, _track_object):
            draw = method(owner)
            if draw is not None:
                return draw
    return _of_client(tracker)


def table_method(tracker: Any) -> Tabulate | None:
    """The way to send a table, ``log_table(name, columns=, data=, step=)``; None if the tracker takes none."""
    log = getattr(tracker, "log_table", None)
    if not callable(log) or not takes(log, "", columns=[], data=[], step=0):
        return None
    return lambda name, columns, rows, step: log(name, columns=columns, data=rows, step=step)


def _with_wrapped(tracker: Any) -> Iterable[Any]:
    yield tracker
    for name in WRAPPED:
        inner = getattr(tracker, name, None)
        if inner is not None:
            yield inner


def _add_image(owner: Any) -> Draw | None:
    """A SummaryWriter of TensorBoard."""
    add = getattr(owner, "add_image", None)
    if not callable(add) or not takes(add, "", None, 0, dataformats="HWC"):
        return None
    return lambda name, pixels, step: add(name, pixels, step, dataformats="HWC")


def _log_image(owner: Any) -> Draw | None:
    """mlflow, a Comet experiment, Lightning's loggers of Weights & Biases: told by the names of their arguments."""
    log = getattr(owner, "log_image", None)
    names = set(_argument_names(log))
    if {"key", "images", "step"} <= names:
        return lambda name, pixels, step: log(key=name, images=[pixels], step=step)  # type: ignore[misc]
    if {"image", "key", "step"} <= names and "run_id" not in names:
        return lambda name, pixels, step: log(pixels, key=name, step=step)  # type: ignore[misc]
    if {"image_data", "name", "step", "image_minmax"} <= names:  # Comet stretches colours unless it is told their range
        return lambda name, pixels, step: log(pixels, name=name, step=step, image_minmax=(0, 255))  # type: ignore[misc]
    return None


def _of_client(tracker: Any) -> Draw | None:
    """Lightning's logger of mlflow: a client that is told the run."""
    log, run = getattr(getattr(tracker, "experiment", None), "log_image", None), getattr(tracker, "run_id", None)
    if run is None or not {"run_id", "image", "key", "step"} <= set(_argument_names(log)):
        return None
    return lambda name, pixels, step: log(run, pixels, key=name, step=step)  # type: ignore[misc]


def _log_object(owner: Any) -> Draw | None:
    """A run, or the package itself, of those in ``WITH_IMAGES``."""
    package = (owner.__name__ if isinstance(owner, ModuleType) else type(owner).__module__).partition(".")[0]
    image = getattr(sys.modules.get(package), "Image", None) if package in WITH_IMAGES else None
    log = getattr(owner, "log", None)
    if image is None or not callable(log) or not takes(log, {}, step=0):
        return None
    return lambda name, pixels, step: log({name: image(pixels)}, step=step)


def _track_object(owner: Any) -> Draw | None:
    """A run of Aim."""
    image = getattr(sys.modules.get("aim"), "Image", None)
    track = getattr(owner, "track", None)
    if image is None or not callable(track) or not takes(track, None, name="", step=0):
        return None
    return lambda name, pixels, step: track(image(pixels), name=name, step=step)


def _argument_names(function: Any) -> tuple[str, ...]:
    if not callable(function):
        return ()
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


MAP = "attention/map"
"""Names of pictures begin so; that of a table is this."""


class Trackers:
    """Several trackers. One that raises is reported once by a warning and asked again next time: training goes on."""

    def __init__(self, trackers: Iterable[Any]) -> None:
        trackers = list(trackers)
        self._names = [type(tracker).__name__ for tracker in trackers]
        self._sinks = [sink(tracker) for tracker in trackers]
        self._trackers = trackers
        self._ranges = {name: Range(name) for name in SHOWN}
        """The colours of a statistic mean the same in all pictures, or reach further in later ones."""
        self._reported: set[int] = set()
        self.failures = 0
        """Calls that raised."""

    def write(self, values: Values, step: int) -> None:
        """Sends ``values`` to every tracker."""
        for place, write in enumerate(self._sinks):
            self._try(place, lambda write=write: write(values, step))

    def write_map(self, scan: Scan, statistics: Iterable[str], step: int) -> None:
        """Sends every head to each tracker that takes it: as a picture for each statistic, or else as a table."""
        pictures = {f"{MAP}/{name}": pixels(self._ranges[name].shares(grid(scan, name))) for name in statistics}
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
                    "on, and its further failures are only counted.",
                    stacklevel=3,
                )


def _send_map(tracker: Any, pictures: Mapping[str, np.ndarray], columns: Table, step: int) -> None:
    draw, tabulate = draw_method(tracker), table_method(tracker)
    if draw is not None:
        for name, pixels in pictures.items():
            draw(name, pixels, step)
    elif tabulate is not None:
        tabulate(MAP, *columns, step)
