"""``python -m tests.fuzz --seed N`` redoes one call; ``--calls N [--from SEED]`` makes many."""

from __future__ import annotations

import argparse
import collections
import os
import time

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

from attemper.backends.table import BACKENDS
from tests.fuzz.check import findings
from tests.fuzz.draws import draw


def backends() -> tuple[str, ...]:
    """All of this machine, and "auto"."""
    return ("auto", *(backend.name for backend in BACKENDS if backend.missing is None))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--from", type=int, default=0, dest="first")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.seed is not None:
        print(draw(given.seed, backends()))
        print("\n".join(findings(given.seed, backends())) or "as the oracle says")
        return
    counts: collections.Counter[str] = collections.Counter()
    began = time.monotonic()
    for seed in range(given.first, given.first + given.calls):
        found = findings(seed, backends())
        for line in found:
            print(line, flush=True)
        refused = bool(found) and found[0].startswith("refused")
        counts["refused transforms" if refused else "wrong" if found else "right"] += 1
    seconds = time.monotonic() - began
    print(f"seeds {given.first} to {given.first + given.calls - 1}: {dict(counts)}, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
