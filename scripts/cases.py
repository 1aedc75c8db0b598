"""How many test cases there are by folder, in each lane.

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
    lanes = {name: counted(*name.split(), *sys.argv[1:]) for name in ("", "--all", "--long")}
    print(f"{'folder':24}{'default':>9}{'--all':>9}{'--long':>9}")
    for folder in sorted(set().union(*lanes.values())):
        print(f"{folder:24}" + "".join(f"{lane[folder]:9,}" for lane in lanes.values()))
    print(f"{'together':24}" + "".join(f"{lane.total():9,}" for lane in lanes.values()))


if __name__ == "__main__":
    main()
