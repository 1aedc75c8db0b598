"""Blocks of bytes: what is rounded, what is exact, and damaged ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from attemper.errors import InputError
from attemper.store.chunk import pack, round_bits, unpack

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


def test_a_nan_of_any_bits_stays_nan():
    whole = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x3F800000], np.uint32).view(np.float32)
    assert np.isnan(round_bits(whole, 15)).tolist() == [True, True, True, False]


def test_the_largest_number_does_not_become_infinite():
    largest = np.array([np.finfo(np.float32).max, -np.finfo(np.float32).max], np.float32)
    assert np.isfinite(round_bits(largest, 5)).all()


def test_slow_numbers_take_half_their_room():
    steps = np.arange(128)[:, None]
    noise = np.random.default_rng(0).standard_normal((128, 32))
    values = ((3 + 0.01 * steps) * (1 + 0.02 * noise)).astype(np.float32)
    assert len(pack(round_bits(values, 15))) < 0.51 * values.nbytes


@pytest.mark.parametrize(
    "damage", [lambda data: data[:5], lambda data: data[:-3], lambda data: data[:9] + b"x" * 20, lambda data: b""]
)
def test_a_damaged_block_is_told(damage):
    with pytest.raises(InputError, match="damaged"):
        unpack(damage(pack(np.ones((4, 4), np.float32))))


def test_a_block_whose_version_is_gone_is_damaged():
    data = pack(np.ones((4, 4), np.float32))
    with pytest.raises(InputError, match="is damaged: it has no version"):
        unpack(b"\x00" + data[1:])


def test_a_block_of_a_newer_version_is_told():
    data = pack(np.ones((4, 4), np.float32))
    with pytest.raises(InputError, match="version 2; this attemper reads version 1"):
        unpack(b"\x02" + data[1:])
