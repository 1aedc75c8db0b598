"""Looks for the fastest launch configuration of every kernel on this machine: block sizes, warps, stages.

Run: ``python benchmarks/gpu_tune.py [--minutes 5] [--out gpu_tune.json] [--sizes 128 64] [--dtypes bfloat16]``. For each
kernel, head size and type it times the shipped configuration and a small set of others on one causal call, drops those
whose results differ from the shipped one's, and writes all of them and the best, with the environment, as JSON. What counts
most comes first, the file is written after every configuration, and nothing new is begun after ``--minutes``. At the end it
prints the best as lines for the tables of ``src/attemper/backends/triton/tuning.py``.

``--interpret`` is a dry run on the CPU with tiny tensors in Triton's interpreter, whose times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import gpu

CANDIDATES = {
    # kernel: (rows, keys, warps, stages)
    "statistics": (
        (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3), (128, 128, 8, 1), (64, 64, 4, 3), (64, 64, 4, 2),
        (64, 128, 4, 2), (64, 128, 4, 3), (128, 64, 4, 3), (128, 128, 4, 2), (128, 256, 8, 2), (64, 32, 4, 3),
    ),
    "sampled": (
        (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (64, 128, 4, 3), (32, 64, 4, 3), (32, 128, 4, 2),
        (32, 64, 2, 3), (128, 64, 8, 3), (128, 128, 8, 2), (64, 256, 4, 2), (16, 128, 4, 3),
    ),
    "forward": (
        (128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 4),
        (64, 128, 4, 2), (64, 32, 4, 3),
    ),
    "plain": (
        (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3), (64, 64, 4, 2),
        (64, 128, 4, 2), (64, 64, 4, 4),
    ),
    "key_gradient": (
        (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 1), (32, 64, 4, 2), (128, 64, 8, 1),
        (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 1), (128, 32, 8, 2), (64, 32, 4, 2),
    ),
    "query_gradient": (
        (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (64, 32, 4, 2), (64, 32, 4, 3), (64, 32, 4, 4),
        (128, 64, 8, 4), (128, 32, 8, 3), (128, 128, 8, 1),
    ),
    "key_gradient, softcap": (
        (64, 64, 4, 2), (64, 64, 4, 1), (64, 32, 4, 2), (128, 64, 8, 2), (128, 64, 8, 1), (32, 64, 4, 2), (32, 32, 4, 2),
    ),
    "query_gradient, softcap": (
        (128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 3), (64, 32, 4, 2), (128, 32, 8, 3),
    ),
    "decode": ((16, 64, 4, 3), (16, 128, 4, 2), (16, 64, 8, 3), (16, 32, 4, 4), (16, 64, 4, 2), (16, 32, 2, 3)),
}  # fmt: skip
"""Beside the shipped one. Those that do not fit the machine are told as such."""

TABLES = {"statistics": "_STATISTICS", "sampled": "_SAMPLED", "forward": "_FORWARD", "plain": "_PLAIN", "decode": "_DECODE",
          "query_gradient": "_QUERY_GRADIENT", "key_gradient": "_KEY_GRADIENT",
          "query_gradient, softcap": "_MASKED_QUERY_GRADIENT", "key_gradient, softcap": "_MASKED_KEY_GRADIENT"}  # fmt: skip

WITHIN = 2.0**-6
"""How far a result may be from the shipped configuration's, as a part of the largest entry: two bfloat16 roundings."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_tune.json"), help="where the results go")
    parser.add_argument("--minutes", type=float, default=5.0, help="nothing new is begun after so many")
    parser.add_argument("--kernels", nargs="+", default=list(CANDIDATES), choices=CANDIDATES)
    parser.add_argument("--sizes", nargs="+", type=int, default=[128, 64], help="head sizes")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=["bfloat16", "float16"])
    parser.add_argument("--repeats", type=int, default=10, help="timed runs of each configuration, at most")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes that compile")
    parser.add_argument("--interpret", action="store_true", help="dry run on the CPU, tiny, in Triton's interpreter")
    parser.add_argument("--compile-part", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    options.end = time.monotonic() + 60 * options.minutes
    if options.interpret:
        gpu.interpret()
    import torch

    if not options.interpret and not torch.cuda.is_available():
        sys.exit(
            "benchmarks/gpu_tune.py times kernels on a GPU, and torch.cuda.is_available() is False here. Run it on a machine "
            "with an NVIDIA or AMD GPU, or see that it works with: python benchmarks/gpu_tune.py --interpret"
        )
    device = torch.device("cpu" if options.interpret else "cuda")
    if options.compile_part is None:
        tune(device, options)
    else:
        compile_part(device, options)


def tune(device: Any, options: argparse.Namespace) -> None:
    compile_beforehand(options)
    report: dict[str, Any] = {"environment": gpu.environment(device), "dry_run": options.interpret, "tried": []}
    report["machine"] = "interpreter" if options.interpret else _configs().machine()
    for row in tried(device, options):
        report["tried"].append(row)
        report["best"] = best(report["tried"])
        options.out.write_text(json.dumps(report, indent=1) + "\n")
        print(line(row), flush=True)
    print()
    for row in report.get("best", ()):
        print(table_line(report["machine"], row))


@dataclass(frozen=True)
class Task:
    """A kernel at one head size and type, and the call that it is timed on."""

    kernel: str
    size: int
    dtype: str
    call: Callable[[], Any]
    """Launches it (and at most what is constant per row beside it); returns its results."""
    option: str
    """The function of ``backends/triton/tuning.py`` that says how it is launched."""
    shipped: Any


def _configs() -> Any:
    from attemper.backends.triton import tuning

    return tuning


def tasks(device: Any, options: argparse.Namespace) -> Iterator[Task]:
    for size in options.sizes:
        for dtype in options.dtypes:
            for kernel in options.kernels:
                yield task(kernel, size, dtype, device, options.interpret)


def task(kernel: str, size: int, dtype: str, device: Any, dry: bool) -> Task:
    import torch

    from attemper.backends import triton as kernels
    from attemper.backends.contract import Problem, Upstream
    from attemper.statistics import ONE_PASS, SOFTMAX_BASE, state_columns

    batch, heads, groups, tokens = (1, 2, 1, 20) if dry else (2, 16, 16, 8192)
    rows = tokens
    if kernel == "decode":
        batch, heads, groups, rows, tokens = (1, 2, 1, 1, 600) if dry else (4, 32, 8, 1, 16384)
    kind, generator = getattr(torch, dtype), torch.Generator(device).manual_seed(0)
    query, key, value, above = (
        torch.randn(batch, count, length, size, generator=generator, device=device).to(kind)
        for count, length in ((heads, rows), (groups, tokens), (groups, tokens), (heads, rows))
    )
    kind_of_kernel, _, softcap = kernel.partition(", ")
    every = SOFTMAX_BASE if kind_of_kernel in ("plain", "query_gradient", "key_gradient") else state_columns(ONE_PASS)
    problem = Problem(
        query, key, None if kernel in ("statistics", "sampled") else value, None,
        torch.full((1, 1, 1), size**-0.5, device=device), right=0, bottom_right=True, columns=every,
        softcap=20.0 if softcap else 0.0,
        rows=torch.arange(7, tokens, 16, dtype=torch.int32, device=device) if kernel == "sampled" else None,
    )  # fmt: skip
    tuning = _configs()
    if kernel in ("statistics", "sampled", "forward", "plain", "decode"):
        option = "decode" if kernel == "decode" else "forward"
        return Task(kernel, size, dtype, lambda: kernels.forward(problem)[:2], option, getattr(tuning, option)(problem))
    output, state, _ = kernels.forward(problem)
    upstream = Upstream(above, torch.zeros_like(state), state.new_empty(0))
    own = kind_of_kernel == "query_gradient"
    needs = (own, not own, not own, False, False, False, False)

    def gradients() -> tuple[Any, ...]:
        found = kernels.backward(problem, output, state, upstream, needs)
        return tuple(grad for grad in (found.query, found.key, found.value) if grad is not None)

    return Task(kernel, size, dtype, gradients, kind_of_kernel, getattr(tuning, kind_of_kernel)(problem))


def candidates(task: Task, dry: bool) -> Iterator[Any]:
    """The shipped configuration, then the others: once each."""
    tuning = _configs()
    seen = [task.shipped]
    yield task.shipped
    for numbers in CANDIDATES[task.kernel][: 1 if dry else None]:
        config = tuning.Config(*numbers)
        if task.kernel == "decode":
            config = replace(config, rows=task.shipped.rows)
        if config not in seen:
            seen.append(config)
            yield config


def launched_as(task: Task, config: Any) -> Callable[[], Any]:
    """The task's call with this configuration."""
    tuning = _configs()

    def call() -> Any:
        given = getattr(tuning, task.option)
        setattr(tuning, task.option, lambda problem: config)
        try:
            return task.call()
        finally:
            setattr(tuning, task.option, given)

    return call


def compile_beforehand(options: argparse.Namespace) -> None:
    """Fills Triton's cache in several processes: one would spend the minutes on compiling."""
    if options.interpret or options.jobs < 2:
        return
    command = [sys.executable, __file__, "--jobs", str(options.jobs), "--kernels", *options.kernels]
    command += ["--sizes", *map(str, options.sizes), "--dtypes", *options.dtypes, "--compile-part"]
    gpu.compiled_in_parts(command, options.jobs, min(options.end, time.monotonic() + 120))


def compile_part(device: Any, options: argparse.Namespace) -> None:
    numbered = enumerate((task, config) for task in tasks(device, options) for config in candidates(task, False))
    for number, (task, config) in numbered:
        if number % options.jobs == options.compile_part:
            gpu.attempt(launched_as(task, config))


def tried(device: Any, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row per task and configuration: ``{"kernel", "size", "dtype", "config", "shipped", "ms"}`` or ``"missing"``."""
    import gpu_peers

    clock = gpu_peers.Clock(device, 1 if options.interpret else options.repeats)
    for task in tasks(device, options):
        truth = None
        for config in candidates(task, options.interpret):
            row = {"kernel": task.kernel, "size": task.size, "dtype": task.dtype, "config": asdict(config)}
            row["shipped"] = config == task.shipped
            if time.monotonic() > options.end:
                yield row | {"missing": "not reached in time"}
                continue
            found, why = gpu.attempt(launched_as(task, config))
            if found is not None and truth is not None and not all(map(agree, found, truth)):
                found, why = None, "its results differ from those of the shipped configuration"
            if row["shipped"]:
                truth = found
            if found is None:
                yield row | {"missing": why}
            else:
                yield row | gpu.timed(clock, launched_as(task, config), options)


def agree(one: Any, two: Any) -> bool:
    """Whether two results of one call are the same but for the order of sums."""
    import torch

    one, two = one.float(), two.float()
    finite = torch.isfinite(two)
    if not torch.equal(torch.isfinite(one), finite):
        return False
    largest = two[finite].abs().max() if finite.any() else two.new_ones(())
    return bool(((one - two)[finite].abs() <= WITHIN * largest).all())


def best(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per kernel, size and type: the fastest configuration, and how many times faster than the shipped one it is."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    shipped: dict[tuple[Any, ...], float] = {}
    for row in rows:
        name = row["kernel"], row["size"], row["dtype"]
        if "ms" not in row:
            continue
        if row["shipped"]:
            shipped[name] = row["ms"]
        if name not in found or row["ms"] < found[name]["ms"]:
            found[name] = row
    return [
        {"kernel": name[0], "size": name[1], "dtype": name[2], "config": row["config"], "ms": row["ms"],
         "times_faster": shipped[name] / row["ms"] if name in shipped else None}
        for name, row in found.items()
    ]  # fmt: skip


def _named(row: dict[str, Any]) -> str:
    return "Config({rows}, {keys}, {warps}, {stages})".format(**row["config"])


def line(row: dict[str, Any]) -> str:
    result = f"{row['ms']:.3f} ms" if "ms" in row else row["missing"]
    mark = "shipped" if row["shipped"] else ""
    return f"{row['kernel']:15} D={row['size']:<4} {row['dtype']:9} {_named(row):24} {mark:8} {result}"


def table_line(machine: str, row: dict[str, Any]) -> str:
    times = "" if row["times_faster"] is None else f", {row['times_faster']:.2f} times as fast as the shipped one"
    return f"{TABLES[row['kernel']]}[{machine!r}][{row['size']}] = {_named(row)}  # {row['dtype']}, {row['ms']:.3f} ms{times}"


if __name__ == "__main__":
    main()
