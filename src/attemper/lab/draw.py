"""Charts as a picture, for slides and pages: readable in greyscale, every axis with its unit."""

from __future__ import annotations

import math
import os
from io import BytesIO
from pathlib import Path
from typing import Any

from attemper.errors import InputError, needs
from attemper.files import check_target, write_whole
from attemper.lab.experiment import Chart, Experiment

STYLES = (
    ("#000000", "-", "o"),
    ("#0072b2", "--", "s"),
    ("#d55e00", "-.", "^"),
    ("#009e73", ":", "D"),
    ("#cc79a7", (0, (5, 1)), "v"),
    ("#8a6d00", (0, (1, 1)), "P"),
    ("#56b4e9", (0, (3, 1, 1, 1)), "X"),
    ("#888888", (0, (7, 2)), "*"),
    ("#e69f00", (0, (2, 2)), "<"),
)
"""Colour (told apart by colour-blind readers), dash and mark of each curve: without colour, dash and mark are left."""


def check_picture(path: str | os.PathLike[str]) -> None:
    """Refuses a ``path`` where no picture can be written: before the work, not after it.

    Raises:
        MissingExtraError: matplotlib is not installed.
        InputError: the name does not end in .png, or as ``check_target``.
    """
    _figure()
    check_target(path, "picture", ending=True)


def draw(experiment: Experiment, path: str | os.PathLike[str]) -> Path:
    """Draws every chart of an experiment into one PNG file, whole or not at all, and returns where it is.

    Raises:
        MissingExtraError: matplotlib is not installed.
        InputError: the experiment has no chart, or no file can be written there.
    """
    if not experiment.charts:
        raise InputError(f"experiment {experiment.name} has no chart to draw.")
    check_picture(path)
    count = len(experiment.charts)
    columns = 1 if count == 1 else 2
    figure = _figure()(figsize=(5.6 * columns, 3.9 * math.ceil(count / columns)), layout="constrained")
    grid = figure.subplots(math.ceil(count / columns), columns, squeeze=False)
    for axes, chart in zip(grid.flat, experiment.charts, strict=False):
        _draw(axes, chart)
    for axes in list(grid.flat)[count:]:
        axes.set_axis_off()
    png = BytesIO()
    # Without a date: the same experiment gives the same bytes under the same version, which they name.
    figure.savefig(png, format="png", dpi=130)
    return write_whole(path, png.getvalue(), "picture")


def _figure() -> Any:
    """matplotlib's class of figures. Not by way of pyplot, which would keep every figure and look for a display."""
    with needs("A picture of an experiment", "matplotlib", "plot"):
        from matplotlib.figure import Figure
    return Figure


def _draw(axes: Any, chart: Chart) -> None:
    for number, series in enumerate(chart.series):
        color, dash, mark = STYLES[number % len(STYLES)]
        y = [math.nan if value is None else value for value in series.y]
        style = {"color": color, "label": series.name, "marker": mark, "markersize": 4}
        style["markevery"] = _marks(len(y), number, len(chart.series)) if series.line else 1
        line = dash if series.line else ""
        if series.errors:
            axes.errorbar(series.x, y, yerr=series.errors, linestyle=line, capsize=2, **style)
        else:
            axes.plot(series.x, y, linestyle=line, **style)
    axes.set(title=chart.title, xlabel=chart.x.label, ylabel=chart.y.label, xscale=chart.x.scale, yscale=chart.y.scale)
    if chart.x.bounds:
        axes.set_xlim(*chart.x.bounds)
    if chart.y.bounds:
        axes.set_ylim(*chart.y.bounds)
    _number_ticks(axes)
    axes.grid(True, linewidth=0.3)
    if len(chart.series) > 1:
        axes.legend(fontsize="small")


def _number_ticks(axes: Any) -> None:
    """Numbers on a log axis of less than three decades: powers of ten are too few there, and what stands between them
    would be written over one another.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        if axis.get_scale() == "log" and high < 1000 * low:
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())


def _marks(points: int, number: int, count: int) -> tuple[int, int]:
    """The first mark and the step to the next: about eight on a curve, and not where those of the other curves are."""
    step = max(1, points // 8)
    return number * step // count, step
