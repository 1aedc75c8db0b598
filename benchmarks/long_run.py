"""How long a long run takes to look at: its alarms, `attemper show`, its page, and what the live server asks for.

    python benchmarks/long_run.py [--samples 100003] [--all] [--json FILE]

Four heads, and with ``--all`` 32 x 32 (which takes half an hour to write, and 2 GB); a sample at every step. First two
checks: the alarms of the first samples are those of a judge that sees one after another, and those that the writer kept
are those that a reader computes. Then each question is asked in a process of its own: seconds by the wall clock and of
the processor, and its peak memory. "judged anew" is by limits of which nothing is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from alarms import QUANTITIES

import attemper
from attemper.readings.judge import Judge
from attemper.readings.sample import Sample, SiteLabel
from attemper.store.verdict import JUDGED, Verdict, judge_of
from attemper.store.writer import open_writer
from store import processor

SHAPES = {"4 heads": (2, 2), "32 x 32 heads": (32, 32)}
CHECKED = 2000
QUESTIONS = {
    "alarms": "run.alarms()",
    "judged anew": "run.alarms({'logits': 99.9})",
    "show": "from attemper.report.overview import overview; overview(run, 'normalized_entropy', bars=40, top=10)",
    "page": "from attemper.report.run_page import run_page; run_page(run)",
    "state": "len(run.steps), run.live",
}
PROCESS = """
import sys, time
import attemper
start, used = time.perf_counter(), time.process_time()
with attemper.open(sys.argv[1]) as run:
    {question}
with open("/proc/self/status") as file:  # ru_maxrss would be that of the process that started this one, if larger
    (peak,) = [line.split()[1] for line in file if line.startswith("VmHWM")]
print(time.perf_counter() - start, time.process_time() - used, int(peak) / 1e3)
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
    """The alarms are those of a judge that sees one sample after another, and what was kept is what is computed."""
    with attemper.open(folder) as run:
        one_by_one = Judge()
        for block in run.ranks.blocks([moments[:CHECKED] for moments in run.ranks.moments]):
            for sample in block.each():
                one_by_one.feed(sample)
        first = Verdict(run.ranks, stop=int(run.ranks.moments[0]["step"][CHECKED])).judge()
        assert list(map(str, first.alarms)) == list(map(str, one_by_one.alarms))
        anew = judge_of(run.about)
        anew.feed_all(run.ranks.blocks(run.ranks.moments, JUDGED))
        assert list(map(str, run.alarms())) == list(map(str, anew.alarms))


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
            start = time.process_time()
            write(Path(folder) / "run", arguments.samples, *shape)
            write_s, peak_mb = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
            print(f"{arguments.samples:,} samples of {name}: written in {write_s:.0f} s, peak memory {peak_mb:.0f} MB")
            check(Path(folder) / "run")
            found[name] = rows = {"written": {"processor_seconds": write_s, "peak_mb": peak_mb}}
            for question, code in QUESTIONS.items():
                command = [sys.executable, "-c", PROCESS.format(question=code), f"{folder}/run"]
                told = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
                wall_s, cpu_s, peak_mb = map(float, told)
                rows[question] = {"seconds": wall_s, "processor_seconds": cpu_s, "peak_mb": peak_mb}
                print(
                    f"  {question:11} {wall_s:7.2f} s, of the processor {cpu_s:7.2f} s, peak memory {peak_mb:5.0f} MB"
                )
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
