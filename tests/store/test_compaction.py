"""Blocks of bytes and blocks of samples: what is rounded, what is exact, what is joined, and damaged ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from attemper.errors import InputError
from attemper.store import compaction
from attemper.store.compaction import blocks_of, empty_blocks, join_blocks, pack, round_bits, unpack

FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)


@given(arrays.arrays(np.float32, arrays.array_shapes(min_dims=2, max_dims=2, max_side=9), elements=FLOATS))
def test_a_block_gives_back_every_bit(values):
    assert unpack(pack(values)).tobytes() == values.tobytes()


@given(arrays.arrays(np.float32, 20, elements=FLOATS), st.integers(1, 22))
def test_rounding_keeps_so_many_bits_and_what_is_no_number(values, bits):
    found = round_bits(values, bits)
    finite = np.isfinite(values)
    assert np.isfinite(found[finite]).all()
    assert np.array_equal(found[~finite], values[~finite], equal_nan=True)
    normal = finite & (np.abs(values) >= np.finfo(np.float32).tiny) & (np.abs(values) < np.finfo(np.float32).max / 2)
    error = np.abs(found[normal].astype(np.float64) - values[normal].astype(np.float64))
    assert (error <= 2.0 ** -(bits + 1) * np.abs(values[normal].astype(np.float64))).all()
    assert not (found[finite].view(np.uint32) & ((1 << (23 - bits)) - 1)).any()


def test_rounding_twice_is_rounding_once_and_all_bits_are_the_same_numbers():
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    assert np.array_equal(round_bits(round_bits(values, 10), 10), round_bits(values, 10))
    assert np.array_equal(round_bits(values, None), values)
    assert np.array_equal(round_bits(values, 23), values)


def test_a_nan_of_any_bits_stays_nan_and_the_largest_number_does_not_become_infinite():
    whole = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x3F800000, 0x7F7FFFFF, 0xFF7FFFFF], np.uint32)
    found = round_bits(whole.view(np.float32), 5)
    assert np.isnan(found).tolist() == [True] * 3 + [False] * 3
    assert np.isfinite(found[3:]).all()


def test_slow_numbers_take_half_their_room():
    steps = np.arange(128)[:, None]
    noise = np.random.default_rng(0).standard_normal((128, 32))
    values = ((3 + 0.01 * steps) * (1 + 0.02 * noise)).astype(np.float32)
    assert len(pack(round_bits(values, 15))) < 0.51 * values.nbytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "damaged"),
        (lambda data: data[:5], "damaged"),
        (lambda data: data[:-3], "damaged"),
        (lambda data: data[:9] + b"x" * 20, "damaged"),
        (lambda data: b"\x00" + data[1:], "is damaged: it has no version"),
        (lambda data: b"\x02" + data[1:], "version 2; this attemper reads version 1"),
    ],
)
def test_a_damaged_block_and_one_of_a_newer_version_are_told(change, message):
    with pytest.raises(InputError, match=message):
        unpack(change(pack(np.ones((4, 4), np.float32))))


def drawn(seed: int, missing: float) -> np.ndarray:
    generator = np.random.default_rng(seed)
    values = generator.standard_normal((64, 8, 3)).astype(np.float32)
    values[generator.random(values.shape) < missing] = np.nan
    return values


@pytest.mark.parametrize("missing", [0.0, 0.3, 0.95, 1.0])
def test_blocks_hold_least_mean_largest_and_count(missing):
    values = drawn(0, missing)
    found = blocks_of(values)
    known = np.ma.masked_invalid(values.astype(np.float64))
    for place, expected in [
        (compaction.LEAST, known.min(1)),
        (compaction.MEAN, known.mean(1)),
        (compaction.LARGEST, known.max(1)),
    ]:
        np.testing.assert_allclose(found[:, place], np.ma.filled(expected, np.nan), rtol=1e-6, atol=1e-6)
    assert np.array_equal(found[:, compaction.KNOWN], (~np.isnan(values)).sum(1))


@pytest.mark.parametrize("missing", [0.0, 0.5, 0.97, 1.0])
def test_joined_blocks_are_the_blocks_of_all_their_samples(missing):
    values = drawn(1, missing)
    found = join_blocks(blocks_of(values), 4)
    np.testing.assert_allclose(found, blocks_of(values.reshape(16, 32, 3)), rtol=1e-5, atol=1e-6)


def test_infinities_stay_and_no_sample_is_nothing():
    found = join_blocks(blocks_of(np.array([[[1.0], [np.inf]], [[-np.inf], [np.inf]]], np.float32)), 2)
    assert found[0, [compaction.LEAST, compaction.LARGEST], 0].tolist() == [-np.inf, np.inf]
    assert np.array_equal(empty_blocks(2, 3), blocks_of(np.full((2, 9, 3), np.nan)), equal_nan=True)
    values = drawn(2, 0.2)
    both = np.concatenate([blocks_of(values), empty_blocks(64, 3)])
    np.testing.assert_array_equal(join_blocks(both, 64)[0], join_blocks(blocks_of(values), 64)[0])


@pytest.mark.parametrize(
    ("samples", "level"), [(100, 0), (9_599, 0), (9_600, 5), (38_399, 5), (38_400, 7), (1_000_000, 11)]
)
def test_a_picture_of_300_columns_needs_a_level_with_as_many_blocks(samples, level):
    assert compaction.level_for(samples, 300) == level
    assert not level or 300 <= samples >> level < 1_200 + 4
