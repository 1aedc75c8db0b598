"""Builds the native kernels with nothing but a C++ compiler: one shared library per instruction set.

    python scripts/build_native.py                      into src, for development
    python scripts/build_native.py --sanitize --into D  with address and undefined-behaviour sanitizers

CXX names the compiler (default: c++, g++ or clang++ on PATH), CXXFLAGS adds options.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NATIVE = Path(__file__).parents[1] / "src" / "attemper" / "kernels" / "native"
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
}
SANITIZE = ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


class CannotBuildError(RuntimeError):
    """There is no compiler, or it failed; the message is one line for ``attemper doctor``."""


def libraries(into: Path, extra: list[str] | None = None) -> list[Path]:
    """Builds every library that this machine's architecture can have.

    Raises:
        CannotBuildError: no compiler, or it failed.
    """
    compiler = os.environ.get("CXX") or next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if compiler is None:
        raise CannotBuildError("no C++ compiler was found when attemper was installed (Debian: apt-get install g++)")
    names = list(SETS) if platform.machine() in ("x86_64", "AMD64") else ["portable"]
    into.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return list(pool.map(lambda name: _library(shlex.split(compiler), name, into, extra or []), names))


def _library(compiler: list[str], name: str, into: Path, extra: list[str]) -> Path:
    target = into / f"attemper_native_{name}.so"
    partial = target.with_suffix(f".{os.getpid()}")  # a process that has the old library mapped keeps it whole
    own = shlex.split(os.environ.get("CXXFLAGS", ""))
    sources = sorted(str(path) for path in (NATIVE / "source").glob("*.cpp"))
    command = [*compiler, *FLAGS, *SETS[name], *own, *extra, *sources, "-o", str(partial)]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CannotBuildError(f"the C++ compiler could not be started: {error}") from None
    if run.returncode:
        sys.stderr.write(run.stderr[-4000:])
        first = next((line for line in run.stderr.splitlines() if "error" in line), "see the log of the install")
        raise CannotBuildError(f"{compiler[0]} could not compile the {name} library: {first[:160]}")
    partial.replace(target)
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--into", type=Path, default=NATIVE)
    parser.add_argument("--sanitize", action="store_true")
    options = parser.parse_args()
    try:
        for path in libraries(options.into, SANITIZE if options.sanitize else []):
            print(path)
    except CannotBuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
