"""The file of a fingerprint: what it keeps, what it does not, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save

import attemper
from attemper.errors import InputError
from attemper.fingerprints.record import COUNTS, STATISTICS, chosen_rows, chosen_sequences, keys_of_row, projection
from tests.support.engine_models import tiny, tokens


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float16"])
def found(request: pytest.FixtureRequest) -> attemper.Fingerprint:
    model = tiny("llama", layers=2, dtype=getattr(torch, request.param)).model
    return attemper.fingerprint(model, [tokens()])


def test_what_is_saved_comes_back_bit_for_bit(found: attemper.Fingerprint, tmp_path: Path):
    back = attemper.load_fingerprint(found.save(tmp_path / "a.safetensors"))
    assert (back.model, back.tokens, back.lengths) == (found.model, found.tokens, found.lengths)
    for one, other in zip(found.sites, back.sites, strict=True):
        for name in ("raw", "final", "query", "key", "residual", "input", "output", "recomputed", "tiled", "rows"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
        assert set(other.counts) == set(COUNTS)
        assert set(other.statistics) == set(STATISTICS)
        assert (one.name, one.scale, one.inv_freq, one.dtype) == (other.name, other.scale, other.inv_freq, other.dtype)
    assert attemper.explain(found, back).kind == "none"


def test_thinned_heads_come_back_and_files_without_the_field_keep_all(tmp_path: Path):
    model = tiny("llama", layers=2).model
    path = attemper.fingerprint(model, [tokens()], heads=[3]).save(tmp_path / "thin.safetensors")
    back = attemper.load_fingerprint(path)
    assert [site.kept_heads for site in back.sites] == [(2, 3), (2, 3)]
    whole = attemper.fingerprint(model, [tokens()])
    assert whole.save(tmp_path / "whole.safetensors").stat().st_size > 1.7 * path.stat().st_size
    assert attemper.explain(whole, back).kind == "none"
    with safe_open(tmp_path / "whole.safetensors", "np") as file:
        header = json.loads(file.metadata()["attemper"])
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for site in header["sites"]:
        del site["kept_heads"]
    older = tmp_path / "older.safetensors"
    older.write_bytes(save(arrays, metadata={"attemper": json.dumps(header)}))
    assert attemper.explain(whole, attemper.load_fingerprint(older)).kind == "none"
    header["sites"][0]["kept_heads"] = [0, 9]
    older.write_bytes(save(arrays, metadata={"attemper": json.dumps(header)}))
    with pytest.raises(InputError, match=re.escape("kept heads of site 0 are [0, 9], it has 4")):
        attemper.load_fingerprint(older)


def test_vectors_of_low_precision_take_two_bytes(found: attemper.Fingerprint, tmp_path: Path):
    path = found.save(tmp_path / "a.safetensors")
    with safe_open(path, "np") as file:
        kind = file.get_tensor("0.query").dtype
    assert kind == {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}[found.sites[0].dtype]


def test_no_ids_are_in_the_file(tmp_path: Path):
    batch = tokens()
    path = attemper.fingerprint(tiny("llama", layers=2).model, [batch]).save(tmp_path / "a.safetensors")
    content = path.read_bytes()
    for kind in (torch.int64, torch.int32, torch.int16, torch.uint8):
        assert bytes(batch["input_ids"][0, :12].to(kind).numpy()) not in content


def test_bad_files_are_refused_by_what_is_wrong(tmp_path: Path):
    good = attemper.fingerprint(tiny("llama", layers=2).model, [tokens()]).save(tmp_path / "good.safetensors")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(good.read_bytes()[:-1000])
    with pytest.raises(InputError, match=r"cut\.safetensors is cut off or no fingerprint"):
        attemper.load_fingerprint(cut)
    with safe_open(good, "np") as file:
        header = json.loads(file.metadata()["attemper"])
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def written(name: str, **changes: object) -> Path:
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(save(arrays, metadata={"attemper": json.dumps(header | changes)}))
        return path

    with pytest.raises(InputError, match=r"version 2 of the format; this attemper reads version 1"):
        attemper.load_fingerprint(written("newer", version=2))
    with pytest.raises(InputError, match="no fingerprint: `attemper fingerprint` writes one"):
        attemper.load_fingerprint(written("other", format="attemper-reading"))
    arrays["0.raw"] = arrays["0.raw"][:, :3]
    with pytest.raises(InputError, match=re.escape("is damaged: its header does not fit its numbers (raw of site 0")):
        attemper.load_fingerprint(written("damaged"))
    with pytest.raises(InputError, match=r"gone\.safetensors cannot be read"):
        attemper.load_fingerprint(tmp_path / "gone.safetensors")


def test_rows_follow_from_lengths_alone():
    assert chosen_sequences(2, 32) == {0: 16, 1: 16}
    assert chosen_sequences(100, 4) == {0: 1, 25: 1, 50: 1, 75: 1}
    assert chosen_rows(96, 4) == [23, 47, 71, 95]
    assert chosen_rows(2, 16) == [0, 1]
    assert chosen_rows(0, 4) == []
    assert keys_of_row(10, 96)[:8] == [10, 9, 8, 6, 2, -1, -1, -1]
    assert keys_of_row(10, 15)[8:] == [0, 2, 4, 6, 8, 10, 12, 14]


def test_projections_are_the_same_everywhere():
    assert projection(5).astype(int).sum(1).tolist() == [0, -4, 4, 0, 2]
    vectors = np.random.RandomState(0).randn(2000, 64)
    ratio = ((vectors @ projection(64)) ** 2).mean(1) / (vectors**2).sum(1)
    assert abs(ratio.mean() - 1) < 0.05
