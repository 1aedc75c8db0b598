"""What a stored run costs: bytes, time of the training thread, and time to read it back.

    python benchmarks/store.py [--samples 10000] [--json FILE]
    python benchmarks/store.py --memory

The second prints the resident memory of a process that trains a small model under a watch with a store.

Every head drifts slowly, with 2% noise from batch to batch. First a check that what is read back is what was stored.
"Raw" is 4 bytes a number. Sizes are of the closed file. What the training thread pays is the time of ``Writer.take``,
and by how much a fixed piece of work takes longer while samples are written beside it: means of paired rounds, which
say something on an idle machine only.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import attemper
from attemper.readings.sample import QUANTITIES, Sample, SiteLabel
from attemper.store.compaction import round_bits
from attemper.store.writer import open_writer

SHAPES = {"1,024 heads x 10": (32, 32, 10, 0.70), "24 sites x 16 heads x 8": (24, 16, 8, 0.80)}
"""Name -> sites, heads of each, statistics, and the bound of the closed file / raw."""
CHUNKS_BOUND, TAKE_MS, READ_MS, SEEN_SECONDS, TRENDS_MS = 0.51, 0.5, 20.0, 2.0, 2000.0
STATISTICS = [name for name, one in QUANTITIES.items() if not one.exact][:10]


class Drift:
    """Samples of all heads: a slow random walk, times noise."""

    def __init__(self, sites: int, heads: int, quantities: int) -> None:
        self._random = np.random.default_rng(0)
        self.names = tuple(STATISTICS[:quantities])
        self.sites = tuple(
            SiteLabel(f"model.layers.{i}.self_attn", "self", "train", i, "full", "softmax", heads) for i in range(sites)
        )
        self._level = self._random.uniform(0.5, 5.0, (quantities, sites * heads))

    def __call__(self, step: int) -> Sample:
        self._level *= 1 + 0.002 * self._random.standard_normal(self._level.shape)
        values = self._level * (1 + 0.02 * self._random.standard_normal(self._level.shape))
        return Sample(step, time.time(), self.sites, self.names, values.astype(np.float32), 8 * 512)


def stored(folder: Path, drift: Drift, samples: int) -> dict[str, float]:
    """Writes a run, as fast as it is taken; sizes as shares of raw."""
    run = open_writer(folder)
    taken = []
    for step in range(samples):
        sample = drift(step)
        while run._handed - run._settled > 100:
            time.sleep(0.01)
        start = time.perf_counter()
        assert run.take(sample)
        taken.append(time.perf_counter() - start)
    start = time.perf_counter()
    run.close(120)
    closing = time.perf_counter() - start
    assert (run.written, run.dropped) == (samples, 0), run.trouble
    raw = samples * len(drift.names) * sum(site.heads for site in drift.sites) * 4
    with sqlite3.connect(folder / "fragment-0.sqlite") as connection:
        ((cold, cold_samples),) = connection.execute(
            "SELECT sum(length(numbers)), (SELECT sum(span) FROM chunk) FROM cold"
        )
        ((pyramid,),) = connection.execute("SELECT sum(length(numbers)) FROM pyramid")
    return {
        "raw_mb": raw / 1e6,
        "file": (folder / "fragment-0.sqlite").stat().st_size / raw,
        "chunks": cold / (raw * cold_samples / samples),
        "pyramid": pyramid / raw,
        "take_ms": statistics.mean(taken) * 1e3,
        "take_worst_ms": max(taken) * 1e3,
        "close_s": closing,
    }


def check(folder: Path, drift: Drift, samples: int) -> None:
    """What is read back is what was stored, with 15 bits."""
    again = Drift(len(drift.sites), drift.sites[0].heads, len(drift.names))
    expected = np.stack([again(step).values for step in range(samples)])
    with attemper.open(folder) as run:
        for row, name in enumerate(drift.names):
            found = run.history(name, site=drift.sites[1].name).values
            place = slice(drift.sites[0].heads, 2 * drift.sites[0].heads)
            kept = round_bits(expected[:, row, place], None if QUANTITIES[name].exact else 15)
            assert np.array_equal(found, kept), name


def median_ms(work: Callable[[], object], times: int) -> tuple[float, float]:
    """By the clock, and of the processor: what the first has more, other processes had."""
    spent = []
    for _ in range(times):
        start, used = time.perf_counter(), time.thread_time()
        work()
        spent.append(((time.perf_counter() - start) * 1e3, (time.thread_time() - used) * 1e3))
    clock, cpu = zip(*spent, strict=True)
    return statistics.median(clock), statistics.median(cpu)


def read(folder: Path, samples: int) -> dict[str, tuple[float, float]]:
    """Times of questions to a run that was just opened."""

    def ask(question: Callable[[Any], object]) -> Callable[[], object]:
        def opened() -> None:
            with attemper.open(folder) as run:
                question(run)

        return opened

    step = samples // 3
    return {
        "open_ms": median_ms(ask(lambda run: None), 5),
        "history_ms": median_ms(ask(lambda run: run.history("entropy", site="model.layers.7.self_attn", head=3)), 9),
        "one_step_ms": median_ms(ask(lambda run: run.history("entropy", start=step, stop=step + 1)), 9),
        "scan_ms": median_ms(ask(lambda run: run.at(step, alarms=False)), 5),
        "trends_ms": median_ms(ask(lambda run: run.trend("entropy")), 3),
        "alarms_ms": median_ms(ask(lambda run: run.alarms()), 1),
    }


def slowdown_ms(drift: Drift, rounds: int = 40, steps: int = 32) -> tuple[float, float]:
    """By how much a step of the training thread takes longer with a store: mean of paired rounds, and its error."""
    samples = [drift(step) for step in range(steps)]
    square = np.random.default_rng(0).standard_normal((256, 256))

    def work(run: Any, first: int) -> float:
        start = time.perf_counter()
        for place, one in enumerate(samples):
            if run is not None:
                run.take(Sample(first + place, 0.0, one.sites, one.quantities, one.values))
            for _ in range(8):  # products, and the Python between them
                (square @ square).sum()
        return (time.perf_counter() - start) / steps * 1e3

    with tempfile.TemporaryDirectory() as folder:
        run = open_writer(Path(folder) / "run")
        differences = []
        for number in range(rounds):
            plain = work(None, 0)
            differences.append(work(run, number * steps) - plain)
            run.flush(60)
        run.close(60)
    return statistics.mean(differences), statistics.stdev(differences) / rounds**0.5


READER = """
import sys, time, sqlite3
from attemper.store.schema import open_to_read
tables = open_to_read(__import__("pathlib").Path(sys.argv[1]))
print("ready", flush=True)
seen = -1
while seen < int(sys.argv[2]):
    ((found, moment),) = tables.rows("SELECT max(id), max(time) FROM sample")
    if found is not None and found > seen:
        seen = found
        print(time.time() - moment, flush=True)
    time.sleep(0.005)
"""


def seconds_until_seen(drift: Drift, samples: int = 200) -> float:
    """The longest until another process saw the newest sample."""
    with tempfile.TemporaryDirectory() as folder:
        run = open_writer(Path(folder) / "run")
        run.flush()
        command = [sys.executable, "-c", READER, str(Path(folder) / "run" / "fragment-0.sqlite"), str(samples - 1)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "ready\n"
            for step in range(samples):
                run.take(drift(step))
                time.sleep(0.02)
            run.flush(60)
            delays = [float(line) for line in reader.stdout]
        run.close(60)
    return max(delays)


def resident_mb() -> float:
    """Memory of this process, without what the allocator could give back."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def memory(steps: int = 2000, told: tuple[int, ...] = (500, 1000, 1500, 2000)) -> dict[int, float]:
    """Watched steps of a small model -> resident memory after them, in MB."""
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.MultiheadAttention(64, 8, batch_first=True) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x, x, x, need_weights=False)[0]
            return x

    torch.manual_seed(0)
    model, found = Model().train(), {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as folder, attemper.watch(model, store=folder) as watch:
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            model(torch.randn(2, 64, 64)).square().mean().backward()
            optimizer.step()
            watch.step(step)
            if step in told:
                len(watch.run)  # what stands in the queue is written
                found[step] = resident_mb()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--memory", action="store_true")
    arguments = parser.parse_args()
    if arguments.memory:
        for step, resident in memory().items():
            print(f"resident memory after {step:,} watched steps with a store: {resident:.1f} MB")
        return
    found: dict[str, Any] = {"processor": processor(), "cores": os.cpu_count(), "sqlite": sqlite3.sqlite_version}
    print(
        f"{found['processor']}, {found['cores']} cores; SQLite {sqlite3.sqlite_version}; {arguments.samples:,} samples"
    )
    for name, (sites, heads, quantities, bound) in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            drift = Drift(sites, heads, quantities)
            row: dict[str, Any] = stored(Path(folder) / "run", drift, arguments.samples)
            check(Path(folder) / "run", drift, arguments.samples)
            row |= read(Path(folder) / "run", arguments.samples)
        row["slowdown_ms"] = slowdown_ms(Drift(sites, heads, quantities))
        row["seen_s"] = seconds_until_seen(Drift(sites, heads, quantities))
        found[name] = row
        print(f"\n{name} statistics, {row['raw_mb']:.0f} MB raw")
        slower, error = row["slowdown_ms"]
        for what, value, limit in [
            ("closed file / raw", row["file"], bound),
            ("cold chunks / raw", row["chunks"], CHUNKS_BOUND),
            ("pyramid / raw", row["pyramid"], None),
            ("take, ms a sample", row["take_ms"], TAKE_MS),
            (f"training thread slower by (+- {error:.2f}), ms", slower, TAKE_MS),
            ("one head's history, ms", row["history_ms"][0], READ_MS),
            ("   of which the processor's", row["history_ms"][1], READ_MS),
            ("a statistic of all heads at one step, ms", row["one_step_ms"][0], READ_MS),
            ("   of which the processor's", row["one_step_ms"][1], READ_MS),
            ("trends of a statistic, all heads, ms", row["trends_ms"][0], TRENDS_MS),
            ("   of which the processor's", row["trends_ms"][1], TRENDS_MS),
            ("all statistics at one step, a Scan, ms", row["scan_ms"][0], None),
            ("the run judged from its beginning, ms", row["alarms_ms"][0], None),
            ("longest until a reader sees a sample, s", row["seen_s"], SEEN_SECONDS),
            ("close, s", row["close_s"], None),
        ]:
            told = "" if limit is None else f"  (at most {limit}: {'yes' if value <= limit else 'NO'})"
            print(f"  {what:45} {value:8.3f}{told}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


def processor() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor()


if __name__ == "__main__":
    main()
