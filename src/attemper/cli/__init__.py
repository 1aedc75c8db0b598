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
app.command("scan", short_help="Entropy and logit size of every head of a model.")(scan)
app.command("merge", short_help="Parts of a scan as one reading.")(merge)
app.command("compare", short_help="What differs between two models, scans or runs, by head.")(compare)
app.command("pattern", short_help="Every head on one text, as a page to look at.")(pattern)
app.command("check", short_help="Whether every token sees exactly what it should.")(check)
app.command("fingerprint", short_help="Keep what attention does with a text, to compare elsewhere.")(fingerprint)
app.command("runs", short_help="The stored runs below a folder.")(runs)
app.command("show", short_help="A run at a glance: layers over its steps, heads, alarms.")(show)
app.command("watch", short_help="Follow a run in the terminal while it is written.")(watch)
app.command("report", short_help="A run as a page to look at: one HTML file, offline.")(report)
app.command("export", short_help="A run as one file for other programs.")(export)
app.command("calibrate", short_help="Temperatures that minimise a model's loss on a text.")(calibrate)
app.command("demo", short_help="Train a small model and watch every head of it.")(demo)
app.command("lab", short_help="Small experiments: why attention is scaled, and temperature.")(lab)
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
    """The ``attemper`` command, for a program of yours: an error of the user's is one line on stderr, not a traceback.

    Raises:
        SystemExit: always, with the exit code.
    """
    raise SystemExit(_code())


def program() -> NoReturn:
    """The ``attemper`` command as a process of its own, which ends with it."""
    leave(_code())


def _code() -> int:
    return exit_code(lambda: app(prog_name="attemper", standalone_mode=False))
