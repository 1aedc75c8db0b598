"""Scan of all-MiniLM-L6-v2 on 8 x 512 tokens against what people do today: eager weights, then entropy of them.

Run: ``python benchmarks/scan_minilm.py [--repeats N] [--rows 8] [--tokens 512] [--batches 1] [--json FILE]``. Paired
runs in one process, median of ratios, after checking that both give the same entropies; then against the same model's
plain forward with PyTorch's SDPA, and the time that PyTorch's matrix products of the linear layers take in both, which
our threads must not slow down. The models are loaded once, before the clock starts. ``--rows 1 --tokens 16`` shows what
a scan costs whatever the text's length (``beyond_sdpa_forward_ms``). ``--batches N`` compares a scan of N batches with
N plain forwards: from the second batch on a scan's passes end behind the last attention. Roles of heads are read once a
scan, on its first text: they are timed apart (``roles_ms``, against the scan without them).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import minilm
import torch

import attemper


def eager_entropy(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Eager weights, -sum p log(p + 1e-9) as it is usually written, mean over real queries, [H] of each layer."""
    rows = inputs["attention_mask"].bool()
    with torch.no_grad():
        weights = model(**inputs, output_attentions=True).attentions
    found = []
    for p in weights:
        entropy = -(p * torch.log(p + 1e-9)).sum(-1)
        found.append(torch.stack([entropy[:, head][rows].mean() for head in range(p.shape[1])]))
    return found


def product_seconds(function: Callable[[], object]) -> float:
    """What ``aten::addmm``, the product of a linear layer, takes in all, on the wall clock of one thread."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return sum(row.self_cpu_time_total for row in profile.key_averages() if row.key == "aten::addmm") / 1e6


def forward(model: torch.nn.Module, batches: list[dict[str, torch.Tensor]]) -> None:
    with torch.no_grad():
        for inputs in batches:
            model(**inputs)


def against_plain_forward(batches: list[dict[str, torch.Tensor]], repeats: int) -> dict[str, float]:
    """Of a scan: its time, and that of the linear layers within it, relative to the model's own forwards with SDPA."""
    model = minilm.pretrained("sdpa")

    def plain() -> None:
        forward(model, batches)

    def scan() -> None:
        attemper.scan(model, batches, roles=False)

    pair = minilm.paired(scan, plain, repeats)
    # Passes that end early have fewer products: whole ones tell whether our threads slow PyTorch's down.
    whole = partial(attemper.scan, model, batches, roles=False, whole_passes=True)
    roles = minilm.paired(partial(attemper.scan, model, batches), scan, repeats)
    products = sorted(product_seconds(whole) / product_seconds(plain) for _ in range(repeats))
    return {
        "sdpa_forward_s": pair["two_s"],
        "ratio_to_sdpa_forward": pair["ratio"],
        "low": pair["ratio_low"],
        "high": pair["ratio_high"],
        "beyond_sdpa_forward_ms": 1e3 * (pair["one_s"] - pair["two_s"]),
        "linear_layers_ratio": products[len(products) // 2],
        "roles_ms": 1e3 * (roles["one_s"] - roles["two_s"]),
        "roles_ratio": roles["ratio"],
        "roles_low": roles["ratio_low"],
        "roles_high": roles["ratio_high"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--batches", type=int, default=1, help="how many a scan reads, and what it is compared with")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model, inputs = minilm.pretrained("eager"), minilm.batch(options.tokens, options.rows)
    eager = eager_entropy(model, inputs)
    batches = [inputs] * options.batches
    scan = attemper.scan(model, batches)
    worst = max(
        abs(float(layer[head.head]) - head.entropy_nats)
        for layer, site in zip(eager, scan.sites, strict=True)
        for head in site.heads
        if head.entropy_nats is not None
    )
    if worst > 1e-4:
        sys.exit(f"the two disagree by {worst:.2e} nats: no timing of a wrong result")
    pair = minilm.paired(
        lambda: attemper.scan(model, batches, roles=False),
        lambda: [eager_entropy(model, one) for one in batches],
        options.repeats,
    )
    plain = [minilm.seconds(lambda: forward(model, batches)) for _ in range(options.repeats)]
    row = {
        "shape": list(inputs["input_ids"].shape),
        "batches": options.batches,
        "scan_s": pair["one_s"],
        "eager_entropy_s": pair["two_s"],
        "eager_forward_s": statistics.median(plain),
        "ratio": pair["ratio"],
        "largest_difference_nats": worst,
        **against_plain_forward(batches, options.repeats),
        "environment": minilm.environment(),
    }
    print(json.dumps(row, indent=2))
    if options.json:
        options.json.write_text(json.dumps(row, indent=2) + "\n")


if __name__ == "__main__":
    main()
