"""The command line: one file a verb, each parses, calls one library function and prints.

Exit codes: 0 fine, 1 failed, 2 bad usage, 3 alarms with ``--fail-on-alarm``, a fault that ``compare --explain`` names
or a rule that ``check`` finds broken, 130 interrupted. With ``--json`` stdout carries one JSON document and nothing
else; progress and errors go to stderr.
"""

from __future__ import annotations

from typing import Annotated, NoReturn

import typer

from attemper import __version__
from attemper.cli.bench import bench
from attemper.cli.calibrate import calibrate
from attemper.cli.check import check
from attemper.cli.compare import compare
from attemper.cli.demo import demo
from attemper.cli.doctor import doctor
from attemper.cli.export import export, report
from attemper.cli.fingerprint import fingerprint
from attemper.cli.lab import lab
from attemper.cli.merge import merge
from attemper.cli.output import Verbs, exit_code
from attemper.cli.pattern import pattern
from attemper.cli.process import leave
from attemper.cli.runs import runs
from attemper.cli.scan import scan
from attemper.cli.show import show, watch

app = typer.Typer(
    cls=Verbs,
    name="attemper",
    help="Measure and temper the sharpness of attention.",
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("scan", short_help="Measure entropy and largest logit of every head of a model.")(scan)
app.command("merge", short_help="Merge the parts of a scan into one reading.")(merge)
app.command("compare", short_help="Compare two models, scans or runs, head by head.")(compare)
app.command("pattern", short_help="Write every head on one text as an HTML page.")(pattern)
app.command("check", short_help="Check that every token sees exactly what it should.")(check)
app.command("fingerprint", short_help="Record what attention does with a text, to compare elsewhere.")(fingerprint)
app.command("runs", short_help="List the stored runs below a folder.")(runs)
app.command("show", short_help="Show a run at a glance: layers, heads and alarms.")(show)
app.command("watch", short_help="Follow a run in the terminal while it trains.")(watch)
app.command("report", short_help="Write a run as one HTML page that opens offline.")(report)
app.command("export", short_help="Export a run as one file for other programs.")(export)
app.command("calibrate", short_help="Find temperatures that minimise a model's loss on a text.")(calibrate)
app.command("demo", short_help="Train a small model and watch every head of it.")(demo)
app.command("lab", short_help="Run small experiments on scaling and temperature.")(lab)
app.command("bench", short_help="Time attention with every statistic on this CPU.")(bench)
app.command("doctor")(doctor)


@app.callback()
def about(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", "-V", help="Print the version.")] = False,
) -> None:
    """Measure and temper the sharpness of attention."""
    if version:
        print(f"attemper {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def main() -> NoReturn:
    """Runs the ``attemper`` command inside your program. A user error is one line on stderr, not a traceback.

    Raises:
        SystemExit: always, with the exit code.
    """
    raise SystemExit(_code())


def program() -> NoReturn:
    """Runs the ``attemper`` command and ends the process with its exit code."""
    leave(_code())


def _code() -> int:
    return exit_code(lambda: app(prog_name="attemper", standalone_mode=False))
