"""How many test cases there are by folder: in a default run, and in all.

python scripts/cases.py [FOLDER OR FILE ...]
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]


def counted(*options: str) -> Counter[str]:
    """Cases by folder, two names deep."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    files = (line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line)
    return Counter("/".join(PurePosixPath(file).parent.parts[:2]) for file in files)


def main() -> None:
    default, everything = counted(*sys.argv[1:]), counted("--all", *sys.argv[1:])
    print(f"{'folder':24}{'default':>9}{'--all':>9}")
    for folder, number in sorted(everything.items()):
        print(f"{folder:24}{default[folder]:9,}{number:9,}")
    print(f"{'together':24}{default.total():9,}{everything.total():9,}")


if __name__ == "__main__":
    main()
