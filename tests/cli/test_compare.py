"""``attemper compare``: files, models and one of each; its mistakes."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from attemper import compare
from attemper.readings.reading import Reading
from tests.report import readings
from tests.support import encoder
from tests.support.command import Run, bad_usage, one_line


@pytest.fixture
def compared(run: Run) -> Run:
    return partial(run, "compare")


def reading() -> Reading:
    return readings.reading(*(readings.site(f"model.layers.{place}.self_attn") for place in range(2)))


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Two scans of one architecture; in the second one head is sharper."""
    one = reading()
    heads = list(one.sites[1].heads)
    heads[3] = dataclasses.replace(heads[3], normalized_entropy=0.125, max_logit=1e3)
    other = dataclasses.replace(one, sites=(one.sites[0], dataclasses.replace(one.sites[1], heads=tuple(heads))))
    paths = tmp_path / "before.json", tmp_path / "after.json"
    for path, scan in zip(paths, (one, other), strict=True):
        path.write_text(scan.to_json(), "utf-8")
    return paths


ENDS = ("before", "after")


def test_two_files_are_compared_by_name_with_a_line_and_a_table_of_the_largest_changes(compared: Run, files):
    code, out, err = compared(*files)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "some-model (before.json) -> some-model (after.json)"
    assert lines[1:3] == [f"{side}: precision not known, text not known, all rows, 256 tokens" for side in ENDS]
    assert " ".join(map(str.strip, lines[3:5])) == (
        "8 heads, 1 differs; mean normalised entropy 50.00% -> 40.62%, largest change 75 points in "
        "model.layers.1.self_attn, head 3: 87.5% -> 12.5%; how far rounding moves heads is not known, because a side "
        "does not say its precision."
    )
    assert lines[7].split()[:7] == ["model.layers.1.self_attn", "1", "3", "87.5", "->", "12.5", "-75"]


def test_json_is_the_document_of_the_library_and_html_the_page_beside_it(compared: Run, files, tmp_path: Path):
    code, out, err = compared(*files, "--json", "--html", tmp_path / "page.html")
    assert (code, err) == (0, "")
    names = "some-model (before.json)", "some-model (after.json)"
    assert json.loads(out) == compare(*files, names=names).to_dict()
    assert "some-model (after.json)" in (tmp_path / "page.html").read_text("utf-8")


def test_heads_are_listed_by_the_statistic_and_as_many_as_asked_for(compared: Run, files):
    _, out, _ = compared(*files, "--sort", "max_logit", "--top", 1)
    assert "mean largest logit" in out
    assert out.count("model.layers") == 2  # in the line and in the table
    assert "and 7 heads that changed less" in out


def test_a_file_of_schema_1_is_compared_with_one_of_schema_2(compared: Run, files):
    old = json.loads(files[0].read_text("utf-8")) | {"schema": 1}
    for site in old["sites"]:
        del site["layer"]
        for head in site["heads"]:
            for name in ("layer", "judged", "support_size", "mean_distance"):
                del head[name]
    files[0].write_text(json.dumps(old), "utf-8")
    assert compared(*files)[0] == 0


@pytest.mark.slow("takes seconds")
def test_two_models_are_scanned_on_one_text_and_a_file_stands_beside_a_model(compared: Run, tmp_path: Path):
    pytest.importorskip("transformers")
    text = tmp_path / "text.txt"
    text.write_text("Attention is a weighted mean. " * 20, encoding="utf-8")
    code, out, _ = compared(encoder.folder(), encoder.folder(), "--text", text, "--json")
    document = json.loads(out)
    assert code == 0
    assert len(document["heads"]) == 72
    assert {head["max_logit"]["change"] for head in document["heads"]} == {0.0}
    stored = tmp_path / "scan.json"
    stored.write_text(json.dumps(document), "utf-8")
    assert "'sites'" in compared(stored, encoder.folder(), "--text", text)[2]  # a comparison is no scan


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("before.json", "after.json", "--sort", "max_logits"), "Did you mean 'max_logit'?"),
        (("before.json", "after.json", "--text", "x.txt"), "both A and B are files or runs"),
        (("before.json",), "Missing argument 'B'"),
        (("before.json", "after.json", "--top", "0"), "--top"),
        (("before.json", "after.json", "--backend", "fast"), "backend must be 'auto' or one of"),
    ],
)
def test_bad_usage_ends_with_2(compared: Run, files, monkeypatch: pytest.MonkeyPatch, arguments: tuple, message: str):
    monkeypatch.chdir(files[0].parent)
    bad_usage(compared(*arguments), message)


def test_a_file_that_is_not_there_or_no_scan_is_named_in_one_line(compared: Run, files, tmp_path: Path):
    file, missing = tmp_path / "text.json", "Write one with `attemper scan MODEL --json > FILE.json`"
    one_line(compared(files[0], tmp_path / "missing.json"), 1, missing)
    for content, message in (("[1]", " is cut off, or nothing that attemper wrote"), ('{"schema": 2}', ": ")):
        file.write_text(content)
        one_line(compared(files[0], file), 1, f"{file}{message}")


def test_the_content_of_a_file_says_what_it_is_and_not_its_name(compared: Run, files, tmp_path: Path):
    one, other = (path.rename(path.with_suffix(".safetensors")) for path in files)
    assert compared(one, other)[0] == 0
    asked = compared(one, other, "--explain")
    assert "is not a fingerprint: --explain reads models and files of `attemper fingerprint`" in asked.err
    weights = tmp_path / "weights.safetensors"
    save_file({"w": torch.zeros(2)}, weights)
    one_line(compared(one, weights), 1, "weights.safetensors")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "is a GGUF file" in compared(one, tmp_path / "model.gguf")[2]
