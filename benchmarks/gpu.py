"""The Triton kernels on a GPU: first whether they are right, then how fast they are beside everybody else's.

Run: ``python benchmarks/gpu.py [--json gpu.json] [--repeats 30] [--bitwise 250]``. It checks every feature against float64 on
the device and repeats each call for equal bits, and stops there if anything is wrong. Then it times our kernels, each
backend of ``F.scaled_dot_product_attention``, compiled FlexAttention, eager attention with entropy and two SDPA calls,
beside what the machine's measured matrix peak and copy bandwidth allow. A short table of the targets comes last.

``--interpret`` runs all of it on the CPU with tiny tensors in Triton's interpreter: a dry run of this file, whose times
mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

SHAPES = ((4, 32, 8, 4096, 128), (1, 32, 8, 16384, 128), (4, 16, 16, 4096, 64))
"""(batch, query heads, key heads, tokens, head size), causal, bfloat16."""

TARGETS = (
    ("statistics alone / flash forward and backward", "ours: statistics alone", "sdpa flash: forward and backward", 0.15),
    (
        "statistics of 1/16 of the rows / flash forward and backward", "ours: statistics alone, rows / 16",
        "sdpa flash: forward and backward", 0.02,
    ),
    ("forward with statistics / forward", "ours: forward, every statistic", "ours: forward", 1.05),
    ("forward / FlexAttention forward", "ours: forward", "flex: forward", 1.15),
)  # fmt: skip
"""(what, this, by this, at most)."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="where the results go")
    parser.add_argument("--repeats", type=int, default=30, help="timed runs of each call")
    parser.add_argument("--bitwise", type=int, default=250, help="runs of each call that must give equal bits")
    parser.add_argument("--interpret", action="store_true", help="dry run on the CPU, tiny, in Triton's interpreter")
    parser.add_argument("--only", default="", help="check only features whose name has this word")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    if not options.interpret and not torch.cuda.is_available():
        sys.exit(
            "benchmarks/gpu.py measures kernels on a GPU, and torch.cuda.is_available() is False here. Run it on a machine "
            "with an NVIDIA or AMD GPU, or see that it works with: python benchmarks/gpu.py --interpret"
        )
    device = torch.device("cpu" if options.interpret else "cuda")
    report: dict[str, Any] = {"environment": environment(device), "dry_run": options.interpret}
    report["checks"] = checks(device, options)
    report["correct"] = all(row["holds"] and row["different_repeats"] == 0 for row in report["checks"])
    if report["correct"]:
        report |= measurements(device, options)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    print_table(report)
    if not report["correct"]:
        sys.exit("The kernels are not right on this machine: nothing was timed. See the rows above that do not hold.")


def environment(device: Any) -> dict[str, Any]:
    import torch
    import triton

    found = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu": properties.name, "processors": properties.multi_processor_count}
        found |= {"capability": ".".join(map(str, torch.cuda.get_device_capability(device)))}
        found |= {"runtime": torch.version.hip or torch.version.cuda}
    return found


def checks(device: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per feature, type and head size: worst error, its budget, and how many repeats had other bits."""
    import gpu_checks
    import torch

    rows = []
    for dtype, sizes in types(options.interpret, torch):
        for size in sizes:
            tokens, keys = (12, 17) if options.interpret else (515, 777)
            for name, (function, call) in gpu_checks.features(dtype, device, tokens, keys, size).items():
                if options.only not in name:
                    continue
                row = {"feature": name, "dtype": str(dtype).removeprefix("torch."), "size": size}
                row |= gpu_checks.checked(function, call, dtype)
                row["different_repeats"] = gpu_checks.different_repeats(function, call, options.bitwise)
                rows.append(row)
                mark = "ok" if row["holds"] and not row["different_repeats"] else "WRONG"
                print(f"{mark:5} {row['dtype']:8} D={size:<3} {name:28} {row['worst']}: {row['error']:.1e} of "
                      f"{row['budget']:.1e}; {row['different_repeats']} of {options.bitwise} repeats differ", flush=True)  # fmt: skip
    return rows


def types(interpret: bool, torch: Any) -> list[tuple[Any, tuple[int, ...]]]:
    """Types with their head sizes. The interpreter cuts bfloat16 off where machines round: there it proves nothing."""
    if interpret:
        return [(torch.float32, (5,)), (torch.float16, (8,))]
    return [(torch.float32, (64, 80)), (torch.float16, (64, 128)), (torch.bfloat16, (64, 96, 128, 256))]


def measurements(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    import gpu_peers
    import torch

    dry = options.interpret
    clock = gpu_peers.Clock(device, 1 if dry else options.repeats)
    dtype = torch.float32 if dry else torch.bfloat16
    limit = gpu_peers.limits(clock, dtype, *((64, 1 << 10) if dry else (8192, 1 << 32)))
    found: dict[str, Any] = {"limits": limit, "shapes": []}
    for numbers in ((1, 2, 1, 32, 4),) if dry else SHAPES:
        shape = gpu_peers.Shape(*numbers)
        leaves = shape.tensors(dtype, device)
        above = torch.randn_like(leaves[0])
        calls = gpu_peers.ours(shape, leaves, above)
        times: dict[str, Any] = {name: {"ms": clock.milliseconds(call)} for name, call in calls.items()}
        others = gpu_peers.peers(shape, leaves, above, compiled=not dry)
        times |= {name: timed(clock, call) for name, call in others.items()}
        times |= {name: {"ms": ms} for name, ms in gpu_peers.theoretical(shape, limit).items()}
        for name, row in times.items():
            print(f"{numbers} {name:48} {row.get('ms', row.get('missing'))}", flush=True)
        found["shapes"].append({"shape": vars(shape), "times": times, "targets": targets(times)})
    return found


def timed(clock: Any, call: Any) -> dict[str, Any]:
    """A peer's ``{"ms"}``, or ``{"missing"}`` with the reason where this machine or build has no such kernel."""
    try:
        return {"ms": clock.milliseconds(call)}
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return {"missing": f"{type(error).__name__}: {str(error).splitlines()[0]}"}


def targets(times: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for what, one, two, most in TARGETS:
        row: dict[str, Any] = {"what": what, "at_most": most, "ratio": None, "met": None}
        if "ms" in times[one] and "ms" in times[two]:
            row["ratio"] = times[one]["ms"] / times[two]["ms"]
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
    print(f"{len(report['checks'])} checks against float64: {wrong} wrong; {differing} with repeats of other bits")
    for shape in report.get("shapes", ()):
        print(" x ".join(f"{name} {value}" for name, value in shape["shape"].items()))
        for row in shape["targets"]:
            ratio = "not measured" if row["ratio"] is None else f"{row['ratio']:.3f}"
            verdict = "" if row["met"] is None or report["dry_run"] else "met" if row["met"] else "MISSED"
            print(f"  {row['what']:60} {ratio:>12}  at most {row['at_most']:<5} {verdict}")


if __name__ == "__main__":
    main()
