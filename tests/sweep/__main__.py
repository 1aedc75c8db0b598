"""Runs the sweep over every model type of the installed transformers: ``python -m tests.sweep``.

Results are written after each type, so a run that was ended goes on where it was; ``--again`` starts over. Each batch
of types has a process of its own, with limits of memory and time: what ends it is a reason, "not tried".
"""

from __future__ import annotations

import argparse
import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.sweep import page

ATTEMPT = 30.0
"""Seconds to build a model, and to find inputs for it."""
BATCH, MEMORY, SECONDS = 150, 8 * 2**30, 900
"""Types of a process; what it may allocate, with torch and transformers; how long one type may take, by the clock."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sweep", description=__doc__)
    parser.add_argument("types", nargs="*", help="model types (all that have no result yet)")
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    parser.add_argument("--verdict", choices=page.VERDICTS, help="those with this result")
    parser.add_argument("--results", type=Path, default=page.RESULTS)
    parser.add_argument(
        "--write-page", action="store_true", help="write docs/models.md from the results, and run nothing"
    )
    parser.add_argument(
        "--seconds", type=float, default=ATTEMPT, help=f"of processor time for an attempt to build a model ({ATTEMPT})"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.types, options.seconds)
    elif options.write_page:
        page.write(page.load(options.results))
    else:
        sweep(options)


def sweep(options: argparse.Namespace) -> None:
    known = {row["type"]: row for row in page.load(options.results)}
    wanted = options.types or all_types()
    if options.verdict:
        wanted = [name for name in wanted if known.get(name, {}).get("verdict") == options.verdict]
    elif not options.again and not options.types:
        wanted = [name for name in wanted if name not in known]
    for row in run(wanted, options.seconds):
        known[row["type"]] = row
        page.save(options.results, known.values())
        print(
            f"{row['seconds']:6.1f} s  {row['verdict']:9}  {row['type']}  {'; '.join(row['reasons'])[:150]}", flush=True
        )
    print(page.counts(known.values()))


def all_types() -> list[str]:
    """Every model type of the installed transformers."""
    from transformers.models.auto import configuration_auto

    return sorted(vars(configuration_auto)["CONFIG_MAPPING_NAMES"])


def run(types: list[str], seconds: float = ATTEMPT) -> Iterator[dict[str, Any]]:
    """The result of each type, as it comes."""
    waiting = list(types)
    while waiting:
        batch, waiting = waiting[:BATCH], waiting[BATCH:]
        command = ["nice", sys.executable, "-m", "tests.sweep", "--worker", "--seconds", str(seconds), *batch]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for place, name in enumerate(batch):
                start = time.monotonic()
                row, why = _next(process, start)
                yield row or {**_not_tried(name, why), "seconds": round(time.monotonic() - start, 1)}
                if row is None:
                    process.kill()
                    waiting = batch[place + 1 :] + waiting
                    break


def _next(process: subprocess.Popen[str], start: float) -> tuple[dict[str, Any] | None, str]:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], SECONDS)
    if not ready:
        return None, f"it took longer than {SECONDS} s"
    line = process.stdout.readline()
    if line:
        return json.loads(line), ""
    return None, f"its process ended with {process.wait()}"


def _not_tried(name: str, why: str) -> dict[str, Any]:
    return {"type": name, "verdict": "not tried", "reasons": [why]}


def work(types: list[str], seconds: float) -> None:
    """In a process of its own: a line of JSON for each type."""
    import logging
    import os
    import resource
    import warnings

    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what models print
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    import torch

    torch.set_num_threads(1)
    from tests.sweep.judge import judge

    for name in types:
        print(json.dumps(asdict(judge(name, seconds))), file=out, flush=True)


if __name__ == "__main__":
    main()
