"""What the first use costs: commands from their start to their end, and the first call of ``attention``.

    python benchmarks/startup.py [--rounds 7] [--json FILE] [--profile]

Each round runs every process once, ``import torch`` among them. Shown: median and quartiles over the rounds of seconds
by the clock, the median of what is beyond ``import torch`` of the same round, and the median of the processor's
seconds, which a machine that does something else disturbs less. The first call is timed inside of a process that has
imported torch and attemper. ``import attemper`` and ``--help``, which load no torch: ``import_time.py``.

--profile: where the processor's seconds of ``scan MiniLM`` and ``lab entropy`` go instead, median over the rounds.
Whose an import is: ``python -X importtime -c "import transformers.modeling_utils"``.
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
from dataclasses import asdict
from pathlib import Path
from statistics import median, quantiles

import minilm

from attemper.bench.hardware import machine

ATTEMPER = [sys.executable, "-m", "attemper"]
# As an install has it: Python keeps what it has compiled.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
TORCH = "import torch"
FIRST = "first attention"
LIMITS_S = {FIRST: 0.15, "scan": 2.5, "scan MiniLM": 4.0, "lab entropy": 2.5, "report RUN": 2.5}
CALL = """
import time
import torch, attemper
q, k, v = torch.randn(3, 1, 8, 128, 64)
start = time.perf_counter(), time.process_time()
attemper.attention(q, k, v, stats="all").stats.entropy
print(time.perf_counter() - start[0], time.process_time() - start[1])
"""
LOADED = "MiniLM loaded by transformers"
"""What a scan of it cannot do without: the same model and tokenizer, and no attemper."""
LOAD = """
import sys
from transformers import AutoModel, AutoTokenizer
AutoModel.from_pretrained(sys.argv[1])
AutoTokenizer.from_pretrained(sys.argv[1])
"""
RUN = """
import sys, torch, attemper
from attemper.lab import model
plain = model.load()
with attemper.watch(plain, store=sys.argv[1]) as watch:
    for _ in range(5):
        plain(torch.randint(0, 256, (2, 64)))
        watch.step()
"""


def commands(run: str, page: str) -> dict[str, list[str]]:
    """What is started, by name."""
    return {
        TORCH: [sys.executable, "-c", TORCH],
        FIRST: [sys.executable, "-c", CALL],
        "scan": [*ATTEMPER, "scan"],
        LOADED: [sys.executable, "-c", LOAD, minilm.folder()],
        "scan MiniLM": [*ATTEMPER, "scan", minilm.folder()],
        "lab entropy": [*ATTEMPER, "lab", "entropy"],
        "report RUN": [*ATTEMPER, "report", run, "--html", page],
    }


def seconds_of(name: str, command: list[str]) -> tuple[float, float]:
    """By the clock and of the processor, of the whole process, or what it says of itself."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=ENVIRONMENT)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if name == FIRST:
        own = [float(word) for word in done.stdout.split()]
        return own[0], own[1]
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


STEPS = """
import sys, time
before = 0.0
def done(step):
    global before
    now = time.process_time()
    print(step, now - before, sep="|", file=sys.stderr)
    before = now
import attemper.cli
from attemper.cli.process import loading
done("Python, import attemper.cli")
with loading():
    import torch
    done("import torch")
    import attemper.monitor.scan
    done("import of what scans stand on")
    folder = sys.argv[1] if len(sys.argv) > 1 else None
    if folder:
        from attemper.integrations import pretrained
        pretrained.import_ahead(folder)
        done("import transformers.modeling_utils")
if folder:
    from attemper.cli.scan import model_and_text
    from attemper.cli.arguments import Dtype, Input, read_text
    model, batches, _ = model_and_text(folder, read_text(None), Input(None, None, 8, "cpu", Dtype.float32))
    done("model, tokenizer, tokens")
    found = attemper.scan(model, batches)
    done("scan")
    from rich.console import Console
    Console().print(found)
else:
    from attemper import lab
    from attemper.cli.lab import _print
    found = lab.run("entropy")
    done("experiment")
    _print(found)
done("print")
"""
"""What ``scan MODEL`` and ``lab entropy`` do, step by step."""


def steps_of(*arguments: str) -> dict[str, float]:
    """The processor's seconds of each step of one run."""
    command = [sys.executable, "-c", STEPS, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=ENVIRONMENT)
    lines = (line.split("|") for line in done.stderr.splitlines() if "|" in line)
    return {step: float(seconds) for step, seconds in lines}


def print_profile(rounds: int) -> None:
    for name, arguments in {"scan MiniLM": [minilm.folder()], "lab entropy": []}.items():
        runs = [steps_of(*arguments) for _ in range(rounds + 1)][1:]  # the first writes bytecode
        found = {step: median(run[step] for run in runs) for step in runs[0]}
        print(f"\n| {name} | processor's seconds |\n|---|---|")
        for step, seconds in {**found, "together": sum(found.values())}.items():
            print(f"| {step} | {seconds:.2f} |")


def measured(rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of each process in every round, by the clock and of the processor."""
    with tempfile.TemporaryDirectory() as folder:
        run = str(Path(folder) / "run")
        subprocess.run([sys.executable, "-c", RUN, run], check=True, env=ENVIRONMENT)
        processes = commands(run, str(Path(folder) / "page.html"))
        for name, command in processes.items():
            seconds_of(name, command)  # bytecode and file cache
        times = [{name: seconds_of(name, command) for name, command in processes.items()} for _ in range(rounds)]
    return {name: [one[name] for one in times] for name in processes}


def rows_of(found: dict[str, list[tuple[float, float]]]) -> list[dict[str, float | str]]:
    rows: list[dict[str, float | str]] = []
    for name, times in found.items():
        seconds, processor = zip(*times, strict=True)
        low, _, high = quantiles(seconds, n=4)
        row: dict[str, float | str] = {"what": name, "median_s": median(seconds), "low_s": low, "high_s": high}
        row["processor_s"] = median(processor)
        if name not in (TORCH, FIRST):
            row["beyond_torch_s"] = median(one - two for one, (two, _) in zip(seconds, found[TORCH], strict=True))
        if name in LIMITS_S:
            row["aim_s"] = LIMITS_S[name]
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows and the machine there")
    parser.add_argument("--profile", action="store_true", help="the steps of two commands instead")
    options = parser.parse_args()
    if options.profile:
        print(f"{machine()}, {options.rounds} rounds")
        print_profile(options.rounds)
        return
    rows = rows_of(measured(options.rounds))
    print(f"{machine()}, {options.rounds} rounds")
    print(
        "| start | seconds, median | quartiles | beyond import torch | processor's seconds | aim |\n" + "|---" * 6 + "|"
    )
    for row in rows:
        beyond = f"{row['beyond_torch_s']:.2f}" if "beyond_torch_s" in row else ""
        span = f"{row['low_s']:.3g} to {row['high_s']:.3g}"
        cells = (row["what"], f"{row['median_s']:.3g}", span, beyond, f"{row['processor_s']:.3g}", row.get("aim_s", ""))
        print(f"| {' | '.join(map(str, cells))} |")
    if options.json:
        document = {"machine": asdict(machine()), "rounds": options.rounds, "rows": rows}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
