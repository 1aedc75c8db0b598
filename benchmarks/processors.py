"""Appends what this processor measures to ``benchmarks/results/processors.json`` and draws the table of
``docs/benchmarks.md`` anew: a column for each processor, this machine's in the place of what it had.

    python benchmarks/processors.py [--pairs N] [--seconds S] [--only-table]

Runs ``native.py`` (attention with every statistic against PyTorch's without any), ``scan_minilm.py`` (a scan against
the model's own forward pass) and ``startup.py`` one after another, twenty minutes on an idle machine. The first
two check their results before they time them. --only-table: draws what is there.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from attemper import __version__
from attemper.bench.hardware import machine
from attemper.bench.shape import Shape

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "processors.json"
PAGE = HERE.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- processors: begin -->", "<!-- processors: end -->"
SCANS = {1: "", 8: "8 batches of "}
"""Batches of a scan: the first runs whole, later ones end behind the last attention."""
Column = dict[str, Any]
"""What one processor measured: ``name``, ``version`` of attemper, ``machine``, and ``cells``, text by row."""


def script(name: str, *options: str) -> Any:
    """What a benchmark writes into its JSON file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        subprocess.run([sys.executable, str(HERE / name), *options, "--json", str(file)], check=True)
        return json.loads(file.read_text(encoding="utf-8"))


def measured(pairs: int, seconds: float) -> Column:
    """This machine's column."""
    here = machine()
    native = script("native.py", "--pairs", str(pairs), "--seconds", str(seconds))
    cells = {row_title(Shape(**row["shape"])): against_sdpa(row) for row in native["rows"]}
    for batches, what in SCANS.items():
        repeats = max(5, min(pairs, 15) // batches)
        scan = script("scan_minilm.py", "--batches", str(batches), "--repeats", str(repeats))
        cells[f"scan of MiniLM, {what}8 x 512 tokens, against its forward pass"] = (
            f"{scan['ratio_to_sdpa_forward']:.2f} ({scan['low']:.2f} to {scan['high']:.2f})"
        )
    for row in script("startup.py")["rows"]:
        cells[f"{row['what']}, seconds"] = f"{row['median_s']:.2g}"
    name = f"{here.processor}, {here.instructions}, {here.threads} threads"
    return {"name": name, "version": __version__, "machine": asdict(here), "cells": cells}


def row_title(shape: Shape) -> str:
    return f"{str(shape).replace(',', ', ')} {shape.dtype}, {shape.mode}"


def against_sdpa(row: dict[str, Any]) -> str:
    """The ratio to the fastest of PyTorch's ways and our share of the registers' peak, with quartiles of the rounds."""
    way = max((name for name in ("sdpa", "sdpa_packed_heads") if name in row["ratios"]), key=row["ratios"].get)
    low, high = row["ratio_quartiles"][way]
    share = ""
    if row["peak_share"] is not None:
        first, third = row["peak_share_quartiles"]
        share = f", {row['peak_share']:.0%} ({100 * first:.0f} to {100 * third:.0f})"
    return f"{row['ratios'][way]:.2f} ({low:.2f} to {high:.2f}){share}"


def with_column(columns: list[Column], new: Column) -> list[Column]:
    """``columns`` with the new one, in the place of an earlier one of the same processor."""
    names = [column["name"] for column in columns]
    if new["name"] not in names:
        return [*columns, new]
    return [new if column["name"] == new["name"] else column for column in columns]


def table(columns: list[Column]) -> str:
    """The ratios as Markdown, without spreads: a row for each thing measured, a column for each processor."""
    titles = dict.fromkeys(title for column in columns for title in column["cells"] if "seconds" not in title)
    heads = [
        f"{column['name']}; torch {column['machine']['torch']}, attemper {column['version']}" for column in columns
    ]
    lines = ["| B, H, N, D; pass, full / causal | " + " | ".join(heads) + " |", "|---" * (1 + len(columns)) + "|"]
    for title in titles:
        stem, mode = title.rpartition(", ")[::2]
        pair = f"{stem}, causal"
        if mode == "causal" and f"{stem}, full" in titles:
            continue
        both = mode == "full" and pair in titles
        cells = [shortened(column["cells"].get(title, "")) for column in columns]
        if both:
            causal = (shortened(column["cells"].get(pair, "")) for column in columns)
            cells = [" / ".join(filter(None, cell)) for cell in zip(cells, causal, strict=True)]
        lines.append(f"| {stem if both else title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def shortened(cell: str) -> str:
    """The ratio alone: without quartiles and the share of the peak."""
    return re.sub(r"[ ,].*", "", cell)


def draw(columns: list[Column]) -> None:
    """Puts the table between its marks in the page."""
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"{PAGE} has not both marks, {BEGIN} and {END}: put them where the table belongs.")
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(columns)}\n\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=101, help="rounds of a row, as far as its seconds reach")
    parser.add_argument("--seconds", type=float, default=6.0, help="about how long one row of native.py may take")
    parser.add_argument("--only-table", action="store_true")
    options = parser.parse_args()
    columns: list[Column] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    if not options.only_table:
        columns = with_column(columns, measured(options.pairs, options.seconds))
        RESULTS.write_text(json.dumps(columns, indent=2) + "\n", encoding="utf-8")
    draw(columns)


if __name__ == "__main__":
    main()
