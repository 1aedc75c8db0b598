"""The command line: one file a verb, each parses, calls one library function and prints.

Exit codes: 0 fine, 1 failed, 2 bad usage, 3 alarms with ``--fail-on-alarm`` or a fault that ``compare --explain``
names, 130 interrupted. With ``--json`` stdout carries one JSON document and nothing else; progress and errors go
to stderr.
"""

from __future__ import annotations

from typing import Annotated

import typer

from attemper import __version__
from attemper.cli.bench import bench
from attemper.cli.calibrate import calibrate
from attemper.cli.compare import compare
from attemper.cli.demo import demo
from attemper.cli.doctor import doctor
from attemper.cli.export import export, report
from attemper.cli.fingerprint import fingerprint
from attemper.cli.lab import lab
from attemper.cli.merge import merge
from attemper.cli.output import Verbs, exit_code
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
app.command("scan")(scan)
app.command("merge")(merge)
app.command("compare")(compare)
app.command("fingerprint")(fingerprint)
app.command("runs")(runs)
app.command("show")(show)
app.command("watch")(watch)
app.command("report")(report)
app.command("export")(export)
app.command("calibrate")(calibrate)
app.command("demo")(demo)
app.command("lab")(lab)
app.command("bench")(bench)
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


def main() -> None:
    """The ``attemper`` command: an error of the user's is one line on stderr, not a traceback."""
    raise SystemExit(exit_code(lambda: app(prog_name="attemper", standalone_mode=False)))
