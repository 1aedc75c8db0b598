"""A scan as an object: its document, its table for pandas, its table in a terminal and what tells its sites apart."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attemper
from attemper import Scan
from attemper.errors import InputError, MissingExtraError
from attemper.readings.reading import column_of
from attemper.readings.roles import ROLES
from attemper.readings.stacks import Stack
from tests.report import readings
from tests.sites.own_models import Own


def scanned() -> attemper.Scan:
    model = torch.nn.Sequential(Own().eval(), torch.nn.Flatten(2), torch.nn.Identity())
    with attemper.watch(model) as watch:
        model(torch.randn(2, 40, 32))
    return watch.table()


def test_to_pandas_has_one_row_for_each_head_and_a_column_for_each_number() -> None:
    pytest.importorskip("pandas")
    scan = scanned()
    frame = scan.to_pandas()
    heads = [(site, head) for site in scan.sites for head in site.heads]
    assert len(frame) == len(heads) == 4
    numbers = [field.name for field in dataclasses.fields(heads[0][1])]
    left_out = {"normalized_entropy_histogram", "by_visible_keys", "batches", "standard_errors", "roles"}
    rest = [name for name in numbers if name not in {*left_out, "layer"}]
    assert list(frame.columns) == ["site", "layer", "kind", "mode", *rest, "role", *(role.column for role in ROLES)]
    for place, (site, head) in enumerate(heads):
        line = frame.iloc[place]
        assert (line["site"], line["kind"], line["mode"]) == (site.name, site.kind, site.mode) == ("0", "self", "eval")
        assert line["layer"] == head.layer == 0
        for name in frame.columns[4:]:
            value = column_of(head, name)
            assert line[name] == value if value is not None else line[name] is None or line[name] != line[name], name
    assert list(frame["head"]) == [0, 1, 2, 3]
    assert len(set(frame["entropy_nats"])) == 4
    assert list(frame["rows"]) == [80] * 4


def test_a_scan_loaded_from_json_shows_the_same_and_has_no_rows(tmp_path: Path) -> None:
    scan = scanned()
    file = tmp_path / "scan.json"
    file.write_text(scan.to_json(), encoding="utf-8")
    for loaded in (attemper.Scan.from_json(scan.to_json()), attemper.Scan.from_json(file)):
        assert loaded.reading == scan.reading
        assert str(scan).startswith(str(loaded))  # a watch says also what its history has nothing to judge of
        with pytest.raises(InputError, match=r"row_statistics\('0'\): this scan was loaded from JSON"):
            loaded.row_statistics("0")


def test_the_layers_in_a_frame_are_whole_numbers_or_missing() -> None:
    pandas = pytest.importorskip("pandas")
    scan = scanned()
    site = scan.sites[0]
    heads = tuple(dataclasses.replace(head, layer=None) for head in site.heads)
    other = dataclasses.replace(site, name="attn", layer=None, heads=heads)
    frame = attemper.Scan(dataclasses.replace(scan.reading, sites=(site, other)), None).to_pandas()
    assert frame["layer"].dtype == "Int64"
    assert [None if pandas.isna(layer) else layer for layer in frame["layer"]] == [0] * 4 + [None] * 4


def test_the_frame_of_a_watch_is_that_of_its_table() -> None:
    pytest.importorskip("pandas")
    model = Own().eval()
    with attemper.watch(model) as watch:
        model(torch.randn(2, 40, 32))
    assert watch.to_pandas().equals(watch.table().to_pandas())


def test_without_pandas_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match=r"Scan.to_pandas needs the package pandas.*'attemper\[pandas\]'"):
        scanned().to_pandas()


def test_scans_are_loaded_shown_and_compared_without_torch(tmp_path: Path) -> None:
    file = tmp_path / "scan.json"
    file.write_text(scanned().to_json(), encoding="utf-8")
    code = f"""
import sys
import attemper
scan = attemper.Scan.from_json({str(file)!r})
changes = attemper.compare(scan, scan)
print(scan, scan._repr_html_(), changes, changes._repr_html_(), scan.to_html({str(tmp_path / "scan.html")!r}))
changes.to_html({str(tmp_path / "changes.html")!r})
assert not {{"torch", "numpy"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_tables_say_since_when_an_alarm_stands_and_count_layers_as_layers():
    alarms = (
        readings.alarm("layer_fallen", "warning", "layers.0", None, 0.01, step=30, since=30),
        readings.alarm("fallen", "warning", "layers.1", 2, 0.01, step=40, since=40),
        readings.alarm("fallen", "warning", "layers.1", 3, 0.01, step=20, since=20),
        readings.alarm("diffuse", "notice", "layers.1", 0, 0.99, step=40, since=40),
        readings.alarm("logits", "warning", "layers.1", 0, 200.0),
    )
    lines = str(Scan(readings.reading(readings.site("layers.0"), alarms=alarms), None)).splitlines()
    assert [line for line in lines if line.startswith(("warning", "notice"))] == [
        "warning layer_fallen: 1 layer, since step 30",
        "warning fallen: 2 heads, since step 20",
        "warning logits: 1 head",
        "notice diffuse: 1 head, since step 40",
    ]


@pytest.mark.parametrize(
    ("names", "column", "labels"),
    [
        (("layers.3.attn", "layers.7.attn"), "layer", ("3", "7")),
        (("stages.0.blocks.0", "stages.0.blocks.1"), "site", ("0.0", "0.1")),
        (("tap", "tap#2"), "site", ("–", "#2")),
        (("layers.0.attn", "layers.0.attn#2"), "site", ("0", "0#2")),
        (("left", "right"), "site", ("0", "1")),
    ],
)
def test_a_column_is_called_layer_only_where_it_has_layers(
    names: tuple[str, ...], column: str, labels: tuple[str, ...]
):
    stack = Stack("*", "self", "eval", tuple(map(readings.site, names)), (0, 1))
    assert stack.column == column
    assert stack.labels == labels
