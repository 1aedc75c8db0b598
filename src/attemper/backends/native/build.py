"""Compiles the native kernels with nothing but a C++ compiler: one shared library per instruction set.

Used by ``hatch_build.py`` (installs), ``scripts/build_native.py`` (by hand) and the tests; it imports nothing but the
standard library, because an install runs it before anything else is there. CXX names the compiler (default: c++, g++ or
clang++ on PATH), CXXFLAGS adds options.

Every library carries a stamp, the hash of its sources, of the command that made it and the version, so that nothing is
compiled again that has not changed, and a library that does not belong to the sources is known and refused when it is
loaded (``library.py``).
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "source"
UNBUILT = "unbuilt.txt"
"""Where an install leaves the reason why it has no native kernels; ``attemper doctor`` shows it."""
# ruff: noqa: SIM905 (a line of flags reads best as one)
# No fast-math: NaN, infinities and the order of sums are part of what the kernels promise.
FLAGS = (
    "-std=c++20 -O3 -fno-math-errno -fno-trapping-math -ffp-contract=fast -fPIC -shared -fvisibility=hidden "
    "-Wall -Wextra -Wno-psabi -Wno-uninitialized -Wno-maybe-uninitialized -Wno-unknown-warning-option -pthread"
).split()
# The two -Wno-*uninitialized: GCC's own vector headers set them off.
SETS = {
    "portable": [],
    "avx2": ["-march=x86-64-v3"],
    "avx512": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
    "avx512bf16": ["-march=x86-64-v4", "-mprefer-vector-width=512", "-mavx512bf16"],
    "amx": ["-march=x86-64-v4", "-mprefer-vector-width=512", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
}
SANITIZE = ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


class CannotBuildError(RuntimeError):
    """There is no compiler, or it failed; the message is one line for ``attemper doctor``."""


def library_files(into: Path = FOLDER) -> list[Path]:
    return sorted(into.glob("attemper_native_*.so"))


def compiler() -> list[str]:
    if platform.system() == "Windows":
        raise CannotBuildError("the native kernels are not written for Windows yet")
    named = os.environ.get("CXX") or next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if named is None:
        raise CannotBuildError("no C++ compiler was found when attemper was installed (Debian: apt-get install g++)")
    return shlex.split(named)


def libraries(
    into: Path = FOLDER, extra: list[str] | None = None, *, source: Path = SOURCE, sets: list[str] | None = None
) -> list[Path]:
    """Builds every library that this machine's architecture can have, unless the one that is there is up to date.
    ``extra``: more options for the compiler. ``sets`` of instructions: by default all that the architecture knows.

    Raises:
        CannotBuildError: no compiler, or it failed. Libraries that were there before are left as they are.
    """
    command = compiler()
    if sets is None:
        sets = list(SETS) if platform.machine() in ("x86_64", "AMD64") else ["portable"]
    options = [*FLAGS, *shlex.split(os.environ.get("CXXFLAGS", "")), *(extra or [])]
    into.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return list(pool.map(lambda name: _library([*command, *options, *SETS[name]], name, into, source), sets))


def install(into: Path = FOLDER, *, source: Path = SOURCE) -> str | None:
    """Builds the libraries; where that fails, leaves none and the reason in a file, and returns the reason."""
    into.mkdir(parents=True, exist_ok=True)
    reason = into / UNBUILT
    try:
        libraries(into, source=source)
    except CannotBuildError as error:
        for old in library_files(into):
            old.unlink()
        reason.write_text(f"{error}\n", encoding="utf-8")
        return str(error)
    reason.unlink(missing_ok=True)
    return None


def stale(into: Path = FOLDER, *, source: Path = SOURCE) -> list[str]:
    """The libraries that were not built from these sources, whatever the compiler and its options."""
    current = hash_of_sources(source).encode()
    return [path.name for path in library_files(into) if current not in path.read_bytes()]


def _library(command: list[str], name: str, into: Path, source: Path) -> Path:
    target = into / f"attemper_native_{name}.so"
    stamp = f"{hash_of_sources(source)}-{hashlib.sha256(shlex.join(command).encode()).hexdigest()[:16]}-{version()}"
    if target.exists() and stamp.encode() in target.read_bytes():
        return target
    partial = target.with_suffix(f".{os.getpid()}")  # a process that has the old library mapped keeps it whole
    sources = sorted(str(path) for path in source.glob("*.cpp"))
    whole = [*command, f'-DATTEMPER_STAMP="{stamp}"', *sources, "-o", str(partial)]
    try:
        run = subprocess.run(whole, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CannotBuildError(f"the C++ compiler could not be started: {error}") from None
    if run.returncode or not partial.exists():
        partial.unlink(missing_ok=True)
        sys.stderr.write(run.stderr[-4000:])
        first = next((line for line in run.stderr.splitlines() if "error: " in line), "it gave no reason")
        first = first.split("error: ")[-1].strip()[:160]
        raise CannotBuildError(f"{command[0]} could not compile the {name} library: {first}")
    partial.replace(target)
    return target


def version() -> str:
    """The version of this package, read and not imported: that would need torch."""
    text = (FOLDER.parents[1] / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    assert found is not None, "attemper/__init__.py has no line with __version__"
    return found[1]


def hash_of_sources(source: Path = SOURCE) -> str:
    """What a library's stamp begins with: 32 hexadecimal digits over the names and texts of the C++ files."""
    digest = hashlib.sha256()
    for path in sorted((*source.glob("*.h"), *source.glob("*.cpp"))):
        digest.update(f"{path.name}\n{path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]
