"""Builds the native kernels by hand; an install does it by itself (hatch_build.py).

    python scripts/build_native.py                      into src, for development
    python scripts/build_native.py --sanitize --into D  with address and undefined-behaviour sanitizers

CXX names the compiler, CXXFLAGS adds options. Nothing is compiled that is up to date.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

BUILD = Path(__file__).parents[1] / "src" / "attemper" / "backends" / "native" / "build.py"


def loaded() -> ModuleType:
    """build.py, by its path: this runs without torch."""
    spec = importlib.util.spec_from_file_location("attemper_native_build", BUILD)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--into", type=Path, default=BUILD.parent)
    parser.add_argument("--sanitize", action="store_true")
    parser.add_argument("--sets", nargs="+", help="instruction sets; default: all of this architecture")
    options = parser.parse_args()
    build = loaded()
    if options.into == BUILD.parent and not options.sanitize and not options.sets:
        if reason := build.install():
            print(f"The native kernels are not built: {reason}", file=sys.stderr)
            return 1
    else:
        build.libraries(options.into, build.SANITIZE if options.sanitize else [], sets=options.sets)
    for path in build.library_files(options.into):
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
