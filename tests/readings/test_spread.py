"""How the batches of a scan differ, and what tells its text from others: what a comparison counts differences by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor

import attemper
from attemper.readings.part import level
from attemper.readings.sums import ERRORS, SPREAD, places
from tests.readings.test_part import edited, header_of
from tests.support.engine_models import VOCABULARY, tiny


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("bert", layers=2).model


def batches(size: int, padding: int = 4, *, left: bool = False) -> list[dict[str, Tensor]]:
    """The same 12 sequences of 9 to 20 tokens, so many at a time, with at least so much padding."""
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(3, VOCABULARY, (9 + number,), generator=generator) for number in range(12)]
    width = 20 + padding
    ids, mask = torch.zeros((12, width), dtype=torch.int64), torch.zeros((12, width), dtype=torch.int64)
    for number, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        ids[number, place], mask[number, place] = row, 1
    return [
        {"input_ids": ids[start : start + size], "attention_mask": mask[start : start + size]}
        for start in range(0, 12, size)
    ]


def test_a_standard_error_is_that_of_a_ratio_of_sums_over_batches(model: Any):
    whole = attemper.scan(model, batches(3)).reading
    each = [attemper.scan(model, [batch]).reading for batch in batches(3)]
    for place, head in enumerate(whole.heads):
        assert head.batches == 4
        assert head.standard_errors is not None
        assert set(head.standard_errors) == set(ERRORS)
        for name in ("normalized_entropy", "max_weight", "first_token_mass"):
            rows = np.array([one.heads[place].rows for one in each], float)
            own = np.array([getattr(one.heads[place], name) for one in each])
            left = rows * (own - (rows * own).sum() / rows.sum())
            expected = np.sqrt((left**2).sum() * 4 / 3) / rows.sum()
            assert head.standard_errors[name] == pytest.approx(expected, rel=1e-9)


def test_one_batch_has_no_standard_error(model: Any):
    head = attemper.scan(model, batches(12)).reading.heads[0]
    assert (head.batches, head.standard_errors) == (None, None)
    assert not {"batches", "standard_errors"} & set(head.to_dict())


def test_a_text_has_one_digest_however_it_is_batched_padded_or_cut(model: Any):
    digests = {attemper.scan(model, batches(size)).reading.text_digest for size in (3, 5, 12)}
    digests.add(attemper.scan(model, batches(4, padding=9, left=True)).reading.text_digest)
    digests.add(attemper.scan(model, batches(4)[::-1]).reading.text_digest)
    parts = [attemper.scan(model, batches(3)[shard::2], shard=(shard, 2)) for shard in range(2)]
    digests.add(parts[0].merge(parts[1]).reading.text_digest)
    assert len(digests) == 1
    other = batches(12)
    other[0]["input_ids"][3, 2] = 4 if other[0]["input_ids"][3, 2] != 4 else 5
    assert attemper.scan(model, other).reading.text_digest not in digests
    assert attemper.scan(model, batches(12) * 2).reading.text_digest not in digests


def test_what_has_no_token_ids_has_no_digest():
    layer = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x = torch.randn(2, 8, 16)
    assert attemper.scan(layer, [(x, x, x)]).reading.text_digest is None


def test_a_file_of_before_loads_without_it_and_merges(model: Any, tmp_path: Path):
    parts = [attemper.scan(model, batches(3)[shard::2], shard=(shard, 2)) for shard in range(2)]
    path = parts[0].save(tmp_path / "old.safetensors")
    columns = places(32)
    kept = [name for name in columns if name not in SPREAD]
    order = [place for name in kept for place in range(columns[name].start, columns[name].stop)]
    segments = header_of(path)["segments"]
    for segment in segments:
        for shard in segment["shards"]:
            del shard["digest"]
    arrays = {name: np.ascontiguousarray(sums[:, order]) for name, sums in load_file(path).items()}
    widths = [[name, columns[name].stop - columns[name].start] for name in kept]
    old = attemper.open(edited(path, arrays, columns=widths, segments=segments))
    for found in (old, old.merge(parts[1])):
        assert found.reading.text_digest is None
        assert {head.standard_errors for head in found.reading.heads} == {None}
    assert old.reading.heads[0].entropy_nats == parts[0].reading.heads[0].entropy_nats


def test_calls_that_are_joined_are_no_batches(model: Any):
    part = attemper.scan(model, batches(3))._part
    assert part is not None
    (site, *_) = part.sites
    assert site.without_spread().reading(32).heads[0].standard_errors is None
    assert site.reading(32).heads[0].standard_errors is not None
    assert level([part.segments[0].sites])[0][0] is part.segments[0].sites


def test_queries_of_another_type_than_the_weights_are_named(model: Any):
    with torch.autocast("cpu", torch.bfloat16):
        assert attemper.scan(model, batches(12)).reading.dtype == "float32, bfloat16"
    assert attemper.scan(model, batches(12)).reading.dtype == "float32"


@pytest.mark.parametrize("digest", ["xyz", "-1", 3])
def test_a_damaged_digest_is_told(model: Any, tmp_path: Path, digest: Any):
    path = attemper.scan(model, batches(12)).save(tmp_path / "a.safetensors")
    segments = header_of(path)["segments"]
    segments[0]["shards"][0]["digest"] = digest
    with pytest.raises(attemper.InputError, match=r"a\.safetensors is damaged: .*digest"):
        attemper.open(edited(path, segments=segments))
