"""What happens to a run whose file meets trouble while it is written: killed processes, full disks, locks, forks.

    python benchmarks/faults.py [--kills 200] [--many 600]

Each fault runs in a process of its own; the loop hands over a sample every 2 ms. "warnings" counts what a user is told,
"read" what a reader finds afterwards, every number compared. The default tests run a short form of it.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.faults import all_faults, apart, data_loader_workers, killed
from tests.support.samples import sites

from attemper.store import schema, writer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--many", type=int, default=600, help="samples of each other fault")
    arguments = parser.parse_args()
    logging.lastResort = None
    schema.PATIENCE_SECONDS, writer.RETRY_SECONDS = 0.5, 0.2
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    print("| fault | training went on | taken | written | dropped | read | warnings | |")
    print("|---|---|---|---|---|---|---|---|")
    failed = False
    for fault in (
        *all_faults(folder, kills=arguments.kills, many=arguments.many),
        lambda: killed(folder / "large", arguments.kills // 4, sites(16, 16), longest=1.0),
        lambda: data_loader_workers(folder / "workers", arguments.many),
    ):
        found = apart(fault)()
        failed |= not found.went_on
        read = "" if found.read is None else f"{found.read:,}"
        counts = f"{found.taken:,} | {found.written:,} | {found.dropped:,} | {read}"
        went_on = "yes" if found.went_on else "NO"
        print(f"| {found.fault} | {went_on} | {counts} | {len(found.warnings)} | {found.note} |", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
