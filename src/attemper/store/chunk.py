"""Numbers of one statistic at one site over many samples, as a short block of bytes.

A head's numbers change little from sample to sample, so their bytes are put side by side (all first bytes, then all
second bytes, ...) before zlib compresses them. The last bits of a mean over rows are noise and take most of the room:
``round_bits`` leaves the bits that the run was asked to keep.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace

import numpy as np

from attemper.errors import InputError
from attemper.readings.sample import QUANTITIES, Sample
from attemper.store.store import MANTISSA

COUNTS = frozenset(name for name, one in QUANTITIES.items() if one.exact)
_HEADER = struct.Struct("<BHI")
"""Version, samples, numbers of one sample."""
_VERSION = 1
_LEVEL = 1
"""zlib's fastest: higher levels gain 2% and take three times as long."""
_LARGEST = 1 << 24
"""Bytes of the numbers of a block: 128 samples of 32,768 heads."""


def round_bits(values: np.ndarray, bits: int | None) -> np.ndarray:
    """``values`` as float32 with ``bits`` bits of mantissa, to the nearest and ties to even; None keeps all 23.

    NaN and infinity stay. A number that would round to infinity is cut instead.
    """
    values = np.ascontiguousarray(values, dtype="<f4")
    if bits is None or bits >= MANTISSA:
        return values
    drop = MANTISSA - bits
    whole = values.view("<u4")
    odd = (whole >> drop) & 1
    near = ((whole + (odd + ((1 << (drop - 1)) - 1)).astype("<u4")) >> drop << drop).view("<f4")
    finite = np.isfinite(values)
    if finite.all() and np.isfinite(near).all():
        return near
    cut = (whole >> drop << drop).view("<f4")
    return np.where(finite, np.where(np.isfinite(near), near, cut), values).astype("<f4")


def as_kept(sample: Sample, bits: int | None) -> Sample:
    """A sample with the bits that are stored: all bits of counts."""
    if bits is None or bits >= MANTISSA:
        return sample
    values = sample.values.copy()
    rough = [row for row, name in enumerate(sample.quantities) if name not in COUNTS and not name.endswith(REST)]
    values[rough] = round_bits(values[rough], bits)
    return replace(sample, values=values)


REST = "_rest"
"""Of the name under which what float32 lacks of a count is kept."""


def split_counts(sample: Sample) -> Sample:
    """A sample in float32: a count that float32 cannot hold becomes the nearest one it can, and what is missing."""
    if sample.values.dtype == np.float32:
        return sample
    near = sample.values.astype(np.float32)
    rests = np.where(np.isfinite(near), sample.values - near, 0.0).astype(np.float32)
    split = [row for row, name in enumerate(sample.quantities) if name in COUNTS and rests[row].any()]
    names = (*sample.quantities, *(f"{sample.quantities[row]}{REST}" for row in split))
    return replace(sample, quantities=names, values=np.concatenate([near, rests[split]]))


def join_counts(quantities: tuple[str, ...], values: np.ndarray) -> tuple[tuple[str, ...], np.ndarray]:
    """[quantities, ..., heads] without the rests of counts, which go back to their counts, in float64."""
    rests = [name for name in quantities if name.endswith(REST)]
    if not rests:
        return quantities, values
    names = tuple(name for name in quantities if name not in rests)
    joined = values[[quantities.index(name) for name in names]].astype(np.float64)
    for name in rests:
        joined[names.index(name.removesuffix(REST))] += np.nan_to_num(values[quantities.index(name)])
    return names, joined


def pack(values: np.ndarray) -> bytes:
    """[samples, ...] float32 as bytes. A number's samples stand one after another: they are alike."""
    rows = np.asarray(values, dtype="<f4").reshape(len(values), -1)
    shuffled = np.ascontiguousarray(rows.T).reshape(-1).view(np.uint8).reshape(-1, 4).T
    return _HEADER.pack(_VERSION, *rows.shape) + zlib.compress(shuffled.tobytes(), _LEVEL)


def unpack(data: bytes) -> np.ndarray:
    """[samples, numbers of one sample] float32 that ``pack`` was given."""
    try:
        version, samples, size = _HEADER.unpack_from(data)
        if not version:
            raise InputError("a block of this run is damaged: it has no version.")
        if version > _VERSION:
            raise InputError(
                f"a block of this run is damaged, or of the newer version {version}; this attemper reads version "
                f"{_VERSION}."
            )
        expected, inflate = 4 * samples * size, zlib.decompressobj()
        if expected > _LARGEST:
            raise InputError(f"a block of this run is damaged: it claims {expected:,} B, and none has as many.")
        # One byte more than is expected shows a block that holds too much, and is all that is made of it.
        numbers = inflate.decompress(memoryview(data)[_HEADER.size :], expected + 1)
        if len(numbers) != expected or not inflate.eof:
            raise InputError(f"a block of this run is damaged: it has not the {expected:,} B that it claims.")
        shuffled = np.frombuffer(numbers, np.uint8).reshape(4, -1)
        values = np.ascontiguousarray(shuffled.T).reshape(-1).view("<f4")
        return values.reshape(size, samples).T
    except (struct.error, zlib.error, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"a block of this run is damaged: {error}.") from error
