"""The reference of the command line, from typer: every verb, its arguments and options, as ``--help`` has them."""

from __future__ import annotations

import html
import inspect
import re
from collections.abc import Iterator
from typing import Any

import typer

from attemper import cli

TITLE = "The command line"


def page() -> str:
    """The Markdown of the whole reference."""
    group: Any = typer.main.get_command(cli.app)
    parts = [f"# {TITLE}", about(), *section("attemper", group, "## `attemper`")]
    for name, verb in group.commands.items():
        parts += section(f"attemper {name}", verb, f"## `attemper {name}`")
    return "\n\n".join(parts) + "\n"


def about() -> str:
    """What the package of the command line says of exit codes and streams."""
    said = inspect.getdoc(cli) or ""
    return prose(said.partition("\n\n")[2])


def section(called: str, verb: Any, title: str) -> Iterator[str]:
    """Title, what it does, how it is called, and a table of what it takes."""
    context = verb.make_context(called, [], resilient_parsing=True)
    yield title
    yield prose(verb.help or "")
    yield f"```text\n{verb.get_usage(context).removeprefix('Usage: ')}\n```"
    records = [parameter.get_help_record(context) for parameter in verb.get_params(context)]
    yield "\n".join(["| argument or option | |", "|---|---|", *(row(*record) for record in records if record)])


def row(form: str, said: str) -> str:
    return f"| {code(form)} | {prose(said).replace('|', chr(92) + '|')} |"


def code(form: str) -> str:
    """An option in a cell of a table. ``|`` ends a cell of Markdown even inside a code span."""
    return f"<code>{html.escape(form).replace('|', '&#124;')}</code>"


def prose(text: str) -> str:
    """Help as Markdown: literals keep one backtick, angle brackets and stars are text."""
    kept = re.split(r"(``?[^`]+``?)", text)
    kept[1::2] = [f"`{one.strip('`')}`" for one in kept[1::2]]
    kept[::2] = [re.sub(r"([<>*_\[\]])", r"\\\1", one) for one in kept[::2]]
    return "".join(kept)
