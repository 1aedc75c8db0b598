"""Numbers of one statistic at one site over many samples, as a short block of bytes.

A head's numbers change little from sample to sample, so their bytes are put side by side (all first bytes, then all
second bytes, ...) before zlib compresses them. ``rounded`` leaves the bits that the run was asked to keep, which is
where most of the room goes: the last bits of a mean over rows are noise.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np

from attemper.errors import InputError

Values = np.ndarray
"""float32."""

MANTISSA = 23
"""Bits of a float32 behind its first."""
DEFAULT_BITS = 15
"""Of ``MANTISSA``: a relative error of 2^-16 at most, 1.5e-5."""
_HEADER = struct.Struct("<BBHI")
"""Version, dimensions, rows of the first dimension, size of the rest."""
_VERSION = 1
_LEVEL = 1
"""zlib's fastest: higher levels gain 2% and take three times as long."""


def rounded(values: Values, bits: int | None) -> Values:
    """``values`` with ``bits`` bits of mantissa, to the nearest and ties to even; None for all 23.

    NaN and infinity stay. A number that would round to infinity is cut instead.
    """
    values = np.ascontiguousarray(values, dtype="<f4")
    if bits is None or bits >= MANTISSA:
        return values
    drop = MANTISSA - bits
    whole = values.view("<u4")
    odd = (whole >> drop) & 1
    near = ((whole + (odd + ((1 << (drop - 1)) - 1)).astype("<u4")) >> drop << drop).view("<f4")
    cut = (whole >> drop << drop).view("<f4")
    return np.where(np.isfinite(values), np.where(np.isfinite(near), near, cut), values).astype("<f4")


def packed(values: Values) -> bytes:
    """[first, ...] float32 as bytes; the first dimension, of samples, is laid out last, where its numbers are alike."""
    moved = np.ascontiguousarray(np.moveaxis(np.asarray(values, dtype="<f4"), 0, -1))
    size = moved.size // max(values.shape[0], 1)
    shuffled = moved.reshape(-1).view(np.uint8).reshape(-1, 4).T
    return _HEADER.pack(_VERSION, values.ndim, values.shape[0], size) + zlib.compress(shuffled.tobytes(), _LEVEL)


def unpacked(data: bytes) -> Values:
    """What ``packed`` was given, as [first, size].

    Raises:
        InputError: these bytes are of a newer version, or damaged.
    """
    try:
        version, _, samples, size = _HEADER.unpack_from(data)
        if version != _VERSION:
            raise InputError(f"a block of version {version} is in this run; this attemper reads version {_VERSION}.")
        shuffled = np.frombuffer(zlib.decompress(data[_HEADER.size :]), np.uint8)
        values = np.ascontiguousarray(shuffled.reshape(4, -1).T).reshape(-1).view("<f4")
        return values.reshape(size, samples).T
    except (struct.error, zlib.error, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"a block of this run is damaged: {error}.") from error
