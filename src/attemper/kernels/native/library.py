"""The shared library of this machine's instruction set: found, loaded, checked; or the reason why not."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from attemper.errors import BackendError
from attemper.kernels.native.arguments import Arguments

_FOLDER = Path(__file__).parent
_BUILDS = {"AVX512": ("avx512", "avx2", "portable"), "AVX2": ("avx2", "portable")}
"""What PyTorch says of the processor (ATEN_CPU_CAPABILITY overrides it) -> builds in the order of preference."""


@cache
def library() -> ctypes.CDLL:
    """The loaded library.

    Raises:
        BackendError: there is none for this processor, or it cannot be loaded.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    for build in _BUILDS.get(capability, ("portable",)):
        path = _FOLDER / f"attemper_native_{build}.so"
        if not path.exists():
            continue
        try:
            return _declared(ctypes.CDLL(str(path)))
        except OSError as error:
            raise _unusable(f"its library cannot be loaded ({error})") from None
    raise _unusable(f"{_FOLDER} has no library for a processor with {capability}")


def _unusable(reason: str) -> BackendError:
    return BackendError(f"backend='native' cannot serve this call: {reason}. Use backend='blocked' or install again.")


def _declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    loaded.attemper_forward.argtypes = (ctypes.POINTER(Arguments),)
    loaded.attemper_backward.argtypes = (ctypes.POINTER(Arguments),)
    loaded.attemper_stamp.restype = ctypes.c_char_p
    loaded.attemper_peak_flops.argtypes = (ctypes.c_int64,)
    loaded.attemper_peak_flops.restype = ctypes.c_double
    return loaded


def run(name: str, call: Arguments) -> None:
    """Calls a function of the library; the interpreter's lock is released meanwhile."""
    wrong = getattr(library(), name)(ctypes.byref(call))
    if wrong == 2:
        raise MemoryError(f"{name}: no memory for the partial sums")
    assert wrong == 0, f"{name} returned {wrong}: the library and arguments.py differ; rebuild it"
