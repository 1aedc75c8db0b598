"""The file of a fingerprint: what it keeps, what it does not, and what is refused."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save

import attemper
from attemper.errors import InputError
from attemper.fingerprints.encoding import pack, round_rows, unpack
from attemper.fingerprints.file import LATER
from attemper.fingerprints.record import load_fingerprint
from attemper.fingerprints.site import COUNTS, STATISTICS, chosen_rows, chosen_sequences, keys_of_row, projection
from tests.support.engine_models import tiny, tokens
from tests.support.engine_patches import biased

SITE_ARRAYS = (*("rows", "pair_keys", "raw", "final", "residual", "input", "output", "recomputed", "tiled"), *LATER)


@cache
def taken(dtype: str = "float32", name: str = "llama") -> attemper.types.Fingerprint:
    return attemper.fingerprint(tiny(name, layers=2, dtype=getattr(torch, dtype)).model, [tokens()])


@pytest.fixture(params=["float32", "bfloat16", "float16"])
def found(request: pytest.FixtureRequest) -> attemper.types.Fingerprint:
    return taken(*request.param.split())


@pytest.mark.parametrize(  # with a softcap, and with a sink
    "found", ["float32", "bfloat16", "float16", "bfloat16 gemma2", "bfloat16 gpt_oss"], indirect=True
)
def test_what_is_saved_comes_back_bit_for_bit(found: attemper.types.Fingerprint, tmp_path: Path):
    back = attemper.open(found.save(tmp_path / "a.safetensors"))
    assert (back.model, back.tokens, back.lengths) == (found.model, found.tokens, found.lengths)
    for one, other in zip(found.sites, back.sites, strict=True):
        for name in (*SITE_ARRAYS, "query", "key"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
        assert set(other.counts) == set(COUNTS)
        assert set(other.statistics) == set(STATISTICS)
        for kept, again in ((one.counts, other.counts), (one.statistics, other.statistics)):
            for name, part in kept.items():
                np.testing.assert_array_equal(part, again[name], err_msg=name)
                assert part.dtype == again[name].dtype
        assert (one.name, one.scale, one.inv_freq, one.dtype) == (other.name, other.scale, other.inv_freq, other.dtype)
    assert found.output is not None
    assert back.output is not None
    assert (back.output.name, back.output.width) == ("last_hidden_state", found.output.width)
    for name in ("rows", "sketch"):
        np.testing.assert_array_equal(getattr(found.output, name), getattr(back.output, name), err_msg=name)
    assert attemper.explain(found, back).kind == "none"
    assert back.save(tmp_path / "b.safetensors").read_bytes() == (tmp_path / "a.safetensors").read_bytes()


def test_numbers_that_are_added_to_scores_come_back_bit_for_bit(tmp_path: Path):
    model = tiny("llama", layers=2)
    with biased(model, [1], lambda n: -0.1 * (torch.arange(n)[:, None] - torch.arange(n)).abs()[None]):
        whole = attemper.fingerprint(model.model, [tokens()])
    back = attemper.open(whole.save(tmp_path / "a.safetensors"))
    np.testing.assert_array_equal(whole.sites[1].final, back.sites[1].final)
    found = attemper.explain(taken(), back)
    assert (found.kind, found.site) == ("distance_bias", whole.sites[1].name)


def read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The header and the arrays of a file."""
    with safe_open(path, "np") as file:
        header = json.loads((file.metadata() or {})["attemper"])
        return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def size_of_heads(path: Path) -> int:
    """Bytes of all arrays but those of the residual stream and of the model's output, which the first versions lack."""
    later = {*LATER, "sketch", "grams"}
    return sum(part.nbytes for name, part in read(path)[1].items() if not {*name.split(".")[:2]} & later)


def test_thinned_heads_come_back(tmp_path: Path):
    thin = attemper.fingerprint(tiny("llama", layers=2).model, [tokens()], heads=[3])
    path = thin.save(tmp_path / "thin.safetensors")
    back = attemper.open(path)
    assert [site.kept_heads for site in back.sites] == [(2, 3), (2, 3)]
    whole = taken()
    sizes = [size_of_heads(one) for one in (path, whole.save(tmp_path / "all"))]
    assert sizes[1] > 1.7 * sizes[0]
    assert attemper.explain(whole, back).kind == "none"
    header, arrays = read(path)
    header["sites"][0]["kept_heads"] = [0, 9]
    (tmp_path / "other").write_bytes(save(arrays, metadata={"attemper": json.dumps(header)}))
    with pytest.raises(InputError, match=re.escape("kept heads of site 0 are [0, 9], it has 4")):
        attemper.open(tmp_path / "other")


def of_version_1(found: attemper.types.Fingerprint, path: Path, bits: int) -> Path:
    """The file as the first version wrote it: vectors of 16 bits where the run had them, everything else as it is."""
    arrays: dict[str, np.ndarray] = {}
    for number, site in enumerate(found.sites):
        for name in SITE_ARRAYS[: -len(LATER)]:
            arrays[f"{number}.{name}"] = getattr(site, name)
        for name in ("query", "key"):
            part = getattr(site, name)
            arrays[f"{number}.{name}"] = (part.view(np.uint32) >> 16).astype(np.uint16) if bits == 16 else part
        arrays[f"{number}.counts"] = np.stack(list(site.counts.values()))
        arrays[f"{number}.statistics"] = np.stack(list(site.statistics.values()))
    header, _ = read(found.save(path))
    header |= {"version": 1, "counts": COUNTS, "statistics": STATISTICS}
    del header["output"]
    for site in header["sites"]:
        del site["kept_heads"]
    path.write_bytes(save(arrays, metadata={"attemper": json.dumps(header)}))
    return path


@pytest.mark.parametrize(("dtype", "bits"), [("float32", 32), ("bfloat16", 16)])
def test_files_of_the_first_version_are_read(dtype: str, bits: int, tmp_path: Path):
    found = taken(dtype)
    path = of_version_1(found, tmp_path / "old.safetensors", bits)
    assert size_of_heads(path) > 1.4 * size_of_heads(found.save(tmp_path / "new.safetensors"))
    old = attemper.open(path)
    assert attemper.explain(found, old).kind == "none"
    assert old.output is None
    assert all(np.isnan(getattr(site, name)).all() for site in old.sites for name in LATER)
    header, arrays = read(path)
    arrays["1.final"] = arrays["1.final"][:1]
    path.write_bytes(save(arrays, metadata={"attemper": json.dumps(header)}))
    with pytest.raises(InputError, match=re.escape("final of site 1 is [1, 32, 16], expected [4, 32, 16]")):
        attemper.open(path)


def test_files_of_the_second_version_are_read(found: attemper.types.Fingerprint, tmp_path: Path):
    header, arrays = read(found.save(tmp_path / "a.safetensors"))
    del header["output"]
    kept = {name: part for name, part in arrays.items() if not {*name.split(".")} & {*LATER, "output"} - {"0", "1"}}
    kept |= {name: part for name, part in arrays.items() if re.match(r"\d+\.output", name)}
    (tmp_path / "b").write_bytes(save(kept, metadata={"attemper": json.dumps(header | {"version": 2})}))
    old = attemper.open(tmp_path / "b")
    assert old.output is None
    assert all(np.isnan(getattr(site, name)).all() for site in old.sites for name in LATER)
    assert attemper.explain(found, old).kind == "none"
    (tmp_path / "b").write_bytes(save(kept, metadata={"attemper": json.dumps(header | {"output": None})}))
    with pytest.raises(InputError, match=r"its header does not fit its numbers \('0\.attended'\)"):
        attemper.open(tmp_path / "b")


def test_vectors_of_low_precision_take_two_bytes(found: attemper.types.Fingerprint, tmp_path: Path):
    _, arrays = read(found.save(tmp_path / "a.safetensors"))
    kind = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}[found.sites[0].dtype]
    assert arrays["0.query"].dtype == kind
    assert arrays["0.raw"].dtype == (np.float32 if kind == np.float32 else np.int16)


def test_numbers_of_16_bits_are_off_by_little():
    values = (
        np.random.RandomState(0).randn(50, 7).astype(np.float32) * 10 ** np.arange(-20, 30).astype(np.float32)[:, None]
    )
    values[3, 2], values[4] = np.nan, 0.0
    found = round_rows(values)
    largest = np.nanmax(np.abs(values), 1, keepdims=True)
    assert (np.abs(found - values)[~np.isnan(values)] <= (largest * 2.0**-15 + 0 * values)[~np.isnan(values)]).all()
    assert (np.isnan(found) == np.isnan(values)).all()
    np.testing.assert_array_equal(round_rows(found), found)
    packed = pack("x", found)
    assert {name: part.dtype for name, part in packed.items()} == {"x": np.int16, "x.exponent": np.int8}
    np.testing.assert_array_equal(unpack("x", packed, found.shape), found)


@pytest.mark.parametrize(
    "values",
    [
        np.array([[1.0, -0.0, np.inf], [1.0, 0.0, -np.inf]], np.float32),
        np.array([[0.1, np.nan], [0.1, np.nan]], np.float32),
        np.full((2, 3, 4), 1e-42, np.float32),
        np.array([[0.1, 1e30], [-1e-30, 3e38]], np.float32),
        np.zeros((0, 3), np.float32),
    ],
)
def test_any_numbers_come_back_bit_for_bit(values: np.ndarray):
    back = unpack("x", pack("x", values), values.shape)
    assert back.dtype == np.float32
    np.testing.assert_array_equal(back, values)
    np.testing.assert_array_equal(np.signbit(back), np.signbit(values))


@pytest.mark.parametrize(("high", "dtype"), [(127, np.int8), (-32768, np.int16), (32768, np.int32)])
def test_whole_numbers_take_as_few_bits_as_they_need(high: int, dtype: type):
    values = np.array([[0, high, -1]], np.int32)
    packed = pack("x", values)
    assert packed["x"].dtype == dtype
    np.testing.assert_array_equal(unpack("x", packed, (1, 3), whole=True), values)


def test_no_ids_are_in_the_file(tmp_path: Path):
    content = taken().save(tmp_path / "a.safetensors").read_bytes()
    for kind in (torch.int64, torch.int32, torch.int16, torch.uint8):
        assert bytes(tokens()["input_ids"][0, :12].to(kind).numpy()) not in content


def test_bad_files_are_refused_by_what_is_wrong(tmp_path: Path):
    good = taken().save(tmp_path / "good.safetensors")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(good.read_bytes()[:-1000])
    with pytest.raises(InputError, match=r"cut\.safetensors is cut off, or nothing that attemper wrote"):
        attemper.open(cut)
    header, arrays = read(good)

    def written(name: str, **changes: object) -> Path:
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(save(arrays, metadata={"attemper": json.dumps(header | changes)}))
        return path

    with pytest.raises(InputError, match=r"version 4 of the format; this attemper reads version 3"):
        attemper.open(written("newer", version=4))
    with pytest.raises(InputError, match="no fingerprint: `attemper fingerprint` writes one"):
        load_fingerprint(written("other", format="attemper-reading"))
    many = [site | {"heads": 10**12, "kv_heads": 10**12} for site in header["sites"]]
    with pytest.raises(InputError, match=r"is damaged: .*query holds 4 heads, expected 1000000000000"):
        attemper.open(written("many", sites=many))
    arrays["0.raw"] = arrays["0.raw"][:, :3]
    with pytest.raises(
        InputError, match=re.escape("is damaged: its header does not fit its numbers (0.raw is [4, 3, 16]")
    ):
        attemper.open(written("damaged"))
    with pytest.raises(InputError, match=r"there is nothing at .*gone\.safetensors"):
        attemper.open(tmp_path / "gone.safetensors")


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
