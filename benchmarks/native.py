"""The native kernel with every statistic of one pass, against PyTorch's attention without any.

    python benchmarks/native.py [--quick] [--threads N] [--pairs N] [--json FILE] [--only WORD] [--cpu-time]

Every shape is checked against float64 first; then all ways run in turns in one process, and ratios are medians of
pairs (beside them, in brackets, the ratio of the shortest times). Below 1 is faster than PyTorch. Backward takes the
entropy's gradient along. --quick: a minute. --cpu-time, on a machine that is busy with something else: one thread, and
the time that it was given.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch

from attemper.bench.attention import AttentionRow, measure, peak_extra_bytes
from attemper.bench.hardware import machine
from attemper.bench.shape import Shape

PLAIN = ("1,8,2048,64", "1,8,2048,128", "1,4,8192,64", "2,12,512,64", "4,12,128,64")
"""Each forward and forward + backward, full and causal."""
FORWARD = ("1,8,4096,128",)
HALF = ("1,8,2048,64",)
DECODE = ("8,32,8,1,8192,128",)
WINDOW = ("1,4,8192,64", 1024)
"""A shape, and how many keys a causal query of it sees at most; forward and forward + backward."""
QUICK = ("1,8,512,64", "2,12,512,64", "4,12,128,64")
MEMORY = "1,8,32768,64"
HEADINGS = {
    "sdpa": "SDPA",
    "sdpa_packed_heads": "packed",
    "two_sdpa_calls": "two SDPA",
    "eager_entropy": "eager + H",
    "without_statistics": "no stats",
}


def shapes(quick: bool) -> list[Shape]:
    """What is measured, in the order of the table."""
    sides = (False, True)
    if quick:
        return [Shape.of(text, causal=causal) for text in QUICK for causal in sides]
    plain = [Shape.of(text, causal=causal) for text in PLAIN for causal in sides]
    return [
        *plain,
        *(Shape.of(text, causal=causal) for text in FORWARD for causal in sides),
        *(replace(shape, backward=True) for shape in plain),
        *(
            Shape.of(text, causal=causal, dtype=dtype)
            for text in HALF
            for dtype in ("bfloat16", "float16")
            for causal in sides
        ),
        *(Shape.of(text) for text in DECODE),
        *(Shape.of(WINDOW[0], window=WINDOW[1], backward=backward) for backward in sides),
    ]


def line(row: AttentionRow) -> str:
    cells = [f"{row.shape!s:<18}{row.shape.dtype:<10}{row.shape.mode:<34}{row.ms:>9.2f}{row.share():>15}"]
    for name in HEADINGS:
        if name not in row.ratios:
            cells.append(f"{'-':>14}")
            continue
        least = row.least_ms["ours"] / row.least_ms[name]
        cells.append(f"{f'{row.ratios[name]:.2f} ({least:.2f})':>14}")
    return "".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=20.0, help="about how long one row may take")
    parser.add_argument("--only", default="", help="rows whose shape, type and mode contain this")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1 if options.cpu_time else options.threads)
    here = machine()
    print(here)
    print(
        f"{'B,H,N,D or B,H,G,Q,K,D':<28}{'':<34}{'ms':>9}{'peak':>15}" + "".join(f"{h:>14}" for h in HEADINGS.values())
    )
    rows = []
    for shape in shapes(options.quick):
        if options.only not in f"{shape} {shape.dtype} {shape.mode}":
            continue
        seconds = 5.0 if options.quick else options.seconds
        row = measure(shape, backend="native", pairs=options.pairs, seconds=seconds, cpu_time=options.cpu_time)
        rows.append(row)
        print(line(row), flush=True)
    if not rows:
        sys.exit(f"no row contains {options.only!r}")
    peaks = [row.peak_gflops for row in rows if row.peak_gflops is not None]
    print(f"peak: {max(peaks):.0f} GFLOP/s of multiply-adds in registers" if peaks else "peak: not measured")
    extra = None
    if not options.quick and not options.only:
        extra = peak_extra_bytes(Shape.of(MEMORY, causal=True), backend="native")
        print(f"peak extra memory at {MEMORY}: " + ("not told here" if extra is None else f"{extra / 2**20:.1f} MiB"))
    if options.json:
        document = {
            "machine": asdict(here),
            "rows": [row.to_dict() for row in rows],
            "extra_shape": MEMORY,
            "extra_bytes": extra,
        }
        options.json.write_text(json.dumps(document, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
