"""Heads whose rows see too few keys are not judged, and that is said wherever alarms would be shown."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import attemper
from attemper import InputError
from attemper.cli import app
from attemper.integrations.training import Monitor
from attemper.readings import limits
from attemper.readings.reading import FEWEST_KEYS, HeadReading
from tests.monitor.tiny_models import TINY, inputs
from tests.sites.own_models import Own

SRC = Path(attemper.__file__).parent


def scanned(tokens: int, **options: Any) -> attemper.Scan:
    torch.manual_seed(0)
    return attemper.scan(Own().eval(), [torch.randn(2, tokens, 32)], **options)


def watched(tokens: int, **options: Any) -> attemper.Scan:
    torch.manual_seed(0)
    model = Own().eval()
    with attemper.watch(model, **options) as watch:
        model(torch.randn(2, tokens, 32))
    return watch.table()


@pytest.mark.parametrize("read", [scanned, watched])
def test_three_tokens_are_too_few_to_judge_and_nothing_says_no_alarms(read: Callable[..., attemper.Scan]) -> None:
    scan = read(3)
    said = "too few keys to judge (32 needed): all 4 heads; give longer inputs or lower fewest_keys."
    assert [head.judged for head in scan.sites[0].heads] == [False] * 4
    assert scan.notes == (said,)
    document = json.loads(scan.to_json())
    assert (document["notes"], document["fewest_keys"]) == ([said], 32)
    assert said in str(scan)
    assert said in repr(scan)
    assert "no alarms" not in str(scan)


@pytest.mark.parametrize("read", [scanned, watched])
def test_rows_that_see_enough_keys_are_judged(read: Callable[..., attemper.Scan]) -> None:
    scan = read(32)
    assert [head.judged for head in scan.sites[0].heads] == [True] * 4
    assert scan.notes == ()
    assert "\nno alarms" in str(scan)


def test_heads_that_are_not_judged_are_named_beside_those_that_are() -> None:
    scan = attemper.scan(TINY["t5"].build().eval(), [inputs("encoder-decoder", None)])
    judged = {site.name: all(head.judged for head in site.heads) for site in scan.sites}
    assert set(judged.values()) == {True, False}
    short = [name for name, enough in judged.items() if not enough]
    many = sum(len(site.heads) for site in scan.sites if not judged[site.name])
    assert scan.notes == (
        f"too few keys to judge (32 needed): {many} of {len(scan.reading.heads)} heads, at "
        f"{', '.join(f'{name} (4)' for name in short)}; give longer inputs or lower fewest_keys.",
    )
    text = " ".join(str(scan).split())
    assert scan.notes[0] in text
    if not scan.alarms:
        assert f"no alarms in the {len(scan.reading.heads) - many} of {len(scan.reading.heads)} heads that" in text


def test_alarms_that_need_no_keys_are_raised_beside_the_note() -> None:
    text = str(scanned(3, limits={"logits": -1e9}))
    assert "warning logits: 4 heads" in text
    assert "too few keys to judge (32 needed): all 4 heads" in text


def test_a_head_without_a_valid_row_is_not_said_to_see_too_few_keys() -> None:
    model = Own().eval()
    with torch.no_grad():
        model.qkv.weight[:8] = torch.nan  # queries of the first head
    scan = attemper.scan(model, [torch.randn(2, 40, 32)])
    assert [head.judged for head in scan.sites[0].heads] == [False, True, True, True]
    assert scan.notes == ("no valid row to judge: 1 of 4 heads, at Own (1).",)


@pytest.mark.parametrize("read", [scanned, watched])
@pytest.mark.parametrize("fewest", [2, 16, 20, 31, 33])
def test_a_head_is_judged_by_the_rows_that_see_as_many_keys_as_told(
    fewest: int, read: Callable[..., attemper.Scan]
) -> None:
    scan = read(40, fewest_keys=fewest, limits={"diffuse": -1.0})
    stats = scan.row_statistics(scan.sites[0].name)
    enough = stats.visible_keys >= fewest
    head = scan.sites[0].heads[1]
    buckets = [bucket for bucket in head.by_visible_keys if bucket.first >= fewest]
    assert head.judged
    assert min(bucket.first for bucket in buckets) == fewest if fewest & (fewest - 1) else True
    assert sum(bucket.rows for bucket in buckets) == int(enough[:, 1].sum())
    assert sum(bucket.rows for bucket in head.by_visible_keys) == head.rows == 80
    assert all(one.last < two.first for one, two in zip(head.by_visible_keys, head.by_visible_keys[1:], strict=False))
    wanted = stats.normalized_entropy[:, 1][enough[:, 1]].double().mean()
    (alarm,) = (alarm for alarm in scan.alarms if (alarm.kind, alarm.head) == ("diffuse", 1))
    assert alarm.value == pytest.approx(float(wanted), rel=1e-6 if read is scanned else 2**-16)  # 15 bits are kept
    assert not any(head.judged for head in read(fewest - 1, fewest_keys=fewest).reading.heads)
    assert all(head.judged for head in read(fewest, fewest_keys=fewest).reading.heads)


def test_fewest_keys_changes_nothing_but_the_buckets_and_what_is_judged() -> None:
    plain, other = scanned(40).sites[0].heads, scanned(40, fewest_keys=23).sites[0].heads
    for one, two in zip(plain, other, strict=True):
        for name in (field.name for field in fields(HeadReading) if field.name not in ("by_visible_keys", "roles")):
            first, second = getattr(one, name), getattr(two, name)
            assert first == (second if second is None else pytest.approx(second, rel=1e-12)), name


@pytest.mark.parametrize("fewest", [1, 0, -3, 2.0, True, "32", None])
@pytest.mark.parametrize("read", [scanned, watched])
def test_what_is_no_number_of_keys_is_refused(read: Callable[..., attemper.Scan], fewest: Any) -> None:
    with pytest.raises(
        InputError, match=rf"{'scan' if read is scanned else 'watch'}\(fewest_keys=...\) must be an int of at least 2"
    ):
        read(40, fewest_keys=fewest)


def test_the_number_of_keys_that_is_enough_stands_in_one_place() -> None:
    for function in (attemper.scan, attemper.watch, limits.alarms):
        assert inspect.signature(function).parameters["fewest_keys"].default is FEWEST_KEYS
    assert FEWEST_KEYS == 32
    sources = [path.read_text("utf-8") for path in SRC.rglob("*.py")]
    assert sum(len(re.findall(r"^FEWEST_KEYS\b.*=", text, re.MULTILINE)) for text in sources) == 1


def test_the_command_line_takes_fewest_keys(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("Half a row of text.")
    run = CliRunner().invoke
    plain = run(app, ["scan", "--text", str(text), "--json"])
    assert json.loads(plain.stdout)["notes"][0].startswith("too few keys to judge (32 needed): all 16 heads")
    told = run(app, ["scan", "--text", str(text), "--json", "--fewest-keys", "19"])
    document = json.loads(told.stdout)
    assert (document["notes"], document["fewest_keys"]) == ([], 19)
    assert all(head["judged"] for site in document["sites"] for head in site["heads"])
    assert run(app, ["scan", "--fewest-keys", "1"]).exit_code == 2


class Tower(nn.Module):
    """Two attentions over inputs of other lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.long, self.short = Own(), Own()

    def forward(self, x: Tensor) -> Tensor:
        return self.long(x).sum() + self.short(x[:, :5]).sum()


def trained(**options: Any) -> Monitor:
    """A monitor after two steps."""
    monitor = Monitor(
        every=1, rows=None, stats=("max_logit",), trackers=None, max_keys=100, filter=None, on_alarm=None, **options
    )  # fmt: skip
    model = Tower().train()
    monitor.begin(model)
    for step in (1, 2):
        model(torch.randn(2, 40, 32))
        monitor.step(step)
    monitor.close()
    return monitor


def test_a_callback_says_once_what_is_not_judged(caplog: pytest.LogCaptureFixture) -> None:
    trained()
    (told,) = (record for record in caplog.records if "too few keys" in record.getMessage())
    assert told.levelname == "WARNING"
    assert "step 1: too few keys to judge (32 needed): 4 of 8 heads, at short (4)" in told.getMessage()


def test_a_callback_takes_fewest_keys(caplog: pytest.LogCaptureFixture) -> None:
    monitor = trained(fewest_keys=4)
    assert "too few keys" not in caplog.text
    assert monitor.last is not None
    assert monitor.last.reading.fewest_keys == 4
    assert monitor.last.notes == ()
