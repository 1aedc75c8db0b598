"""The shared library of this machine's instruction set: found, loaded, checked; or the reason why not."""

from __future__ import annotations

import ctypes
import warnings
from functools import cache
from pathlib import Path

import torch

from attemper import __version__
from attemper.errors import BackendError

_FOLDER = Path(__file__).parent
_BUILDS = {"AVX512": ("amx", "avx512bf16", "avx512", "avx2", "portable"), "AVX2": ("avx2", "portable")}
"""What PyTorch says of the processor (ATEN_CPU_CAPABILITY overrides it) -> builds in the order of preference."""
_OTHER_LAYOUT, _NO_MEMORY, _UNKNOWN_NORMALIZER = 1, 2, 4


def library() -> ctypes.CDLL:
    found = _load()
    if isinstance(found, str):
        raise BackendError(f"backend='native' cannot serve this call: {found}. Use backend='blocked' or install again.")
    return found


def why_foreign(path: Path, stamp: str, sources: Path) -> str | None:
    """Why a library with this stamp does not belong to this version, and what to do; None where it does.

    One from other sources may take an argument for another and compute with it. Where the C++ sources lie in the folder
    ``sources``, it must be built from them; an install has none, and there it must be of the same version.
    """
    of_sources, _, version = (*stamp.split("-", 2), "", "")[:3]
    if any(sources.glob("*.cpp")):
        from attemper.backends.native.build import hash_of_sources  # an install has no build.py either

        came, wanted = f"sources {of_sources[:12] or '?'}", f"sources {hash_of_sources(sources)[:12]}"
    else:
        came, wanted = f"version {version or '?'}", f"version {__version__}"
    if came == wanted:
        return None
    return (
        f"{path.name} was built from other sources than those of this attemper: its stamp says {came}, and {wanted} "
        "is needed. Build it again: python scripts/build_native.py in a source tree, else pip install "
        "--force-reinstall attemper"
    )


def why_unusable() -> str | None:
    """Why the library that is there does not serve this process; None where it does."""
    found = _load()
    return found if isinstance(found, str) else None


def file_name() -> str:
    """Of the library that serves this process. ``BackendError``: there is none, or it cannot be loaded."""
    return Path(library()._name).name


@cache
def _load() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    capability = torch.backends.cpu.get_cpu_capability()
    for build in builds(capability):
        path = _FOLDER / f"attemper_native_{build}.so"
        if not path.exists():
            continue
        try:
            loaded = ctypes.CDLL(str(path))
            if not loaded.attemper_usable():
                continue
            if (wrong := why_foreign(path, stamp_of(loaded), _FOLDER / "source")) is None:
                return declare_types(loaded)
        except (OSError, AttributeError) as error:
            return f"its library cannot be loaded ({error})"
        # "auto" goes on without it, many times slower at long sequences: not without a word.
        warnings.warn(f"attemper: the native kernels are not used: {wrong}.", RuntimeWarning, stacklevel=2)
        return wrong
    return f"{_FOLDER} has no library for a processor with {capability}"


def builds(capability: str) -> tuple[str, ...]:
    """Instruction sets to try, the best first; whether the processor has one is asked of its library."""
    return _BUILDS.get(capability, ("portable",))


def stamp_of(loaded: ctypes.CDLL) -> str:
    """Which sources, command and version it was built from (``build.py``); "" where it does not say."""
    if not hasattr(loaded, "attemper_stamp"):
        return ""
    loaded.attemper_stamp.restype = ctypes.c_char_p
    return loaded.attemper_stamp().decode()


def declare_types(loaded: ctypes.CDLL) -> ctypes.CDLL:
    """The library with the types of its functions."""
    loaded.attemper_forward.argtypes = (ctypes.c_char_p,)
    loaded.attemper_forward_again.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
    loaded.attemper_backward.argtypes = (ctypes.c_char_p,)
    loaded.attemper_rowwise_forward.argtypes = (ctypes.c_char_p,)
    loaded.attemper_rowwise_backward.argtypes = (ctypes.c_char_p,)
    loaded.attemper_sums.argtypes = (ctypes.c_char_p,)
    loaded.attemper_statistics.argtypes = (ctypes.c_int64, ctypes.c_char_p, ctypes.c_char_p)
    whole, real, pointer = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
    loaded.attemper_weights.argtypes = (whole, whole, whole, real, real, pointer, whole, pointer, pointer, whole)
    loaded.attemper_gradient.argtypes = (whole, whole, whole, real, pointer, whole, pointer, pointer, pointer, whole)
    loaded.attemper_usable.restype = ctypes.c_int
    loaded.attemper_limit_allocations.argtypes = (ctypes.c_int64,)
    loaded.attemper_limit_allocations.restype = None
    loaded.attemper_peak_flops.argtypes = (ctypes.c_int64,)
    loaded.attemper_peak_flops.restype = ctypes.c_double
    return loaded


def run(name: str, call: bytes) -> None:
    """Calls a function of the library on an ``Arguments`` in bytes; the interpreter's lock is released meanwhile."""
    check(name, getattr(library(), name)(call))


def check(name: str, code: int) -> None:
    """Raises what a function of the library says by its return value; 0 is fine (``source/memory.h``).

    Raises:
        MemoryError: the system gave no memory. What the call had written is no result.
        BackendError: the library and this file differ, or the library found itself wrong.
    """
    if code == 0:
        return
    if code == _NO_MEMORY:
        raise MemoryError(
            f"backend='native' ({name}) got no memory for what it keeps beside the tensors. Free some, use fewer "
            "threads (torch.set_num_threads: each has its buffers) or shorter sequences, or name "
            "backend='blocked', which works in smaller blocks."
        )
    if code == _OTHER_LAYOUT:
        raise BackendError(
            f"backend='native' ({name}): the library was built for another version of attemper. "
            "Build it again: python scripts/build_native.py, or install again; or use backend='blocked'."
        )
    if code == _UNKNOWN_NORMALIZER:
        raise BackendError(
            f"backend='native' ({name}): the library does not know this normalizer. Build it again: python "
            "scripts/build_native.py, or install again; or use backend='blocked'."
        )
    raise BackendError(
        f"backend='native' ({name}) returned {code}: its memory plan failed, and nothing was "
        "overwritten. That is a defect; please report the call. Use backend='blocked'."
    )
