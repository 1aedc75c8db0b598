"""``attemper demo``: a training of about a minute, watched; healthy, or with attention that collapses."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attemper.cli.output import INTERRUPTED, check_files, failure, print_json, say
from attemper.errors import InputError
from attemper.text import clean, clean_name, count

if TYPE_CHECKING:
    from attemper.lab.trained.demo import DemoRun, Outcome
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
    check_files(html, None)
    take = f"{count(steps, 'step')} ({STEPS} take about a minute)"
    say(f"demo: trains a small byte-level model on this Python's library, {take}")
    from attemper.cli.demo_view import view
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
    """The folder of the run, made if it is not there.

    Raises:
        InputError: it holds something, is no folder or cannot be made.
    """
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
