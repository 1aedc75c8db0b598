"""Scan of all-MiniLM-L6-v2 on 8 x 512 tokens against what people do today: eager weights, then entropy of them.

Run: ``python benchmarks/scan_minilm.py [--repeats N] [--json FILE]``. Paired runs in one process, median of ratios,
after checking that both give the same entropies. The model is loaded once, before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model, inputs = minilm.pretrained("eager"), minilm.batch(512, 8)
    eager = eager_entropy(model, inputs)
    scan = attemper.scan(model, [inputs])
    worst = max(
        abs(float(layer[head.head]) - head.entropy_nats)
        for layer, site in zip(eager, scan.sites, strict=True)
        for head in site.heads
        if head.entropy_nats is not None
    )
    if worst > 1e-4:
        sys.exit(f"the two disagree by {worst:.2e} nats: no timing of a wrong result")
    pair = minilm.paired(lambda: attemper.scan(model, [inputs]), lambda: eager_entropy(model, inputs), options.repeats)
    plain = []
    for _ in range(options.repeats):
        with torch.no_grad():
            plain.append(minilm.seconds(lambda: model(**inputs)))
    row = {
        "shape": list(inputs["input_ids"].shape),
        "scan_s": pair["one_s"],
        "eager_entropy_s": pair["two_s"],
        "eager_forward_s": statistics.median(plain),
        "ratio": pair["ratio"],
        "largest_difference_nats": worst,
        "environment": minilm.environment(),
    }
    print(json.dumps(row, indent=2))
    if options.json:
        options.json.write_text(json.dumps(row, indent=2) + "\n")


if __name__ == "__main__":
    main()
