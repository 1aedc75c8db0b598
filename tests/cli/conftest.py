"""What tests of commands share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from attemper import cli

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def command(*arguments: object, columns: int = 200) -> tuple[int, str, str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr("sys.argv", ["attemper", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return command
