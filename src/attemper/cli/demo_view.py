"""What ``attemper demo`` shows while it trains: curves in a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Protocol

from attemper.cli.output import say
from attemper.text import clean, count, sparkline

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live

    from attemper.lab.trained.demo import DemoRun, Progress
    from attemper.readings.reading import SiteReading

logger = logging.getLogger("attemper")

COLUMNS = 32
"""Bars of a curve."""
FIRST, LATEST = 3, 6
"""How many lines about alarms stand below the curves."""
LINES = 20
"""Plain lines of a whole training, beside those of alarms."""


class View(Protocol):
    """What is told of every step, and of every line that the library logs."""

    def show(self, progress: Progress) -> None: ...
    def note(self, line: str) -> None: ...


@contextmanager
def view(run: DemoRun) -> Iterator[View]:
    """Curves that are drawn anew at each sample if stderr is a terminal, else a line now and then, on stderr.

    Alarms go to the library's log. While the view is open, its lines appear inside the view.
    """
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    with ExitStack() as stack:
        if console.is_terminal and console.encoding.startswith("utf"):
            shown: View = Curves(run, stack.enter_context(Live(console=console, auto_refresh=False)))
        else:
            shown = Lines(run)
        handler = _Handler(shown)
        logger.addHandler(handler)
        stack.callback(logger.removeHandler, handler)
        yield shown


class _Handler(logging.Handler):
    """Hands lines of the log to a view."""

    def __init__(self, view: View) -> None:
        super().__init__()
        self._view = view

    def emit(self, record: logging.LogRecord) -> None:
        self._view.note(record.getMessage().removeprefix("attemper: "))


def entropy(site: SiteReading) -> float | None:
    """Mean of the heads' normalised entropies."""
    values = [head.normalized_entropy for head in site.heads if head.normalized_entropy is not None]
    return sum(values) / len(values) if values else None


def largest_logit(site: SiteReading) -> float | None:
    """Largest logit of the heads."""
    return max((head.max_logit for head in site.heads if head.max_logit is not None), default=None)


class Lines:
    """Plain lines."""

    def __init__(self, run: DemoRun) -> None:
        self._steps, self._every = run.steps, max(run.every, run.steps // LINES // run.every * run.every)

    def show(self, progress: Progress) -> None:
        scan = progress.scan
        if scan is None or (progress.step % self._every and progress.step < self._steps - 1):
            return
        entropies = " ".join(_two_digits(entropy(site)) for site in scan.sites)
        logits = " ".join(_whole(largest_logit(site)) for site in scan.sites)
        say(
            f"step {progress.step} of {self._steps}: loss {progress.loss:.3f}; by layer: entropy {entropies}, "
            f"largest logit {logits}"
        )

    def note(self, line: str) -> None:
        say(line)


class Curves:
    """A curve of the loss, and two of each layer, in a terminal."""

    def __init__(self, run: DemoRun, live: Live) -> None:
        self._run, self._live = run, live
        self._losses: list[float] = []
        self._entropies: dict[str, list[float | None]] = {}
        self._logits: dict[str, list[float | None]] = {}
        self._notes: list[str] = []

    def show(self, progress: Progress) -> None:
        self._losses.append(progress.loss)
        for site in progress.scan.sites if progress.scan else ():
            self._entropies.setdefault(site.name, []).append(entropy(site))
            self._logits.setdefault(site.name, []).append(largest_logit(site))
        if progress.scan or progress.step == self._run.steps - 1:
            self._live.update(self._draw(progress), refresh=True)

    def note(self, line: str) -> None:
        self._notes.append(line)

    def _draw(self, progress: Progress) -> Group:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        head = f"step {progress.step + 1} of {self._run.steps}   learning rate {progress.rate:.4f}"
        grid = Table("layer", "normalised entropy", "", "largest logit (log)", "", box=None, padding=(0, 2, 0, 0))
        for name, values in self._entropies.items():
            logits = self._logits[name]
            bars = sparkline(values, COLUMNS, low=0.0, high=1.0), sparkline([*map(_log, logits)], COLUMNS)
            grid.add_row(clean(name), bars[0], _two_digits(values[-1]), bars[1], _whole(logits[-1]))
        loss = f"loss  {sparkline(self._losses, 2 * COLUMNS)}  {progress.loss:.3f} nats a byte"
        notes = [*self._notes[:FIRST], *self._notes[FIRST:][-LATEST:]]
        if (left_out := len(self._notes) - len(notes)) > 0:
            notes.insert(FIRST, f"... {count(left_out, 'line')} ...")
        lines = [Text(line, style="bold", no_wrap=True, overflow="ellipsis") for line in notes]
        return Group(Text(head), Text(loss), grid, *lines)


def _two_digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _log(value: float | None) -> float | None:
    """0 for 1 and below."""
    return None if value is None else math.log(max(value, 1.0))
