"""What a watch costs a training step of all-MiniLM-L6-v2 at 512 tokens: forward, backward, optimizer.

Run: ``python benchmarks/watch_minilm.py [--batch 8] [--tokens 512] [--repeats 15] [--cpu-time]``. Paired steps in one
process, in turns, median of ratios; first a check that watched entropies of all rows are those of the eager weights.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import minilm
import torch

import attemper


def check(model: Any, inputs: dict[str, torch.Tensor]) -> float:
    """Largest difference of a head's mean entropy from the eager weights', in nats."""
    model.eval()
    with torch.no_grad(), attemper.watch(model) as watch:
        model(**inputs)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(**inputs, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    rows = inputs["attention_mask"].bool()
    worst = 0.0
    for site, p in zip(watch.table().sites, weights, strict=True):
        entropy = torch.special.entr(p.double()).sum(-1)
        for head in site.heads:
            assert head.entropy_nats is not None
            worst = max(worst, abs(head.entropy_nats - float(entropy[:, head.head][rows].mean())))
    return worst


def training_step(model: Any, inputs: dict[str, torch.Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    model.train()

    def step() -> None:
        optimizer.zero_grad()
        model(**inputs).last_hidden_state.square().mean().backward()
        optimizer.step()

    return step


def watched(model: Any, step: Callable[[], None], **options: Any) -> Callable[[], None]:
    """The same step, sampled by a watch that opens and closes around it."""

    def run() -> None:
        with attemper.watch(model, **options):
            step()

    return run


def unsampled(model: Any, step: Callable[[], None], repeats: int) -> dict[str, float]:
    """Steps that a running watch does not sample, against steps without a watch."""
    watch: list[attemper.types.Watch] = []

    def inside() -> None:
        step()
        watch[0].step()

    results = []
    for _ in range(repeats):
        with attemper.watch(model, every=1_000_000, rows=128) as running:
            watch[:] = [running]
            inside()  # the first one is sampled
            one = minilm.seconds(inside)
        results.append((one, minilm.seconds(step)))
    ratios = sorted(a / b for a, b in results)
    return {"ratio": ratios[len(ratios) // 2], "ratio_low": ratios[len(ratios) // 4]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--cpu-time", action="store_true", help="process time on one thread, for a busy machine")
    options = parser.parse_args()
    if options.cpu_time:
        torch.set_num_threads(1)
        minilm.CLOCK[:] = [time.process_time]
    model, inputs = minilm.pretrained(), minilm.batch(options.tokens, options.batch)
    worst = check(model, inputs)
    if worst > 2e-5:
        sys.exit(f"watched entropies differ from eager ones by {worst:.1e} nats: no timing of a wrong result")
    step = training_step(model, inputs)
    step()
    row = {
        "shape": list(inputs["input_ids"].shape),
        "sampled, rows=128": minilm.paired(watched(model, step, rows=128), step, options.repeats),
        "sampled, all rows": minilm.paired(watched(model, step), step, options.repeats),
        "not sampled": unsampled(model, step, options.repeats),
        "largest_difference_nats": worst,
        "clock": "process time" if options.cpu_time else "wall",
        "environment": minilm.environment(),
    }
    print(json.dumps(row, indent=2))


if __name__ == "__main__":
    main()
