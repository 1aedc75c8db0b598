"""What ``attemper demo`` shows while it trains: curves in a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from attemper.cli.output import say
from attemper.readings.alarms import by_kind
from attemper.text import clean, count, sparkline

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live

    from attemper.lab.trained.demo import DemoRun, Progress
    from attemper.readings.reading import SiteReading

COLUMNS = 32
"""Bars of a curve."""
LINES = 20
"""Plain lines of a whole training, beside those of alarms."""


class View(Protocol):
    """What is told of every step."""

    def show(self, progress: Progress) -> None: ...


@contextmanager
def view(run: DemoRun) -> Iterator[View]:
    """Curves that are drawn anew at each sample if stderr is a terminal, else a line now and then, on stderr."""
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    if not console.is_terminal or not console.encoding.startswith("utf"):
        yield Lines(run)
        return
    with Live(console=console, auto_refresh=False) as live:
        yield Curves(run, live)


def entropy(site: SiteReading) -> float | None:
    """Mean of the heads' normalised entropies."""
    values = [head.normalized_entropy for head in site.heads if head.normalized_entropy is not None]
    return sum(values) / len(values) if values else None


def largest_logit(site: SiteReading) -> float | None:
    """Largest logit of the heads."""
    return max((head.max_logit for head in site.heads if head.max_logit is not None), default=None)


def alarm_lines(progress: Progress) -> list[str]:
    """A line for each kind of alarm that begins at this step, and one if the loss alarm rings first."""
    lines = []
    for (severity, kind), alarms in by_kind(progress.alarms).items():
        more = f", and {count(len(alarms) - 1, 'head')} more" if len(alarms) > 1 else ""
        lines.append(f"step {progress.step}: {severity} {kind}: {clean(alarms[0].message)}{more}")
    if progress.loss_rings:
        lines.append(f"step {progress.step}: the plain alarm of the loss")
    return lines


class Lines:
    """Plain lines."""

    def __init__(self, run: DemoRun) -> None:
        self._steps, self._every = run.steps, max(run.every, run.steps // LINES // run.every * run.every)

    def show(self, progress: Progress) -> None:
        for line in alarm_lines(progress):
            say(line)
        scan = progress.scan
        if scan is None or (progress.step % self._every and progress.step < self._steps - 1):
            return
        entropies = " ".join(_two_digits(entropy(site)) for site in scan.sites)
        logits = " ".join(_whole(largest_logit(site)) for site in scan.sites)
        say(
            f"step {progress.step} of {self._steps}: loss {progress.loss:.3f}; by layer: entropy {entropies}, "
            f"largest logit {logits}"
        )


class Curves:
    """A curve of the loss, and two of each layer, in a terminal."""

    def __init__(self, run: DemoRun, live: Live) -> None:
        self._run, self._live = run, live
        self._losses: list[float] = []
        self._entropies: dict[str, list[float | None]] = {}
        self._logits: dict[str, list[float | None]] = {}
        self._alarms: list[str] = []

    def show(self, progress: Progress) -> None:
        self._losses.append(progress.loss)
        self._alarms += alarm_lines(progress)
        for site in progress.scan.sites if progress.scan else ():
            self._entropies.setdefault(site.name, []).append(entropy(site))
            self._logits.setdefault(site.name, []).append(largest_logit(site))
        if progress.scan or progress.step == self._run.steps - 1:
            self._live.update(self._draw(progress), refresh=True)

    def _draw(self, progress: Progress) -> Group:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        head = f"step {progress.step + 1} of {self._run.steps}   learning rate {progress.rate:.4f}"
        grid = Table("layer", "normalised entropy", "", "largest logit", "", box=None, padding=(0, 2, 0, 0))
        for name, values in self._entropies.items():
            logits = self._logits[name]
            bars = sparkline(values, COLUMNS, low=0.0, high=1.0), sparkline(logits, COLUMNS)
            grid.add_row(clean(name), bars[0], _two_digits(values[-1]), bars[1], _whole(logits[-1]))
        loss = f"loss  {sparkline(self._losses, 2 * COLUMNS)}  {progress.loss:.3f} nats a byte"
        alarms = [Text(line, style="bold" if "notice" not in line else "") for line in self._alarms[-8:]]
        return Group(Text(head), Text(loss), grid, *alarms)


def _two_digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
