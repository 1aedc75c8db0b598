"""``attemper.open`` and ``attemper.compare``: whatever attemper wrote, and two of any one kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import attemper
from attemper.lab.model import ByteConfig, ByteModel
from attemper.types import Comparison, Explanation, Fingerprint, Run

BATCH = torch.arange(48).reshape(2, 24) % 256


@pytest.fixture
def model() -> ByteModel:
    torch.manual_seed(0)
    return ByteModel(ByteConfig(layers=1, heads=2, width=16, context=32)).eval()


def test_content_says_what_a_file_is_whatever_its_name(model: ByteModel, tmp_path: Path):
    scan, print_ = attemper.scan(model, [BATCH]), attemper.fingerprint(model, [BATCH])
    (tmp_path / "a.txt").write_text(scan.to_json(), "utf-8")
    scan.save(tmp_path / "b.bin")
    print_.save(tmp_path / "c.st").rename(tmp_path / "c.json")
    with attemper.watch(model, store=tmp_path / "run", every=1) as watch:
        watch.step()
        model(BATCH)
        watch.step()
    assert attemper.open(tmp_path / "a.txt").reading.sites == scan.reading.sites
    assert attemper.open(tmp_path / "b.bin").merge().tokens == scan.tokens
    assert isinstance(attemper.open(tmp_path / "c.json"), Fingerprint)
    for path in (tmp_path / "run", *(tmp_path / "run").glob("*.sqlite")):
        with attemper.open(path) as run:
            assert isinstance(run, Run)
            assert len(run.sites) == 1


def test_what_is_something_else_is_one_clear_error(tmp_path: Path):
    (tmp_path / "notes.txt").write_bytes(b"notes of mine, and no more")
    (tmp_path / "empty").touch()
    for name, reason in (
        ("notes.txt", "is cut off, or nothing that attemper wrote"),
        ("empty", "is cut off, or nothing that attemper wrote"),
        ("none", "there is nothing at"),
        (".", "there is no run at"),
    ):
        with pytest.raises(attemper.InputError, match=reason):
            attemper.open(tmp_path / name)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(attemper.InputError, match=r"there is no run at .*This is a model: attemper scan "):
        attemper.open(tmp_path)
    for wrong in (3, None, ""):
        with pytest.raises(attemper.InputError, match=r"open\(path\) must be a path"):
            attemper.open(wrong)  # pyright: ignore[reportArgumentType]


def dated(comparison: Comparison) -> dict[str, Any]:
    """All of it but when its sides were read, to the second."""
    found = comparison.to_dict()
    assert all(side.pop("date") for side in found["sides"].values())
    return found


def test_two_of_any_one_kind_are_compared(model: ByteModel):
    other = ByteModel(model.config).eval()
    before, after = (attemper.scan(one, [BATCH]) for one in (model, other))
    of_scans, of_models = attemper.compare(before, after), attemper.compare(model, other, [BATCH])
    assert isinstance(of_models, Comparison)
    assert dated(of_models) == dated(of_scans)
    a, b = (attemper.fingerprint(one, [BATCH]) for one in (model, other))
    explained = attemper.compare(a, b)
    assert isinstance(explained, Explanation)
    assert explained.message == attemper.explain(a, b).message


def test_two_of_different_kinds_or_without_what_they_need_are_refused(model: ByteModel):
    scan, print_ = attemper.scan(model, [BATCH]), attemper.fingerprint(model, [BATCH])
    for given, options, reason in (
        ((scan, print_), {}, "one is a fingerprint and the other is Scan: give two of one kind"),
        ((model, scan), {}, "one is a model and the other is Scan"),
        ((model, model), {}, r"pass what they read, compare\(old, new, batches\)"),
        ((scan, scan, [BATCH]), {}, r"compare\(batches=...\) is what two models read"),
        ((print_, print_), {"names": ("a", "b")}, "calls them run a and run b"),
        ((scan, 3), {}, "must be a Scan"),
    ):
        with pytest.raises(attemper.InputError, match=reason):
            attemper.compare(*given, **options)  # pyright: ignore[reportCallIssue, reportArgumentType]
