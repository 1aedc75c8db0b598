"""A calibration in the terminal: temperatures by site, the loss before and after, and whether the data can tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from attemper.text import shown

if TYPE_CHECKING:
    from attemper.control.calibration import Calibration


def table(calibration: Calibration) -> RenderableType:
    """Sites with their temperatures, then one sentence a line."""
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    grid.add_column("site", overflow="fold")
    grid.add_column("temperature" if calibration.per != "head" else "temperature of each head", overflow="fold")
    for site, found in calibration.temperatures.items():
        grid.add_row(Text(shown(site)), " ".join(f"{value:.3f}" for value in found))
    return Group(grid, *(Text(shown(line)) for line in sentences(calibration)))


def sentences(calibration: Calibration) -> list[str]:
    """What it is worth, and what to beware of."""
    low, high = calibration.interval
    change = calibration.after - calibration.before
    lines = [
        f"loss of {calibration.held_out} held-out batches: {calibration.before:.4f} -> {calibration.after:.4f} "
        f"({change:+.4f}, 95% interval {low:+.4f} to {high:+.4f})",
        f"one temperature per {calibration.per}, by {calibration.method}: {calibration.evaluations} passes over "
        f"{calibration.fitting} batches",
    ]
    if not calibration.tells:
        lines.append("These batches cannot tell whether the temperatures help: take more of them before using any.")
    elif change > 0:
        lines.append("The loss rises where it was not fitted: do not use these temperatures; take more batches.")
    if not calibration.converged:
        lines.append("The search was cut off by steps= before it settled.")
    if calibration.at_bounds:
        lines.append(f"Held by a bound of {calibration.bounds}: {', '.join(calibration.at_bounds)}.")
    return lines
