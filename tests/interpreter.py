"""Triton's interpreter as the tests use it: kernels run on the CPU, operation by operation, in numpy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any, cast

import numpy as np


@contextmanager
def interpreting() -> Iterator[None]:
    """numpy warns of every infinity, which kernels meet on purpose; and see ``_quickened`` and ``_rounded``."""
    if find_spec("triton"):
        _quickened()
        _rounded()
    with np.errstate(all="ignore"):
        yield


@cache
def _quickened() -> None:
    """Takes out a repeated search of the interpreter: half of its time.

    At every call of one jit function by another it looks through ``triton.language`` for functions to replace, all of
    which the first call from the same module has replaced.
    """
    from triton.runtime import interpreter

    call, known = interpreter.InterpretedFunction.__call__, set()

    def quick(self: interpreter.InterpretedFunction, *args: object, **kwargs: object) -> object:
        if self.fn.__module__ in known:
            return self.rewrite()(*args, **kwargs)
        known.add(self.fn.__module__)
        return call(self, *args, **kwargs)

    interpreter.InterpretedFunction.__call__ = quick


@cache
def _rounded() -> None:
    """float32 goes to bfloat16 by rounding to nearest, as on every machine: the interpreter cuts the digits off."""
    import triton.language as tl
    from triton.runtime import interpreter

    given = interpreter.InterpreterBuilder.cast_impl

    def nearest(self: interpreter.InterpreterBuilder, src: interpreter.TensorHandle, kind: tl.dtype) -> object:
        if (src.dtype.scalar, kind.scalar) != (tl.float32, tl.bfloat16):
            return given(self, src, kind)
        bits = np.ascontiguousarray(src.data).view(np.uint32)
        even = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return interpreter.TensorHandle(np.where(np.isnan(src.data), np.uint16(0x7FC0), even), kind.scalar)

    cast(Any, interpreter.InterpreterBuilder).cast_impl = nearest
