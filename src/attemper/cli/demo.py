"""``attemper demo``: a training of about a minute, watched; healthy, or with attention that collapses."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attemper.cli.output import INTERRUPTED, check_files, failure, open_console, print_json, say
from attemper.errors import InputError
from attemper.readings.stacks import over_heads
from attemper.text import clean, clean_name, count, decimals, sparkline

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live

    from attemper.lab.trained.demo import DemoRun, Outcome, Progress
    from attemper.readings.reading import Alarm


STEPS = 800
"""About a minute of training on two cores."""
FEWEST_STEPS = 40
"""Fewer show no curve."""


class Injection(StrEnum):
    """What goes wrong in the middle."""

    collapse = "collapse"


def demo(
    steps: Annotated[
        int, typer.Option(min=FEWEST_STEPS, help="Training steps. The default takes about a minute on two cores.")
    ] = STEPS,
    inject: Annotated[
        Injection | None,
        typer.Option(help="collapse raises the learning rate to 30 times its peak, from the middle on."),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Random seed. The same seed gives the same numbers.")
    ] = 0,
    store: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Store the run in this new folder. By default, runs/demo-TIME."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Write the page here. By default, page.html in the run's folder."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of lines.")] = False,
) -> None:
    """Train a small model on the source code of Python's standard library and watch every head.

    Ctrl-C stops it; the run's folder keeps the samples so far.
    """
    folder = _new_folder(store)
    page = html or folder / "page.html"
    check_files(html)
    take = f"{count(steps, 'step')} ({STEPS} take about a minute)"
    say(f"demo: trains a small byte-level model on this Python's library, {take}")
    from attemper.lab.trained.demo import DemoRun, run_demo

    run = DemoRun(steps=steps, seed=seed, inject=None if inject is None else inject.value)
    try:
        with view(run) as progress:
            outcome = run_demo(run, progress.show, store=folder)
    except KeyboardInterrupt:
        message = f"interrupted; the samples so far are in {clean_name(folder)}: attemper show {clean_name(folder)}"
        raise SystemExit(failure(message, INTERRUPTED)) from None
    from attemper.results.run import open_run

    with open_run(folder) as stored:
        stored.to_html(page)
    if as_json:
        print_json(json.dumps(_document(run, outcome, folder, page), indent=2))
    else:
        print("\n".join(_lines(outcome, folder, page)))


def _new_folder(store: Path | None) -> Path:
    """The folder of the run, made if it is not there."""
    folder = store or Path("runs") / f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise InputError(
                f"--store {clean_name(folder)}: this folder is not empty. Name a new one, such as runs/demo-2."
            )
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(
            f"--store {clean_name(folder)}: {reason}. Name a folder that can be made, such as runs/demo."
        ) from error
    return folder


def _lines(outcome: Outcome, folder: Path, page: Path) -> list[str]:
    """What is printed at the end."""
    return [
        f"trained {count(outcome.steps, 'step')} in {outcome.seconds:.0f} s, loss {outcome.loss:.3f} nats a byte",
        f"attention: {_first(outcome.attention_alarm)}",
        f"loss: {_first(outcome.loss_alarm)}",
        f"run: {clean_name(folder)} (attemper show {clean_name(folder)})",
        f"page: {clean_name(page)}",
    ]


def _first(alarm: Alarm | None) -> str:
    if alarm is None:
        return "no alarm that is a warning or worse"
    return f"first alarm at step {alarm.since}, {alarm.severity} {alarm.kind}: {clean(alarm.message)}"


def _document(run: DemoRun, outcome: Outcome, folder: Path, page: Path) -> dict[str, Any]:
    """The document of ``--json``."""
    attention, loss = outcome.attention_alarm, outcome.loss_alarm
    return {
        "schema": 1,
        "run": str(folder),
        "page": str(page),
        "inject": run.inject,
        "seed": run.seed,
        "steps": outcome.steps,
        "seconds": round(outcome.seconds, 3),
        "loss": outcome.loss if math.isfinite(outcome.loss) else None,
        "attention_alarm": None if attention is None else attention.since,
        "loss_alarm": None if loss is None else loss.since,
        "alarms": [asdict(alarm) for alarm in outcome.alarms],
    }


logger = logging.getLogger("attemper")

COLUMNS = 32
"""Bars of a curve."""
FIRST, LATEST = 3, 6
"""How many lines about alarms stand below the curves."""
LINES = 20
"""Plain lines of a whole training, beside those of alarms."""


@contextmanager
def view(run: DemoRun) -> Iterator[Lines | Curves]:
    """Curves that are drawn anew at each sample if stderr is a terminal, else a line now and then, on stderr.

    Alarms go to the library's log. While the view is open, its lines appear inside the view.
    """
    from rich.live import Live

    console = open_console(stderr=True)
    with ExitStack() as stack:
        if console.is_terminal and console.encoding.startswith("utf"):
            shown: Lines | Curves = Curves(run, stack.enter_context(Live(console=console, auto_refresh=False)))
        else:
            shown = Lines(run)
        handler = _Handler(shown)
        logger.addHandler(handler)
        stack.callback(logger.removeHandler, handler)
        yield shown


class _Handler(logging.Handler):
    """Hands lines of the log to a view."""

    def __init__(self, view: Lines | Curves) -> None:
        super().__init__()
        self._view = view

    def emit(self, record: logging.LogRecord) -> None:
        self._view.note(record.getMessage().removeprefix("attemper: "))


class Lines:
    """Plain lines: of every step, and those that the library logs."""

    def __init__(self, run: DemoRun) -> None:
        self._steps, self._every = run.steps, max(run.every, run.steps // LINES // run.every * run.every)

    def show(self, progress: Progress) -> None:
        scan = progress.scan
        if scan is None or (progress.step % self._every and progress.step < self._steps - 1):
            return
        entropies = " ".join(decimals(over_heads(site.heads, "normalized_entropy"), 2) for site in scan.sites)
        logits = " ".join(decimals(over_heads(site.heads, "max_logit"), 0) for site in scan.sites)
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
            self._entropies.setdefault(site.name, []).append(over_heads(site.heads, "normalized_entropy"))
            self._logits.setdefault(site.name, []).append(over_heads(site.heads, "max_logit"))
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
            logs = [None if value is None else math.log(max(value, 1.0)) for value in logits]
            bars = sparkline(values, COLUMNS, low=0.0, high=1.0), sparkline(logs, COLUMNS)
            grid.add_row(clean(name), bars[0], decimals(values[-1], 2), bars[1], decimals(logits[-1], 0))
        loss = f"loss  {sparkline(self._losses, 2 * COLUMNS)}  {progress.loss:.3f} nats a byte"
        notes = [*self._notes[:FIRST], *self._notes[FIRST:][-LATEST:]]
        if (left_out := len(self._notes) - len(notes)) > 0:
            notes.insert(FIRST, f"... {count(left_out, 'line')} ...")
        lines = [Text(line, style="bold", no_wrap=True, overflow="ellipsis") for line in notes]
        return Group(Text(head), Text(loss), grid, *lines)
