"""``attemper scan`` with ``--sort``, ``--top`` and ``--csv``: heads one by one, in order, with every digit."""

from __future__ import annotations

import csv
import io
import sys
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from attemper import InputError, Scan
from attemper.cli.heads import STATISTICS, HeadTable, Order, check_order, heads_csv
from attemper.readings.reading import column_of
from tests.report import readings
from tests.support.command import Run, bad_usage, one_line


@pytest.fixture
def scanned(run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``attemper scan`` of a reading that is there."""
    monkeypatch.setattr(sys.modules["attemper.cli.scan"], "scan_of", lambda *_, **__: Scan(readings.minilm(), {}))
    return partial(run, "scan")


def test_heads_are_in_order_from_either_end_and_those_without_a_number_last():
    one = readings.reading(readings.site("a"), readings.silent("b"))
    values = [head.normalized_entropy for _, head in Order("normalized_entropy").heads(one)]
    assert values[:4] == sorted((value for value in values if value is not None), reverse=True)
    assert values[4:] == [None] * 4
    smallest = [head.normalized_entropy for _, head in Order("normalized_entropy", smallest_first=True).heads(one)]
    assert smallest == [*values[3::-1], *[None] * 4]
    assert len(Order("max_logit", top=3).heads(one)) == 3


def test_a_minus_asks_for_the_smallest_and_top_alone_for_the_sharpest():
    assert check_order(None, None) is None
    assert check_order("max_logit", None) == Order("max_logit")
    assert check_order("-max_logit", 5) == Order("max_logit", smallest_first=True, top=5)
    assert check_order(None, 5) == Order("normalized_entropy", smallest_first=True, top=5)
    with pytest.raises(InputError, match=r"the statistic must be one of .* Did you mean 'max_logit'"):
        check_order("-max_logits", None)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_list_fits_its_terminal_and_cuts_no_number(scanned: Run, columns: int):
    code, out, err = scanned("--sort", "-entropy_nats", "--top", 4, columns=columns)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= columns
    assert "4 of 72 heads, smallest entropy_nats first" in " ".join(out.split())
    least = sorted(head.entropy_nats for head in readings.minilm().heads if head.entropy_nats is not None)[:4]
    assert all(f"{value:.5g}" in out for value in least)
    assert "leave out --sort and --top" in out  # the reading has alarms, which a list leaves out


def test_csv_has_a_row_for_each_head_with_every_digit(scanned: Run):
    code, out, err = scanned("--csv", "-")
    assert (code, err) == (0, "")
    rows = list(csv.DictReader(io.StringIO(out)))
    one = readings.minilm()
    assert len(rows) == len(one.heads) == 72
    assert list(rows[0])[:5] == ["site", "layer", "kind", "mode", "head"]
    assert set(STATISTICS) < set(rows[0])
    for row, head in zip(rows, one.heads, strict=True):
        for name in STATISTICS:
            value = column_of(head, name)
            assert row[name] == "" if value is None else float(row[name]) == value


def test_csv_has_the_columns_of_pandas():
    pytest.importorskip("pandas")
    header = heads_csv(readings.minilm(), None).splitlines()[0].split(",")
    assert set(header) == set(Scan(readings.minilm(), {}).to_pandas().columns)


def test_csv_goes_into_a_file_in_the_order_asked_for_beside_the_json(scanned: Run, tmp_path: Path):
    path = tmp_path / "heads.csv"
    code, out, err = scanned("--csv", path, "--sort", "max_logit", "--top", 2, "--json")
    assert (code, err) == (0, "")
    assert out.startswith('{"schema": 2')
    rows = list(csv.DictReader(io.StringIO(path.read_text("utf-8"))))
    logits = sorted((head.max_logit for head in readings.minilm().heads if head.max_logit is not None), reverse=True)
    assert [float(row["max_logit"]) for row in rows] == logits[:2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--csv", "-", "--json"), "prints to stdout, and so does --json"),
        (("--sort", "max_logit", "--json"), "not --json, which keeps the order of the model"),
        (("--sort", "entropy"), "Did you mean 'entropy_nats'?"),
        (("--top", "0"), "--top"),
    ],
)
def test_what_cannot_be_together_is_bad_usage(scanned: Run, arguments: tuple[str, ...], message: str):
    bad_usage(scanned(*arguments), message)


def test_a_table_or_page_that_cannot_be_written_is_told_before_anything_is_scanned(scanned: Run, tmp_path: Path):
    one_line(scanned("--csv", tmp_path / "missing" / "heads.csv"), 1, "the table cannot be written to")
    one_line(scanned("--html", "-"), 1, "--html writes a file, not to stdout: name one, such as page.html.")


def test_names_are_shown_as_they_are_and_not_as_markup():
    one = readings.reading(readings.site("layers[red].0\x1b[2J"), readings.site("b[/red]"))
    console = Console(file=io.StringIO(), width=200)
    console.print(HeadTable(one, Order("max_logit")))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "layers[red].0\\u001b[2J" in text
    assert "b[/red]" in text
    assert "\x1b" not in text
