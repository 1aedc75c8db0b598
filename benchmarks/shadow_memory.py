"""What memory a shadow pass takes: the largest sum of tensors that are held at once, of the CPU.

    python benchmarks/shadow_memory.py [--layers 2 4 8] [--json FILE]

A byte-level model (width 128) at 8 x 256 bytes. A forward without gradients holds the activations of one layer at a
time, so its peak does not grow with the layers; that of a training step does. The peak of a shadow pass is that of such
a forward, and what the watch keeps of each layer until the step ends: statistics of the measured rows. Where it is
measured alone, the forward without gradients beside which it runs follows, so its peak is at most the one that is
printed. torch's profiler counts every allocation of its allocator; a peak is beyond what is held before. The native
kernels take buffers of a few rows beside it, which are not counted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.allocations import peak_allocated_bytes

import attemper
from attemper.bench.hardware import machine
from attemper.lab.model import ByteConfig, ByteModel

SHAPE, MIB = (8, 257), 2**20


class Loss(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.net = ByteModel(ByteConfig(layers=layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.net.loss(ids)


def peak_mib(run: Callable[[], object]) -> float:
    return peak_allocated_bytes(run) / MIB


def peaks(layers: int) -> dict[str, float]:
    torch.manual_seed(0)
    model, ids = Loss(layers), torch.randint(0, 256, SHAPE)

    def forward() -> None:
        with torch.no_grad():
            model(ids)

    def step() -> None:
        model(ids).backward()
        model.zero_grad()

    step()
    found = {"a forward without gradients": peak_mib(forward), "a training step": peak_mib(step)}
    watches: dict[str, dict[str, Any]] = {
        "of 128 rows": {"rows": 128},
        "of all rows": {},
        "of 2 sequences": {"shadow_batch": 2},
    }
    for name, options in watches.items():
        for what, run in (("a shadow pass", forward), ("a training step with one", step)):
            with attemper.watch(model, observe="shadow", **options) as watch:
                for _ in range(2):  # the first one makes what is kept for good
                    watch.step()
                    run()
                watch.step()
                found[f"{what}, {name}"] = peak_mib(run)
                assert len(watch.table().sites) == layers
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = {layers: peaks(layers) for layers in options.layers}
    print("| peak, MiB |", " | ".join(f"{layers} layers" for layers in rows), "|\n|" + "---|" * (len(rows) + 1))
    for name in next(iter(rows.values())):
        print(f"| {name} |", " | ".join(f"{row[name]:.1f}" for row in rows.values()), "|")
    if options.json is not None:
        found = {"machine": asdict(machine()), "batch": SHAPE, "peak_mib": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
