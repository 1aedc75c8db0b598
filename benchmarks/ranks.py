"""What merging the samples of several ranks costs a training step, and how many bytes it sends.

    python benchmarks/ranks.py [--model bytes] [--ranks 2] [--pairs 60] [--cpu-time] [--json FILE]

Processes of gloo with one thread each train copies of one model under DistributedDataParallel in turns, one step of
each a round, all ranks together: not watched; sampled alone and sampled merged, at every step; merged, between two
samples. First a check that losses are bit-identical with and without. Ratios are medians over the rounds of times of
one round, of the rank that is slowest in it. At every=50, 49 steps in 50 are between two samples: that ratio follows
from the two.

Without processes: the bytes of a sampled step for models of other sizes, from the layout of the slots.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from overhead import MODELS, NEVER, ROWS, WARM, Training
from torch.nn.parallel import DistributedDataParallel

import attemper
from attemper.bench.hardware import machine
from attemper.distributed.merged_sample import Slots
from attemper.readings.reading import FEWEST_KEYS
from attemper.readings.sample import SiteLabel

BOUND = 1.02
"""Of a step at every=50."""
SIZES = {
    "7B: 32 layers, 32 heads, no tensor parallelism": (32, 32),
    "70B: 80 layers, 64 heads, tensor parallelism of 8": (80, 8),
    "405B: 126 layers, 128 heads, tensor parallelism of 8, a pipeline of 16": (8, 16),
}
"""Name -> layers and heads of one rank."""


def training(kind: str, **watched: Any) -> Training:
    """Of one copy of the model on this rank."""
    wrapped = DistributedDataParallel(_Loss(*MODELS[kind]()))
    return Training(wrapped, wrapped, attemper.watch(wrapped, rows=ROWS, **watched) if watched else None)


class _Loss(torch.nn.Module):
    """A model with its loss as a module, for DistributedDataParallel."""

    def __init__(self, model: torch.nn.Module, loss: Any) -> None:
        super().__init__()
        self.model, self._of = model, loss

    def forward(self) -> torch.Tensor:
        return self._of(self.model)


def check(kind: str) -> None:
    """Losses of three steps are the same bits, watched or not."""
    found = []
    for watched in ({}, {"every": 1, "reduce": "data"}):
        step = training(kind, **watched)
        torch.manual_seed(2)
        found.append(torch.stack([step() for _ in range(3)]))
        step.close()
    if not torch.equal(*found):
        sys.exit(f"{kind}: losses differ: {found}. No timing of a wrong result.")


def measure(rank: int, ranks: int, kind: str, pairs: int, cpu_time: bool, folder: str) -> None:
    """On one rank: times of every way, of the slowest rank of each round; the first rank writes them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    check(kind)
    store, clock = f"{folder}/run", time.process_time if cpu_time else time.perf_counter
    ways = {
        "plain": training(kind),
        "sampled alone": training(kind, every=1),
        "sampled": training(kind, every=1, reduce="data", store=store),
        "between": training(kind, every=NEVER, reduce="data"),
    }
    times = torch.zeros(len(ways), pairs + WARM, dtype=torch.float64)
    for number in range(pairs + WARM):
        for turn in range(len(ways)):
            way = (number + turn) % len(ways)
            dist.barrier()
            start = clock()
            list(ways.values())[way]()
            times[way, number] = clock() - start
    dist.all_reduce(times, dist.ReduceOp.MAX)
    merged = ways["sampled"].watch
    assert merged is not None
    reduction: Any = merged._reduction
    sent = reduction.bytes_per_sample
    for step in ways.values():
        step.close()
    if rank == 0:
        found = dict(zip(ways, times[:, WARM:].tolist(), strict=True)) | {"bytes": sent}
        Path(folder, "times.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    # Now and then an ordinary end of the process was SIGABRT here, in spite of that. Its cause is unknown;
    # scripts/abort_at_exit.py has one that is known, and needs no attemper.
    os._exit(0)


def summary(times: dict[str, Any]) -> dict[str, Any]:
    def ratio(one: str, other: str) -> float:
        return median(a / b for a, b in zip(times[one], times[other], strict=True))

    sampled, between = ratio("sampled", "plain"), ratio("between", "plain")
    return {
        "step_ms": 1e3 * median(times["plain"]),
        "quartiles of every=1, merged and stored": quantiles(
            [a / b for a, b in zip(times["sampled"], times["plain"], strict=True)], n=4
        )[::2],
        "every=1, this rank alone": ratio("sampled alone", "plain"),
        "every=1, merged and stored": sampled,
        "between two samples": between,
        "every=50, merged and stored": (sampled + 49 * between) / 50,
        "bound": BOUND,
        "collectives a sampled step": 2,
        "bytes a sampled step": times["bytes"],
    }


def bytes_of(layers: int, heads: int) -> int:
    """What a rank with so many layers and heads sends on a sampled step."""
    labels = (SiteLabel(f"layers.{place}", "self", "train", place, "full", "softmax", heads) for place in range(layers))
    slots = Slots(tuple(labels), FEWEST_KEYS)
    return 8 * (slots.added_size + slots.largest_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="bytes")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--cpu-time", action="store_true", help="process time, for a busy machine: no waiting counts")
    parser.add_argument("--json", type=Path, help="where the results go")
    options = parser.parse_args()
    clock = "process time, of all threads" if options.cpu_time else "wall"
    counts = {"clock": clock, "rows": ROWS, "ranks": options.ranks, "pairs": options.pairs}
    found: dict[str, Any] = {"machine": vars(machine()), **counts}
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.ranks, options.model, options.pairs, options.cpu_time, folder)
        processes.spawn(measure, arguments, nprocs=options.ranks)  # type: ignore[attr-defined]
        found[options.model] = summary(json.loads(Path(folder, "times.json").read_text()))
    found["bytes a sampled step and rank, computed"] = {name: bytes_of(*size) for name, size in SIZES.items()}
    print(json.dumps(found, indent=2))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
