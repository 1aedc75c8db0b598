"""The Triton kernels on a GPU: first whether they are right, then how fast they are beside everybody else's.

Run: ``python benchmarks/gpu.py [--json gpu.json] [--minutes 8] [--bitwise 250]``. It checks every feature against float64 on
the device, repeats each call for equal bits, replays CUDA graphs, and stops there if anything is wrong (unless ``--anyway``). Then it times
our kernels, each backend of ``F.scaled_dot_product_attention``, compiled FlexAttention, eager attention with entropy and
two SDPA calls, beside what the machine's measured matrix peak and copy bandwidth allow. A short table of the targets comes
last. What is known so far is written after every step: a run that is cut off has lost only the rest. Nothing new is begun
after ``--minutes``; ``not measured`` then stands in the table. Kernels are compiled beforehand by ``--jobs`` processes.

``--interpret`` runs all of it on the CPU with tiny tensors in Triton's interpreter: a dry run of this file, whose times
mean nothing. ``benchmarks/gpu_tune.py`` looks for better launch configurations; ``benchmarks/gpu_train.py`` times training steps.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

SHAPES = tuple(
    (16384 // tokens, 16, 16, tokens, 128, causal) for tokens in (8192, 2048, 16384) for causal in (True, False)
)
"""(batch, query heads, key heads, tokens, head size, causal), bfloat16: 16k tokens in all, the ones that count first."""

CHECKING = 0.6
"""No check is begun after this part of the minutes: what is left is for measuring."""

OURS = "ours: forward and backward"
FLASH, FLEX = "sdpa flash: forward and backward", "flex: forward and backward"
SDPA = ("sdpa flash: forward", "sdpa cudnn: forward", "sdpa efficient: forward")
ALONE, SAMPLED = "ours: statistics into sums", "ours: statistics into sums, rows / 16"

TARGETS: tuple[tuple[str, str, tuple[str, ...], float], ...] = (
    ("statistics / flash, both passes", ALONE, (FLASH,), 0.15),
    ("statistics / flex, both passes", ALONE, (FLEX,), 0.15),
    ("statistics of 1/16 of the rows / flash, both passes", SAMPLED, (FLASH,), 0.02),
    ("statistics of 1/16 of the rows / flex, both passes", SAMPLED, (FLEX,), 0.02),
    ("forward with every statistic / forward", "ours: forward, every statistic", ("ours: forward",), 1.05),
    ("forward with entropy / forward", "ours: forward, entropy", ("ours: forward",), 1.03),
    ("both passes with every statistic / both passes", f"{OURS}, every statistic", (OURS,), 1.03),
    ("forward / flex", "ours: forward", ("flex: forward",), 1.15),
    ("forward / fastest sdpa", "ours: forward", SDPA, 1.5),
    ("both passes / flex", OURS, (FLEX,), 1.15),
    ("both passes / fastest sdpa", OURS, tuple(f"{name} and backward" for name in SDPA), 1.5),
    ("forward with entropy / eager with entropy", "ours: forward, entropy", ("eager with entropy: forward",), 0.1),
)
"""(what, this, by the fastest of these, at most)."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="where the results go")
    parser.add_argument("--minutes", type=float, default=8.0, help="nothing new is begun after so many")
    parser.add_argument("--repeats", type=int, default=30, help="timed runs of each call, at most")
    parser.add_argument("--bitwise", type=int, default=250, help="runs of each call that must give equal bits")
    parser.add_argument("--interpret", action="store_true", help="dry run on the CPU, tiny, in Triton's interpreter")
    parser.add_argument("--only", default="", help="check only features whose name has this word")
    parser.add_argument("--skip-checks", action="store_true", help="time only; the report says so")
    parser.add_argument("--anyway", action="store_true", help="time even if a check fails; the report says so")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes that compile")
    parser.add_argument("--compile-part", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    options.end = time.monotonic() + 60 * options.minutes
    if options.interpret:
        interpret()
    import torch

    if not options.interpret and not torch.cuda.is_available():
        sys.exit(
            "benchmarks/gpu.py measures kernels on a GPU, and torch.cuda.is_available() is False here. Run it on a machine "
            "with an NVIDIA or AMD GPU, or see that it works with: python benchmarks/gpu.py --interpret"
        )
    device = torch.device("cpu" if options.interpret else "cuda")
    if options.compile_part is None:
        check_and_measure(device, options)
    else:
        compile_part(device, options)


def check_and_measure(device: Any, options: argparse.Namespace) -> None:
    report: dict[str, Any] = {
        "environment": environment(device),
        "dry_run": options.interpret,
        "checks": [],
        "graphs": [],
    }
    if not options.skip_checks:
        compile_beforehand(options)
        report["not_reached"] = [
            f"{row['feature']}, {row['dtype']}, {row['size']}" for row, *_ in cases(device, options)
        ]
        for row in checks(device, options):
            report["checks"].append(row)
            report["not_reached"].pop(0)
            write(report, options)
            if time.monotonic() > options.end - (1 - CHECKING) * 60 * options.minutes:
                break
        report["graphs"] = list(replays(device))
    report["correct"] = not options.skip_checks and all(map(right, report["checks"] + report["graphs"]))
    write(report, options)
    if report["correct"] or options.skip_checks or options.anyway:
        measurements(device, options, report)
    write(report, options)
    print_table(report)
    if not report["correct"] and not options.skip_checks:
        timed = "timed all the same" if "shapes" in report else "nothing was timed"
        sys.exit(f"The kernels are not right on this machine: {timed}. See the rows above that do not hold.")


def interpret() -> None:
    """Kernels on the CPU, as the tests run them: fast enough, and rounded as machines round."""
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.support import interpreter

    interpreter.interpreting().__enter__()


def write(report: dict[str, Any], options: argparse.Namespace) -> None:
    options.json.write_text(json.dumps(report, indent=1) + "\n")


def environment(device: Any) -> dict[str, Any]:
    import torch
    import triton

    found = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu": properties.name, "processors": properties.multi_processor_count}
        found |= {"capability": ".".join(map(str, torch.cuda.get_device_capability(device)))}
        found |= {"runtime": torch.version.hip or torch.version.cuda, "memory_gib": properties.total_memory >> 30}
    return found


def right(row: dict[str, Any]) -> bool:
    return "skipped" in row or (row["holds"] and row.get("different_repeats", 0) == 0)


def replays(device: Any) -> Iterator[dict[str, Any]]:
    """One row per call that a CUDA graph must replay; where there is none each is skipped by name."""
    import gpu_graphs
    import torch

    for name, check in gpu_graphs.CHECKS.items():
        row: dict[str, Any] = {"feature": name}
        if device.type != "cuda":
            row["skipped"] = "a CUDA graph needs a GPU"
        else:
            inputs = gpu_graphs.Inputs(device, torch.bfloat16, 513, 64)
            held, why = attempt(partial(check, inputs, gpu_graphs.captured))
            row |= {"holds": held is True, "why": why}
        mark = "skip" if "skipped" in row else "ok" if row["holds"] else "WRONG"
        print(f"{mark:5} {name}: {row.get('skipped') or row.get('why') or ''}", flush=True)
        yield row


Check = tuple[dict[str, Any], Any, dict[str, Any], Any, int]
"""(feature, dtype and size as the report has them; function; call; dtype; repeats)."""


def cases(device: Any, options: argparse.Namespace) -> Iterator[Check]:
    """Every feature for one type and size, and a few that reach everything for the others."""
    import gpu_checks
    import torch

    dry = options.interpret
    for dtype, size, brief in types(dry, torch):
        shape = (12, 17, size, 1, 2) if dry else (515, 777, size)
        for name, (function, call) in gpu_checks.features(dtype, device, *shape).items():
            if options.only in name and (not brief or name in gpu_checks.BRIEF):
                row = {"feature": name, "dtype": str(dtype).removeprefix("torch."), "size": size}
                yield row, function, call, dtype, min(options.bitwise, 20) if brief else options.bitwise


def types(dry: bool, torch: Any) -> list[tuple[Any, int, bool]]:
    """(type, head size, whether only a few features)."""
    if dry:
        return [(torch.float32, 5, False), (torch.float16, 8, True), (torch.bfloat16, 8, True)]
    full = [(torch.bfloat16, 128, False), (torch.float16, 64, False), (torch.float32, 80, False)]
    few = [(torch.bfloat16, size) for size in (64, 96, 256)] + [(torch.float16, 128), (torch.float32, 256)]
    return full + [(dtype, size, True) for dtype, size in few]


def compile_beforehand(options: argparse.Namespace) -> None:
    """Fills Triton's cache: hundreds of kernels of about two seconds each, which one process would compile in turn."""
    if options.interpret or options.jobs < 2:
        return
    command = [sys.executable, __file__, "--jobs", str(options.jobs), "--only", options.only, "--compile-part"]
    compiled_in_parts(command, options.jobs, min(options.end, time.monotonic() + 240))


def compiled_in_parts(command: list[str], jobs: int, end: float) -> None:
    """Runs ``command`` with each number below ``jobs`` at once; what is not done at ``end`` is left to the caller."""
    print(f"compiling in {jobs} processes ...", flush=True)
    start = time.monotonic()
    null = subprocess.DEVNULL
    processes = [subprocess.Popen([*command, str(part)], stdout=null, stderr=null) for part in range(jobs)]
    for process in processes:
        try:
            process.wait(max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)


def compile_part(device: Any, options: argparse.Namespace) -> None:
    """Every so many-th check, and call that will be timed, runs once; what is wrong with it is for others to say."""
    for number, call in enumerate(to_compile(device, options)):
        if number % options.jobs == options.compile_part:
            attempt(call)


def to_compile(device: Any, options: argparse.Namespace) -> Iterator[Callable[[], Any]]:
    import gpu_checks
    import gpu_peers
    import torch

    for numbers in SHAPES[:2]:
        shape = gpu_peers.Shape(*numbers)
        leaves = shape.tensors(torch.bfloat16, device)
        yield from gpu_peers.ours(shape, leaves, torch.randn_like(leaves[0])).values()
    for _, function, call, _, _ in cases(device, options):
        yield partial(gpu_checks.results, function, call, "triton")


def attempt(function: Callable[[], Any]) -> tuple[Any, str | None]:
    """What it returns, or why it could not: whatever one call dies of, the others are still measured."""
    try:
        return function(), None
    except Exception as error:
        import gc

        import torch

        reason = "out of memory" if isinstance(error, torch.OutOfMemoryError) else (str(error).splitlines() or [""])[0]
        reason = f"{type(error).__name__}: {reason}"[:300]
    # Outside of the handler, where the error's frames hold no tensor any more.
    gc.collect()
    if torch.cuda.is_available():
        # After an illegal access nothing on the device answers any more, and every further call says so.
        with suppress(Exception):
            torch.cuda.empty_cache()
    return None, reason


def checks(device: Any, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row per feature, type and head size: worst error, its budget, and how many repeats had other bits."""
    import gpu_checks

    for row, function, call, dtype, repeats in cases(device, options):
        found, why = attempt(partial(gpu_checks.checked, function, call, dtype, repeats))
        failed = {"worst": why, "error": None, "budget": None, "holds": False, "repeats": 0, "different_repeats": 0}
        row |= found or failed
        numbers = f"{row['error']:.1e} of {row['budget']:.1e}; " if found else ""
        print(f"{'ok' if right(row) else 'WRONG':5} {row['dtype']:8} D={row['size']:<3} {row['feature']:28} {row['worst']}: "
              f"{numbers}{row['different_repeats']} of {row['repeats']} repeats differ", flush=True)  # fmt: skip
        yield row


def measurements(device: Any, options: argparse.Namespace, report: dict[str, Any]) -> None:
    """``report["limits"]`` and ``report["shapes"]``, written as they grow."""
    import gpu_peers
    import torch

    dry = options.interpret
    clock = gpu_peers.Clock(device, 1 if dry else options.repeats)
    dtype = torch.float32 if dry else torch.bfloat16
    limit, why = attempt(partial(gpu_peers.limits, clock, dtype, *((64, 1 << 10) if dry else (8192, 1 << 32))))
    report["limits"] = {"missing": why} if limit is None else limit
    report["shapes"] = []
    for numbers in ((1, 2, 1, 16, 4, True),) if dry else SHAPES:
        torch._dynamo.reset()  # FlexAttention is compiled anew for each shape, and only so often before it gives up
        shape = gpu_peers.Shape(*numbers)
        leaves = shape.tensors(dtype, device)
        above = torch.randn_like(leaves[0])
        times: dict[str, dict[str, Any]] = {}
        found = {"shape": vars(shape), "times": times, "targets": []}
        report["shapes"].append(found)
        calls = gpu_peers.peers(shape, leaves, above, compiled=not dry) | gpu_peers.ours(shape, leaves, above)
        for name, call in calls.items():
            times[name] = timed(clock, call, options)
            print(f"{numbers} {name:48} {times[name].get('ms', times[name].get('missing'))}", flush=True)
            found["targets"] = targets(times)
            write(report, options)
        if limit is not None:
            times |= {name: {"ms": ms} for name, ms in gpu_peers.theoretical(shape, limit).items()}


def timed(clock: Any, call: Callable[[], object], options: argparse.Namespace) -> dict[str, Any]:
    """``{"ms", "host_ms"}``, or ``{"missing"}`` with the reason where this machine or build cannot do it, or in time."""
    if time.monotonic() > options.end:
        return {"missing": "not reached in time"}
    found, why = attempt(lambda: clock.times(call))
    return found or {"missing": why}


def targets(times: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for what, one, others, most in TARGETS:
        row: dict[str, Any] = {"what": what, "at_most": most, "ratio": None, "met": None}
        by = [times[name]["ms"] for name in others if "ms" in times.get(name, ())]
        if by and "ms" in times.get(one, ()):
            row["ratio"] = times[one]["ms"] / min(by)
            row["met"] = row["ratio"] <= most
        rows.append(row)
    return rows


def print_table(report: dict[str, Any]) -> None:
    print()
    if report["dry_run"]:
        print("A dry run in the interpreter: the checks count, the times mean nothing.")
    print(", ".join(f"{name} {value}" for name, value in report["environment"].items()))
    wrong = sum(not row["holds"] for row in report["checks"])
    differing = sum(row["different_repeats"] > 0 for row in report["checks"])
    graphs = [row for row in report.get("graphs", ()) if "skipped" not in row]
    left = f"; {len(report['not_reached'])} not reached in time" if report.get("not_reached") else ""
    print(
        f"{len(report['checks'])} checks against float64: {wrong} wrong; {differing} with repeats of other bits{left}; "
        f"{sum(row['holds'] for row in graphs)} of {len(graphs)} CUDA graphs replayed rightly"
    )
    shapes = report.get("shapes", ())
    if shapes:
        heads = (f"{row['shape']['tokens']}{'c' if row['shape']['causal'] else ''}" for row in shapes)
        print(f"{'tokens of a sequence (c: causal)':55}" + "".join(f"{head:>9}" for head in heads) + "   at most")
    for number, (what, _, _, most) in enumerate(TARGETS if shapes else ()):
        cells = [cell(row["targets"][number] if row["targets"] else {}, report["dry_run"]) for row in shapes]
        print(f"{what:55}" + "".join(f"{text:>9}" for text in cells) + f"   {most}")


def cell(row: dict[str, Any], dry: bool) -> str:
    """A ratio, with ! where it is missed; - where it was not measured."""
    if row.get("ratio") is None:
        return "-"
    return f"{row['ratio']:.3f}" + ("" if row["met"] or dry else "!")


if __name__ == "__main__":
    main()
