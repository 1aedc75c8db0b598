"""What starting costs: ``import attemper`` beyond bare Python, and ``attemper --help``.

Each round runs bare Python, the import and the command one after the other, in fresh processes. Differences are taken
within a round, so that a slow moment of the machine falls on both. Shown: median, smallest and largest over rounds.

    python benchmarks/import_time.py [--rounds 11] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median

COMMAND = Path(sys.executable).with_name("attemper")
BARE = [sys.executable, "-c", "pass"]
IMPORT = [sys.executable, "-c", "import attemper"]
HELP = [str(COMMAND), "--help"]
LIMITS_MS = {"import attemper, beyond bare python": 100.0, "attemper --help": 500.0}


def process_ms(command: list[str]) -> float:
    """Wall time of one fresh process, in milliseconds."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return (time.perf_counter() - start) * 1e3


def check_nothing_heavy_is_loaded() -> None:
    """A start that loads torch is wrong before it is slow."""
    probe = (
        "import sys, attemper; sys.exit(' '.join({'torch', 'numpy', 'transformers', 'typer'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", probe], check=True)


def measured(rounds: int) -> list[dict[str, float | str]]:
    """One row per quantity: median, smallest and largest over ``rounds``, in milliseconds."""
    for command in (BARE, IMPORT, HELP):
        process_ms(command)  # bytecode and file cache
    times = [[process_ms(command) for command in (BARE, IMPORT, HELP)] for _ in range(rounds)]
    samples = {
        "bare python": [bare for bare, _, _ in times],
        "import attemper, beyond bare python": [imported - bare for bare, imported, _ in times],
        "attemper --help": [shown for _, _, shown in times],
    }
    return [
        {"what": what, "median_ms": median(ms), "min_ms": min(ms), "max_ms": max(ms)}
        | ({"limit_ms": LIMITS_MS[what]} if what in LIMITS_MS else {})
        for what, ms in samples.items()
    ]


def environment() -> dict[str, str]:
    """What the numbers depend on."""
    return {
        "attemper": version("attemper"),
        "python": platform.python_version(),
        "torch": version("torch"),
        "typer": version("typer"),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0]}, {len(models)} cores" if models else platform.processor() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows and the environment there")
    options = parser.parse_args()
    if not COMMAND.exists():
        sys.exit(f"{COMMAND} does not exist: install the package for this Python, pip install -e .")
    check_nothing_heavy_is_loaded()
    rows = measured(options.rounds)
    print(f"| {'start':36} | {'median ms':>9} | {'min':>6} | {'max':>6} | {'limit':>6} |")
    print(f"|{'-' * 38}|{'-' * 10}:|{'-' * 7}:|{'-' * 7}:|{'-' * 7}:|")
    for row in rows:
        limit = row.get("limit_ms", "")
        print(
            f"| {row['what']:36} | {row['median_ms']:9.1f} | {row['min_ms']:6.1f} | {row['max_ms']:6.1f} | {limit:>6} |"
        )
    print("\n" + ", ".join(f"{name} {value}" for name, value in environment().items()) + f", {options.rounds} rounds")
    if options.json:
        document = {"benchmark": "import_time", "rounds": options.rounds, "environment": environment(), "rows": rows}
        options.json.write_text(json.dumps(document, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
