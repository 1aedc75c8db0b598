"""The command line, run in this process."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest
import typer.main

from attemper import cli

# Typer reads the types of every option of every verb each time that the program is called: in a process, once.
typer.main.__dict__["get_command"] = cache(typer.main.get_command)


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


Run = Callable[..., Ended]


def run_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> Ended:
    """``attemper`` with these arguments, to its end."""
    monkeypatch.setattr("sys.argv", ["attemper", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out, err = capsys.readouterr()
    return Ended(int(stop.value.code or 0), out, err)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``run(*arguments, stdin="", columns=200, **environment)``: how the command ended."""

    def command(*arguments: object, stdin: str | bytes = "", columns: int = 200, **environment: object) -> Ended:
        given = stdin if isinstance(stdin, bytes) else stdin.encode()
        capsys.readouterr()  # what was printed before
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given)))
            for name, value in {"COLUMNS": columns, **environment}.items():
                patch.setenv(name, str(value))
            return run_command(patch, capsys, *arguments)

    return command


def bad_usage(ended: Ended, message: str) -> None:
    """The command ended with 2 and ``message``, whose lines may be broken and framed, and nothing on stdout."""
    assert (ended.code, ended.out) == (2, "")
    assert message in " ".join(ended.err.replace("│", " ").split()), ended.err


def one_line(ended: Ended, code: int, message: str) -> None:
    """The command failed with one line on stderr that holds ``message``, and nothing on stdout."""
    assert (ended.code, ended.out) == (code, "")
    assert ended.err.count("\n") == 1, ended.err
    assert ended.err.startswith("attemper: ")
    assert message in ended.err, ended.err
