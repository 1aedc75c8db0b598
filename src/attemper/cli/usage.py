"""Bad usage, told with the nearest name where one was mistyped. Exit code 2, before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from attemper.checks import did_you_mean
from attemper.errors import BackendError, InputError
from attemper.text import shown

UsageError: Any = typer.BadParameter.__mro__[1]
"""Of the click that typer stands on: the package, or typer's own copy of it."""


class Verbs(TyperGroup):
    """The verbs of the command line; one that does not exist is answered with the nearest."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        verb = args[0] if args else ""
        if verb in self.commands or verb.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        return ctx.fail(f"there is no command {verb!r}.{did_you_mean(verb, self.commands)}")


@contextmanager
def usage_of(option: str) -> Iterator[None]:
    """What the library says of an option's value is bad usage: told before anything is loaded."""
    try:
        yield
    except (InputError, BackendError) as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def print_usage_error(error: Any) -> int:
    """Prints what was wrong, how the verb is used, and the nearest name; the exit code."""
    option = getattr(error, "option_name", None)
    choice = re.fullmatch(r"(?:Value error, )?('(.*?)' is not one of (.*))", error.message)
    if option is not None and getattr(error, "possibilities", None) is not None:
        error.message = f"there is no option {option!r}.{did_you_mean(option, error.possibilities)}"
        error.possibilities = None
    elif choice:
        error.message = choice[1] + did_you_mean(choice[2], re.findall(r"'(.*?)'", choice[3]))
    error.message = shown(error.message)
    error.show()
    return int(error.exit_code)
