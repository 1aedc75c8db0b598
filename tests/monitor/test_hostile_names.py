"""Names of models and sites come from others: no table lets one clear the terminal, or pass for another name."""

from __future__ import annotations

import dataclasses
import io
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch import nn

import attemper
from attemper import Scan, compare
from attemper.cli.heads import HeadTable, Order
from attemper.readings.reading import Reading, Skipped
from attemper.types import Calibration
from tests.report import readings

NAME = "a\x1b[2J\x1b]0;owned\x07b\x9bm\u202ecba\u2066d\r\ne[red]f[/red]:smiley:"
SHOWN = "a\\u001b[2J\\u001b]0;owned\\u0007b\\u009bm\\u202ecba\\u2066d\\u000d\\u000ae[red]f[/red]:smiley:"


def reading() -> Reading:
    sites = (readings.site(NAME), readings.site(f"other.{NAME}", mode=NAME, kind=NAME))
    alarm = dataclasses.replace(readings.alarm("logits", "warning", NAME, 0, 500.0), advice=NAME, kind=NAME)
    made = readings.reading(*sites, alarms=(alarm,), skipped=(Skipped(NAME, NAME),))
    return dataclasses.replace(made, model=NAME, backend=NAME)


def calibration() -> Calibration:
    return Calibration(
        temperatures={NAME: (1.0,)}, before=1.0, after=1.0, interval=(0.0, 0.0), per="head", method="grid", fitting=1,
        held_out=1, evaluations=1, converged=True, bounds=(0.5, 1.0),
    )  # fmt: skip


TABLES: dict[str, Callable[[], Any]] = {
    "scan": lambda: Scan(reading(), {}),
    "list of heads": lambda: HeadTable(reading(), Order("max_logit")),
    "comparison": lambda: compare(reading(), dataclasses.replace(reading(), sites=reading().sites[:1])),
    "calibration": calibration,
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("width", [60, 400])
def test_no_control_or_bidirectional_character_of_a_name_reaches_the_terminal(name: str, width: int):
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(TABLES[name]())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs")} == {"\n"}
    if width == 400:
        assert SHOWN in text


def test_a_printed_scan_and_comparison_are_escaped_too():
    for text in (str(Scan(reading(), {})), str(compare(reading(), reading())), repr(Scan(reading(), {}))):
        assert "\x1b" not in text
        assert "\u202e" not in text


def test_a_file_that_is_no_scan_is_told_by_its_shown_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from attemper.cli.output import exit_code

    path = tmp_path / "a\x1b[2J\u202e.json"
    path.write_text("[]")
    assert exit_code(lambda: compare(path, path)) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "\x1b" not in err
    assert "\u202e" not in err


def test_a_warning_of_a_watch_writes_out_what_would_steer_a_terminal(monkeypatch: pytest.MonkeyPatch):
    model = nn.Sequential(nn.Linear(2, 2))
    watch = attemper.watch(model)
    try:
        with pytest.warns(UserWarning, match=r"\\u001b\[2J could not be measured: \\u202e"):
            watch.note_failure("\x1b[2J", RuntimeError("\u202e"))
    finally:
        watch.close()
