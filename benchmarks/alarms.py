"""What judging a run costs, and whether healthy heads raise alarms.

Heads of all sorts with noise of their own (up to 0.02 of log n, 10% of largest logits), a sample every 50 steps. It is
checked that a run judged again gives what was reported while it ran.

    python benchmarks/alarms.py [--heads 1024] [--samples 10000] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np

from attemper.readings.judge import Judge
from attemper.readings.sample import Sample, SiteLabel

LAYERS = 32
QUANTITIES = (
    *("max_logit", "logit_std", "judged_normalized_entropy", "judged_first_token_mass"),
    *("rows", "judged_rows", "empty_rows", "nonfinite_rows"),
)


def samples(heads: int, count: int, every: int = 50) -> Iterator[Sample]:
    """A run in which nothing happens."""
    rng = np.random.default_rng(0)
    entropy, first, logit = rng.uniform(0.08, 0.93, heads), rng.uniform(0, 0.7, heads), rng.uniform(3, 60, heads)
    labels = tuple(
        SiteLabel(f"layers.{layer}", "self", "train", layer, "full", "softmax", heads // LAYERS)
        for layer in range(LAYERS)
    )
    counts = np.repeat([[4096.0], [4096.0], [0.0], [0.0]], heads, 1)
    for place in range(count):
        noise = rng.normal(size=(4, heads))
        numbers = (
            logit * np.exp(0.1 * noise[0]),
            np.exp(0.15 * noise[1]),
            entropy + 0.08 * entropy * (1 - entropy) * noise[2],
            np.clip(first + 0.03 * noise[3], 0, 1),
        )
        yield Sample(every * place, 0.0, labels, QUANTITIES, np.concatenate([numbers, counts]).astype(np.float32))


def measure(heads: int, count: int) -> dict[str, float | str]:
    """Times of this process alone, in milliseconds a sample and seconds a run."""
    given, one, again, spent_ms = list(samples(heads, count)), Judge(), Judge(), []
    for sample in given:
        start = time.process_time()
        one.feed(sample)
        spent_ms.append((time.process_time() - start) * 1e3)
    start = time.process_time()
    for sample in given:
        again.feed(sample)
    found = again.alarms
    run_s = time.process_time() - start
    assert found == one.alarms
    alarms = Counter(alarm.severity for alarm in found)
    return {
        "feed_ms_median": median(spent_ms),
        "feed_ms_99_percent": sorted(spent_ms)[-len(spent_ms) // 100],
        "whole_run_s": run_s,
        "notices": alarms["notice"],
        "warnings": alarms["warning"] + alarms["critical"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    row = measure(options.heads, options.samples)
    where = {"heads": options.heads, "samples": options.samples, "cpu": platform.processor(), "numpy": np.__version__}
    for name, value in row.items():
        print(f"{name:20} {value:10.4g}")
    if options.json:
        options.json.write_text(json.dumps({**where, **row}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
