"""What every experiment of ``attemper lab`` takes: seconds of a fresh process, the import of torch among them.

    python benchmarks/lab_times.py [--rounds 3] [--json FILE]

Shown: median, smallest and largest over rounds. The limit is 30 s.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from attemper.lab import EXPERIMENTS

COMMAND = Path(sys.executable).with_name("attemper")
LIMIT_S = 30.0


def process_s(name: str) -> float:
    """Wall time of ``attemper lab name``, in seconds."""
    start = time.perf_counter()
    subprocess.run([str(COMMAND), "lab", name], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the seconds of every round into this file")
    arguments = parser.parse_args()
    # In turns, so that a slow moment of the machine does not fall on one experiment alone.
    rounds = [{name: process_s(name) for name in EXPERIMENTS} for _ in range(arguments.rounds)]
    found = {name: [one[name] for one in rounds] for name in EXPERIMENTS}
    print(f"{os.cpu_count()} cores, {arguments.rounds} rounds, seconds of a process")
    print(f"{'experiment':<16}{'median':>8}{'least':>8}{'most':>8}")
    for name, seconds in found.items():
        over = f"  over {LIMIT_S:g}" if median(seconds) > LIMIT_S else ""
        print(f"{name:<16}{median(seconds):>8.1f}{min(seconds):>8.1f}{max(seconds):>8.1f}{over}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2), encoding="utf-8")
    sys.exit(any(median(seconds) > LIMIT_S for seconds in found.values()))


if __name__ == "__main__":
    main()
