"""A few kilobytes that ask for gigabytes: each file is refused before room is made for what it claims."""

from __future__ import annotations

import json
import sqlite3
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from torch import nn

import attemper
from attemper.errors import InputError
from attemper.readings.part_file import merge_files
from attemper.report.overview import overview
from attemper.store.compaction import unpack
from tests.support.runs import written
from tests.support.samples import samples, samples_of

pytestmark = pytest.mark.each

MOST_BYTES = 300 << 20
"""That a refusal may take at its peak."""


@contextmanager
def bounded() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


def header_of(path: Path) -> dict[str, Any]:
    with safe_open(path, "np") as file:
        return json.loads((file.metadata() or {})["attemper"])


def rewritten(path: Path, change: Callable[[dict[str, Any], dict[str, np.ndarray]], None]) -> Path:
    header, arrays = header_of(path), load_file(path)
    change(header, arrays)
    save_file(arrays, path, metadata={"attemper": json.dumps(header)})
    return path


@pytest.fixture
def reading(tmp_path: Path) -> Path:
    model = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    rows = torch.zeros(1, 8, 16)
    return attemper.scan(model, ((rows, rows, rows),)).save(tmp_path / "reading.safetensors")


def wide_column(header: dict[str, Any], _: dict[str, np.ndarray]) -> None:
    header["columns"].append(["more", 150_000_000])


def column_of_any_width(header: dict[str, Any], _: dict[str, np.ndarray]) -> None:
    header["columns"].append(["more", 1 << 62])


def many_shards(header: dict[str, Any], _: dict[str, np.ndarray]) -> None:
    header["law"]["shards"] = 1 << 40


def heads_without_numbers(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    header["segments"][0]["sites"][0]["label"]["heads"] = 1 << 32
    arrays["0.0"] = np.zeros((1 << 32, 0))


@pytest.mark.parametrize("change", [wide_column, column_of_any_width, many_shards, heads_without_numbers])
def test_a_reading_that_claims_more_than_it_holds_is_refused(change: Any, reading: Path):
    path = rewritten(reading, change)
    with bounded(), pytest.raises(InputError, match="is damaged"):
        attemper.open(path).to_json()
    with bounded(), pytest.raises(InputError, match="is damaged"):
        merge_files([path])


def test_a_block_is_not_inflated_beyond_what_it_claims():
    zeros = zlib.compress(bytes(1 << 28), 1)
    for samples_, size, message in ((1, 4, "has not the 16 B"), (65535, 1024, "claims 268,431,360 B")):
        with bounded(), pytest.raises(InputError, match=message):
            unpack(struct.pack("<BHI", 1, samples_, size) + zeros)
    with pytest.raises(InputError, match="has not the 64 B"):
        unpack(struct.pack("<BHI", 1, 4, 4) + zlib.compress(bytes(32)))


STATEMENTS = (
    "UPDATE site SET heads = 1 << 40",
    "UPDATE site SET heads = 30000",
    "UPDATE site SET heads = -3",
    "UPDATE site SET first_head = 1 << 40",
    "UPDATE layout SET sites = '[1" + ",1" * 10_000 + "]'",
    "UPDATE layout SET statistics = '[1" + ",1" * 10_000 + "]'",
    "UPDATE segment SET first_sample = -(1 << 60)",
    "UPDATE sample SET id = 1 << 50 WHERE id = (SELECT max(id) FROM sample)",
    "UPDATE chunk SET span = 1 << 50",
    "UPDATE pyramid SET first = 1 << 50",
)


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda one: one[:44])
@pytest.mark.parametrize("many", [20, 200])
@pytest.mark.quick("20-")
@pytest.mark.turns(2)
def test_a_run_that_claims_more_than_it_holds_takes_no_memory(many: int, statement: str, tmp_path: Path):
    written(tmp_path / "a", samples(many))
    with closing(sqlite3.connect(tmp_path / "a" / "fragment-0.sqlite")) as connection:
        connection.execute(statement)
        connection.commit()
    with bounded(), suppress(InputError), attemper.open(tmp_path / "a") as run:
        overview(run)


def test_a_run_of_many_heads_is_read_in_small_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kept = written(tmp_path / "a", samples(200))
    monkeypatch.setattr("attemper.store.series.NUMBERS", 64)
    with attemper.open(tmp_path / "a") as run:
        found = list(samples_of(run, set(run.statistics)))
    assert [one.step for one in found] == [one.step for one in kept]
    assert all(np.array_equal(one.values, two.values) for one, two in zip(found, found, strict=True))


@pytest.mark.parametrize("change", ["heads", "rows"])
def test_a_fingerprint_that_claims_more_than_it_holds_is_refused(change: str, tmp_path: Path):
    model = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    rows = torch.randn(1, 8, 16)
    path = attemper.fingerprint(model, ((rows, rows, rows),)).save(tmp_path / "f.safetensors")

    def grow(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        many = 1 << 14
        if change == "heads":
            header["sites"][0] |= {"heads": many, "kv_heads": many, "head_dim": 1}
            arrays["0.query"] = arrays["0.key"] = np.zeros((many, arrays["0.query"].shape[1], 1), np.uint16)
        arrays["0.rows"] = np.zeros((many, 2), np.int8)
        arrays["0.pair_keys"] = arrays["0.pair_keys"][:1]
        for name in [name for name in arrays if name.startswith("0.") and arrays[name].ndim == 2]:
            if name not in ("0.rows", "0.pair_keys", "0.residual", "0.input", "0.attended", "0.change"):
                arrays[name] = np.ascontiguousarray(arrays[name][:1, :1])

    rewritten(path, grow)
    with bounded(), pytest.raises(InputError, match="is damaged"):
        attemper.open(path)
