"""Is a compiled training the same to the last bit with a watch, and is every head seen? A row for each kind.

    python benchmarks/compiled.py [NAME ...] [--backend inductor] [--steps 100] [--json FILE]

Each kind (tests/support/shadow_models.py, and for two ranks of gloo tests/distributed/worker.py) trains twice from the
same start: alone, and with ``attemper.watch(model, every=2)``. Compared are all losses, weights, buffers and the next
random number, to the last bit, and dynamo's counters: where these differ, the row has by how many graphs and frames.
Rows of a FILE that is there already are kept.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.distributed.worker import COMPILED
from tests.support.ranks import torchrun
from tests.support.shadow_models import ITEMS, compared

from attemper.bench.hardware import machine

RANKS = {f"{name}, two ranks": f"training {name}" for name in COMPILED}


def ranks(case: str) -> dict[str, Any]:
    """The row of the rank that comes out worst."""
    with tempfile.TemporaryDirectory() as folder:
        both = [one[case] for one in torchrun("tests.distributed.worker", Path(folder), case, seconds=1500)]
    return next((one for one in both if not one["right"]), both[0])


def row_of(name: str, backend: str, steps: int) -> dict[str, Any]:
    if name in RANKS:
        return {"backend": "aot_eager", **ranks(RANKS[name])}
    return {"backend": backend, **compared(ITEMS[name], backend, steps)}


def compilations(row: dict[str, Any]) -> str:
    """How dynamo's counters differ."""
    more = ", ".join(f"{row[f'more {what}']} {what} more" for what in ("graphs", "frames") if f"more {what}" in row)
    return "equal" if row["compilations equal"] else more or "DIFFER"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {'; '.join([*ITEMS, *RANKS])}")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    kept = json.loads(options.json.read_text())["rows"] if options.json is not None and options.json.exists() else {}
    found: dict[str, dict[str, Any]] = {}
    print("| training | backend | steps | losses | weights | counters | graphs | heads |\n|" + "---|" * 8)
    for name in options.names or [*ITEMS, *RANKS]:
        row = found[name] = row_of(name, options.backend, options.steps)
        equal = ("equal" if row[f"{what} equal"] else "DIFFER" for what in ("losses", "weights"))
        heads = sum(row["heads"].values())
        cells = (name, row["backend"], row["steps"], *equal, compilations(row), row["graphs"], heads)
        print("|", " | ".join(map(str, cells)), "|", flush=True)
        if options.json is not None:
            rows = {"machine": asdict(machine()), "rows": {**kept, **found}}
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(not all(row["right"] for row in found.values()))


if __name__ == "__main__":
    main()
