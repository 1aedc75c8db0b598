"""Readings as documents: what was written loads, older documents too, and an error says where a document is wrong."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attemper.errors import InputError
from attemper.readings.labels import layer_of
from attemper.readings.reading import Alarm, Reading, Skipped, VisibleKeyBucket
from tests.report.readings import FIXTURES, head, minilm, site


def reading() -> Reading:
    """Every kind of record with every field set, and sites with and without a layer."""
    buckets = (VisibleKeyBucket(1, 1, 2, 0.0, None), VisibleKeyBucket(32, 63, 8, 1.5, 0.4, 0.25))
    full = head(
        0, layer=3, judged=True, support_size=4.5, mean_distance=7.0, gini=0.5, by_visible_keys=buckets, empty_rows=1,
        batches=9, standard_errors={"entropy": 0.25},
    )  # fmt: skip
    first = replace(site("layers.3.attn"), heads=(full, head(1, None, layer=3)), layer=3, normalizer="entmax15")
    return Reading(
        "model", 12, "blocked", (first, site("attn", 2)), (Skipped("x", "why"),),
        (
            Alarm("layers.3.attn", 0, "diffuse", "notice", 0.99, 0.95, "said", "do", step=7),
            Alarm("attn", None, "drift", "warning", None, None, "said", "do"),
        ),
        sampled_rows=4, fewest_keys=16,
    )  # fmt: skip


def test_a_reading_is_the_same_after_it_was_written_and_loaded(tmp_path: Path) -> None:
    one = reading()
    file = tmp_path / "scan.json"
    file.write_text(one.to_json(indent=2), encoding="utf-8")
    assert Reading.from_dict(one.to_dict()) == one
    assert Reading.from_json(one.to_json()) == one
    assert Reading.from_json(f"\ufeff \n{one.to_json()}") == one
    assert Reading.from_json(file) == Reading.from_json(str(file)) == one
    assert Reading.from_json(one.to_json()).to_json() == one.to_json()


def test_a_document_of_schema_1_loads_with_what_schema_2_added() -> None:
    document = json.loads((FIXTURES / "minilm.json").read_text(encoding="utf-8"))
    assert document["schema"] == 1
    found = minilm()
    assert [site.layer for site in found.sites] == [0, 1, 2, 3, 4, 5]
    assert {head.layer for head in found.sites[2].heads} == {2}
    assert all(head.judged for head in found.heads)
    assert {(head.support_size, head.mean_distance) for head in found.heads} == {(None, None)}
    assert found.fewest_keys == 32
    assert found.to_dict()["schema"] == 2


def test_a_head_of_schema_1_is_judged_if_a_row_sees_32_keys() -> None:
    document = json.loads((FIXTURES / "minilm.json").read_text(encoding="utf-8"))
    buckets = document["sites"][0]["heads"][0]["by_visible_keys"]
    buckets[:] = [{**buckets[0], "from": 16, "to": 31}]
    heads = Reading.from_dict(document).sites[0].heads
    assert (heads[0].judged, heads[1].judged) == (False, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: {**d, "schema": 3}, r"this scan is of schema 3; this version of attemper reads 1 and 2"),
        (lambda d: {**d, "schema": True}, r"this scan is of schema True"),
        (lambda d: {"heads": []}, r"a scan is an object with 'schema' and 'sites'.*; got fields heads"),
        (lambda d: [d], r"a scan is an object with 'schema' and 'sites'.*; got list"),
        (lambda d: {**d, "sites": {}}, r"^sites must be a list, got \{\}"),
        (lambda d: {**d, "sites": [3]}, r"^sites\[0\] must be an object, got 3"),
        (lambda d: {**d, "tokens": 1.5}, r"^tokens must be a whole number, got 1\.5"),
        (lambda d: {**d, "model": None}, r"^model must be text, got None"),
        (lambda d: {name: d[name] for name in d if name != "backend"}, r"^the document has no 'backend'"),
        (lambda d: {**d, "alarms": [{"site": "x"}]}, r"^alarms\[0\] has no 'head'"),
        (lambda d: {**d, "skipped": [[]]}, r"^skipped\[0\] must be an object, got \[\]"),
    ],
)
def test_what_is_no_document_of_a_scan_is_told_with_its_place(change: Any, message: str) -> None:
    for schema in (1, 2):
        with pytest.raises(InputError, match=message):
            Reading.from_dict(change({**minilm().to_dict(), "schema": schema}))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_logit", "high", r"sites\[1\]\.heads\[0\]\.max_logit must be a number or null, got 'high'"),
        ("max_logit", float("nan"), r"sites\[1\]\.heads\[0\]\.max_logit must be .*, got nan: a missing value is null"),
        ("max_logit", 10**400, r"sites\[1\]\.heads\[0\]\.max_logit is beyond what a number can be"),
        ("judged", 1, r"sites\[1\]\.heads\[0\]\.judged must be true or false, got 1"),
        ("rows", True, r"sites\[1\]\.heads\[0\]\.rows must be a whole number, got True"),
        ("layer", "3", r"sites\[1\]\.heads\[0\]\.layer must be a whole number or null, got '3'"),
        ("by_visible_keys", [{"from": 1}], r"sites\[1\]\.heads\[0\]\.by_visible_keys\[0\] has no"),
        ("normalized_entropy_histogram", ["x"], r"histogram\[0\] must be a whole number, got 'x'"),
    ],
)
def test_a_field_of_another_type_is_told_with_its_place(name: str, value: Any, message: str) -> None:
    document = copy.deepcopy(minilm().to_dict())
    document["sites"][1]["heads"][0][name] = value
    with pytest.raises(InputError, match=message):
        Reading.from_dict(document)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (3, r"from_json\(source\) must be JSON text or the path of a file, got int"),
        ("nowhere.json", r"the file 'nowhere\.json' cannot be read: No such file"),
        ("", r"the file '' cannot be read"),
        ("x" * 5000, r"cannot be read: File name too long"),
        ("{", r"this text is not JSON: "),
        ('{"schema": NaN}', r"this text is not JSON: NaN is not a JSON number"),
        ("{" + '"a":{' * 100_000, r"this text is not JSON: "),
    ],
)
def test_what_cannot_be_read_is_told_in_one_line(source: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as raised:
        Reading.from_json(source)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_json_is_named(tmp_path: Path) -> None:
    file = tmp_path / "scan.json"
    file.write_bytes(b"\xff\xfe{")
    with pytest.raises(InputError, match=rf"the file {re.escape(repr(str(file)))} cannot be read: .*utf-8"):
        Reading.from_json(file)
    file.write_text("no", encoding="utf-8")
    with pytest.raises(InputError, match=rf"the file {re.escape(repr(str(file)))} is not JSON"):
        Reading.from_json(file)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("encoder.layer.3.attention", 3),
        ("blocks.2.attn", 2),
        ("model.layers.7.self_attn", 7),
        ("model.layers.7.self_attn#2", 7),
        ("transformer.h.11.attn", 11),
        ("visual.transformer.resblocks.4.attn", 4),
        ("encoder.block.3.layer.0.SelfAttention", 3),
        ("decoder.block.5.layer.1.EncDecAttention", 5),
        ("decoder.layers.2.encoder_attn", 2),
        ("transformer.layers.3.0.attend", 3),
        ("blocks.3.attn.0", 3),
        ("1.model.layers.7.self_attn", 7),
        ("0", 0),
        ("stages.1.attn", 1),
        ("attention", None),
        ("", None),
        ("attention2", None),
        ("attn#3", None),
        ("left.1.right.2", None),
        ("layers.0.blocks.1.attn", None),
        ("encoder.albert_layer_groups.0.albert_layers.0.attention", None),
        ("down_blocks.0.attentions.1.transformer_blocks.0.attn1", None),
        ("layers." + "9" * 5000, None),
        ("layers.\u0663.attn", None),
    ],
)
def test_the_layer_of_a_site_is_the_number_of_its_block_or_nothing(name: str, layer: int | None) -> None:
    assert layer_of(name) == layer
