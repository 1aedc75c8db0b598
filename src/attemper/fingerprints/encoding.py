"""Arrays of a fingerprint in few bytes.

What is packed comes back bit for bit: numbers are rounded, where the run itself rounds more, when they are taken
(:func:`round_rows`), never when they are written.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

LARGEST = 2**15 - 1
"""Of the whole numbers that share an exponent."""
_MISSING = -LARGEST - 1
"""Stands for NaN among them."""
_EXPONENTS = (-126, 127)
EXPONENT = ".exponent"
"""How the name of the exponents ends that stand beside the whole numbers of an array."""


def round_rows(values: np.ndarray) -> np.ndarray:
    """Float32 numbers as whole ones of at most 15 bits, times a power of 2 that those along the last axis share: off by
    at most 2**-15 of the largest of them. NaN stays, and so do rows with infinite numbers.
    """
    infinite = np.isinf(values).any(-1, keepdims=True)
    numbers, exponents = _with_shared_exponent(np.where(infinite, np.float32(0), values))
    return np.where(infinite, values, _from_shared_exponent(numbers, exponents))


def pack(name: str, values: np.ndarray, *, once: bool = True) -> dict[str, np.ndarray]:
    """An array by the names under which it is stored: float32 in 16 bits where they hold it, whole numbers in as few
    bits as they take, and ``once`` what is the same along one of the first two axes.
    """
    values = np.ascontiguousarray(_once(values) if once else values)
    if values.dtype.kind == "i":
        return {name: _narrow_whole(values)}
    bits = values.view(np.uint32)
    if not (bits & 0xFFFF).any():
        return {name: (bits >> 16).astype(np.uint16)}
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    if _is_same(half.astype(np.float32), values):
        return {name: half}
    if np.isinf(values).any() or values.ndim < 2:
        return {name: values}
    numbers, exponents = _with_shared_exponent(values)
    if _is_same(_from_shared_exponent(numbers, exponents), values):
        return {name: numbers, name + EXPONENT: exponents}
    return {name: values}


def unpack(name: str, arrays: Mapping[str, np.ndarray], shape: tuple[int, ...], *, whole: bool = False) -> np.ndarray:
    found = arrays[name]
    possible = [(size, 1) if axis < 2 else (size,) for axis, size in enumerate(shape)]
    if found.ndim != len(shape) or any(size not in one for size, one in zip(found.shape, possible, strict=True)):
        raise ValueError(f"{name} is {list(found.shape)}, expected {list(shape)}")
    if whole:
        values = found.astype(np.int32)
    elif name + EXPONENT in arrays:
        values = _from_shared_exponent(found, arrays[name + EXPONENT])
    else:
        values = wide(found)
    return np.broadcast_to(values, shape).copy()


def wide(values: np.ndarray) -> np.ndarray:
    """Float32 of what is stored in fewer bits; uint16 are the upper ones of float32, as NumPy has no bfloat16."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def _once(values: np.ndarray) -> np.ndarray:
    for axis in range(min(values.ndim, 2)):
        first = values.take([0], axis) if values.shape[axis] > 1 else values
        if _is_same(np.broadcast_to(first, values.shape), values):
            values = first
    return values


def _is_same(one: np.ndarray, other: np.ndarray) -> bool:
    """Bit for bit; any NaN is like another."""
    same = one == other
    if one.dtype.kind == "f":
        same = (same & (np.signbit(one) == np.signbit(other))) | (np.isnan(one) & np.isnan(other))
    return bool(same.all())


def _narrow_whole(values: np.ndarray) -> np.ndarray:
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    for dtype in (np.int8, np.int16, np.int32):
        limits = np.iinfo(dtype)
        if limits.min <= low and high <= limits.max:
            return values.astype(dtype)
    return values


def _with_shared_exponent(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int16 [..., N] and int8 [..., 1] of [..., N]."""
    missing = np.isnan(values)
    finite = np.where(missing, 0.0, values).astype(np.float64)
    part, exponents = np.frexp(np.abs(finite).max(-1, keepdims=True, initial=0.0) / LARGEST)
    exponents = np.clip(np.where(part == 0.5, exponents - 1, exponents), *_EXPONENTS)
    numbers = np.rint(np.ldexp(finite, -exponents)).clip(-LARGEST, LARGEST)
    return np.where(missing, _MISSING, numbers).astype(np.int16), exponents.astype(np.int8)


def _from_shared_exponent(numbers: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    values = np.ldexp(numbers.astype(np.float32), exponents.astype(np.int32))
    return np.where(numbers == _MISSING, np.float32(np.nan), values)
