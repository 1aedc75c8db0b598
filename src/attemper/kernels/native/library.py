"""The shared library of this machine's instruction set: found, loaded, checked; or the reason why not."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from attemper.errors import BackendError

_FOLDER = Path(__file__).parent
_BUILDS = {"AVX512": ("amx", "avx512bf16", "avx512", "avx2", "portable"), "AVX2": ("avx2", "portable")}
"""What PyTorch says of the processor (ATEN_CPU_CAPABILITY overrides it) -> builds in the order of preference."""


def library() -> ctypes.CDLL:
    """The loaded library.

    Raises:
        BackendError: there is none for this processor, or it cannot be loaded.
    """
    found = _found()
    if isinstance(found, str):
        raise BackendError(f"backend='native' cannot serve this call: {found}. Use backend='blocked' or install again.")
    return found


def why_unusable() -> str | None:
    """Why the library that is there does not serve this process; None where it does."""
    found = _found()
    return found if isinstance(found, str) else None


@cache
def _found() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    capability = torch.backends.cpu.get_cpu_capability()
    for build in builds(capability):
        path = _FOLDER / f"attemper_native_{build}.so"
        if not path.exists():
            continue
        try:
            loaded = declared(ctypes.CDLL(str(path)))
        except (OSError, AttributeError) as error:
            return f"its library cannot be loaded ({error})"
        if loaded.attemper_usable():
            return loaded
    return f"{_FOLDER} has no library for a processor with {capability}"


def builds(capability: str) -> tuple[str, ...]:
    """Instruction sets to try, the best first; whether the processor has one is asked of its library."""
    return _BUILDS.get(capability, ("portable",))


def declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    """The library with the types of its functions."""
    loaded.attemper_forward.argtypes = (ctypes.c_char_p,)
    loaded.attemper_backward.argtypes = (ctypes.c_char_p,)
    loaded.attemper_row_forward.argtypes = (ctypes.c_char_p,)
    loaded.attemper_row_backward.argtypes = (ctypes.c_char_p,)
    loaded.attemper_sums.argtypes = (ctypes.c_char_p,)
    loaded.attemper_statistics.argtypes = (ctypes.c_int64, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)
    loaded.attemper_weights.argtypes = (
        *(ctypes.c_int64,) * 3, *(ctypes.c_double,) * 2, ctypes.c_void_p, ctypes.c_int64, *(ctypes.c_void_p,) * 2,
        ctypes.c_int64,
    )  # fmt: skip
    loaded.attemper_slope.argtypes = (
        *(ctypes.c_int64,) * 3, ctypes.c_double, ctypes.c_void_p, ctypes.c_int64, *(ctypes.c_void_p,) * 3,
        ctypes.c_int64,
    )  # fmt: skip
    loaded.attemper_usable.restype = ctypes.c_int
    loaded.attemper_stamp.restype = ctypes.c_char_p
    loaded.attemper_peak_flops.argtypes = (ctypes.c_int64,)
    loaded.attemper_peak_flops.restype = ctypes.c_double
    return loaded


def run(name: str, call: bytes) -> None:
    """Calls a function of the library on an ``Arguments`` in bytes; the interpreter's lock is released meanwhile."""
    wrong = getattr(library(), name)(call)
    if wrong == 2:
        raise MemoryError(f"{name}: no memory for the partial sums")
    assert wrong == 0, f"{name} returned {wrong}: the library and arguments.py differ; rebuild it"
