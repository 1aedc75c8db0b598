"""How long a long run takes to look at: its alarms, `attemper show`, its page, and what the live server asks for.

    python benchmarks/long_run.py [--samples 100003] [--all] [--json FILE]

Four heads, and with ``--all`` 32 x 32 (which takes half an hour to write, and 2 GB); a sample at every step. First a
check: the alarms of the first samples are those of a judge that sees one after another. Then each question is asked in
a process of its own: seconds by the wall clock and of the processor, imports not counted, and its peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from alarms import QUANTITIES

import attemper
from attemper.readings.judge import judge
from attemper.readings.sample import Sample, SiteLabel
from attemper.store.writer import open_writer
from store import processor

SHAPES = {"4 heads": (2, 2), "32 x 32 heads": (32, 32)}
CHECKED = 2000
QUESTIONS = {
    "alarms": "run.alarms()",
    "show": "from attemper.store.overview import overview; overview(run, 'normalized_entropy', bars=40, top=10)",
    "page": "from attemper.report.run_page import run_page; run_page(run)",
    "state": "len(run.steps), run.live",
}
PROCESS = """
import resource, sys, time
import attemper
start, used = time.perf_counter(), time.process_time()
with attemper.open_run(sys.argv[1]) as run:
    {question}
print(time.perf_counter() - start, time.process_time() - used, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)
"""


def samples(many: int, sites: int, heads: int) -> Iterator[Sample]:
    """A run in which logits and entropies of all heads vary, and some are beyond their limits for a while."""
    rng, of = np.random.default_rng(0), sites * heads
    entropy, first, logit = rng.uniform(0.08, 0.93, of), rng.uniform(0, 0.7, of), rng.uniform(3, 60, of)
    labels = tuple(
        SiteLabel(f"layers.{layer}.attn", "self", "train", layer, "full", "softmax", heads) for layer in range(sites)
    )
    counts = np.repeat([[4096.0], [4096.0], [0.0], [0.0]], of, 1)
    for step in range(many):
        noise = rng.normal(size=(4, of))
        logits = logit * np.exp(0.1 * noise[0])
        sharp = np.clip(entropy + 0.08 * entropy * (1 - entropy) * noise[2], 0, 1)
        numbers = logits, np.exp(0.15 * noise[1]), sharp, np.clip(first + 0.03 * noise[3], 0, 1)
        values = np.concatenate([np.array(numbers), counts, sharp[None]]).astype(np.float32)
        yield Sample(step, 1e9 + step, labels, (*QUANTITIES, "normalized_entropy"), values, 64)


def write(folder: Path, many: int, sites: int, heads: int) -> None:
    run = open_writer(folder)
    for sample in samples(many, sites, heads):
        if run._handed - run._settled > 100:
            run.flush(60)
        assert run.take(sample)
    run.close(600)
    assert (run.written, run.dropped) == (many, 0)


def check(folder: Path) -> None:
    """The alarms of the first samples are those of a judge that sees one sample after another."""
    with attemper.open_run(folder) as run:
        one_by_one = judge(run.ranks.samples([moments[:CHECKED] for moments in run.ranks.moments]))
        ended = [alarm for alarm in run.alarms() if alarm.ended is not None and alarm.ended < CHECKED]
        assert ended == [alarm for alarm in one_by_one if alarm.ended is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_003)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, object] = {"processor": processor(), "cores": os.cpu_count(), "samples": arguments.samples}
    for name, shape in SHAPES.items():
        if name != "4 heads" and not arguments.all:
            continue
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder) / "run", arguments.samples, *shape)
            check(Path(folder) / "run")
            print(f"{arguments.samples:,} samples of {name}")
            found[name] = rows = {}
            for question, code in QUESTIONS.items():
                command = [sys.executable, "-c", PROCESS.format(question=code), f"{folder}/run"]
                told = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
                wall_s, cpu_s, peak_mb = map(float, told)
                rows[question] = {"seconds": wall_s, "processor_seconds": cpu_s, "peak_mb": peak_mb}
                print(f"  {question:8} {wall_s:7.2f} s, of the processor {cpu_s:7.2f} s, peak memory {peak_mb:6.0f} MB")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
