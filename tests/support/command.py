"""The command line, run in this process."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from attemper import cli


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


def run_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> Ended:
    """``attemper`` with these arguments, to its end."""
    monkeypatch.setattr("sys.argv", ["attemper", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out, err = capsys.readouterr()
    return Ended(int(stop.value.code or 0), out, err)
