"""The command line: one file a verb, each parses, calls one library function and prints.

Exit codes: 0 fine, 1 failed, 2 bad usage, 3 alarms with ``--fail-on-alarm``. With ``--json`` stdout carries one JSON
document and nothing else; progress and errors go to stderr.
"""

from __future__ import annotations

import sys

import typer

from attemper.cli.bench import bench
from attemper.cli.calibrate import calibrate
from attemper.cli.doctor import doctor
from attemper.cli.lab import lab
from attemper.cli.scan import scan
from attemper.errors import BackendError, InputError, MissingExtraError

app = typer.Typer(
    name="attemper",
    help="Measure and temper the sharpness of attention.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("scan")(scan)
app.command("calibrate")(calibrate)
app.command("lab")(lab)
app.command("bench")(bench)
app.command("doctor")(doctor)


@app.callback()
def about() -> None:
    """Measure and temper the sharpness of attention."""


def main() -> None:
    """The ``attemper`` command: an error of the user's is one line on stderr, not a traceback."""
    try:
        app()
    except (InputError, BackendError, MissingExtraError) as error:
        print(f"attemper: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        # The reader went away (`attemper scan ... | head`): that is its right.
        sys.stderr.close()
        sys.exit(1)
