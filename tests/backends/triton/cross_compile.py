"""Compiles what the Triton kernels launch, for machines that are not here, and reads what each compiler made of it.

``python tests/backends/triton/cross_compile.py [--target sm_90 ...] [--size 64 128] [--dtype bfloat16 ...]`` prints one
JSON line per kernel: registers, bytes of local memory (spilled registers, on NVIDIA), spilled vector registers (AMD)
and shared memory. Kernels are not changed for it: the launch code runs on CPU tensors with a driver that only names the
machine, and what would have been launched is compiled instead.

``python tests/backends/triton/cross_compile.py --write`` compiles the calls with the most in registers for every
machine (a quarter of an hour of one core) and keeps what it found in ``compiled.json``, with a hash of the kernels'
sources: they compile to the same as long as they are the same, and the tests ask for no more than that.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

os.environ["TRITON_INTERPRET"] = "0"
sys.path[:0] = [str(Path(__file__).parents[3]), str(Path(__file__).parents[3] / "src")]

import torch
from triton import knobs, runtime
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from attemper.backends import triton as kernels
from attemper.backends.contract import Problem, Upstream
from attemper.backends.normalizers import NORMALIZERS
from attemper.backends.triton.sums import empty_sums
from attemper.statistics import ONE_PASS, ROWWISE_BASE, ROWWISE_ONE_PASS, state_columns
from tests.backends.triton import kept

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


def write() -> None:
    """Compiles ``kept.CALLS`` for every target, two at a time, and writes what came of it."""
    jobs = [(target, which) for target in TARGETS for which in kept.CALLS]
    with ThreadPoolExecutor(2) as pool:
        rows = [row for found in pool.map(lambda job: compiled_apart(*job), jobs) for row in found]
    kept.write(rows, version("triton"))
    print(f"{len(rows)} kernels written to {kept.FILE}")


def compiled_apart(target: str, which: str) -> list[dict[str, Any]]:
    """What a process of its own makes of one kind of call for one machine."""
    command = [sys.executable, __file__, "--target", target, "--kernel", *kept.CALLS[which]]
    command += ["--gradients"] if "gradients" in which else []
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) | {"which": which} for line in run.stdout.splitlines()]


class Driver:
    """Says which machine kernels are for, and nothing else."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.name]

    def get_current_device(self) -> str:
        return self.name

    def get_current_stream(self, device: str) -> int:
        return 0


def compiled_instead(launched: list[Any]) -> None:
    """From here on every launch compiles, and leaves its kernel in ``launched``."""
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        launched.append(kernel)
        return kernel

    JITFunction.run = compile_only


def problems(size: int, dtype: torch.dtype) -> Iterator[tuple[str, Problem]]:
    """The calls that are compiled: causal, grouped heads, as large models make them; first those of softmax."""
    query = torch.empty(1, 2, 4096, size, dtype=dtype)
    key = torch.empty(1, 1, 4096, size, dtype=dtype)
    multiplier = torch.full((1, 1, 1), 0.1)
    every = state_columns(ONE_PASS)
    yield "softmax: statistics", Problem(query, key, None, None, multiplier, right=0, columns=every)
    yield "softmax: forward", Problem(query, key, key, None, multiplier, right=0, columns=every)
    yield "softmax: forward without statistics", Problem(query, key, key, None, multiplier, right=0)
    yield (
        "softmax: decode",
        Problem(query[:, :, :1], key, key, None, multiplier, right=0, bottom_right=True, columns=every),
    )
    mask = torch.ones(1, 1, 4096, 4096, dtype=torch.bool)
    everything: dict[str, Any] = {"sink": torch.zeros(2), "softcap": 20.0, "left": 1000}
    everything["columns"] = state_columns((*ONE_PASS, "mean_distance"))
    yield "softmax: every feature, bool mask", Problem(query, key, key, mask, multiplier, **everything)
    yield "softmax: every feature, bias", Problem(query, key, key, mask.to(dtype), multiplier, **everything)
    starts = torch.tensor([0, 96, 4096])
    # Triton makes constants of arguments that are 1.
    yield (
        "softmax: one of each",
        Problem(query[:, :1, :1], key[:, :, :1], key[:, :, :1], None, multiplier, columns=every),
    )
    yield "softmax: one query, decode", Problem(query[:, :1, :1], key, key, None, multiplier, columns=every)
    row = mask[:, :, :1].to(dtype)
    yield (
        "softmax: one query, bias",
        Problem(query[:, :, :1], key, key, row, multiplier, bottom_right=True, **everything),
    )
    yield (
        "softmax: packed",
        Problem(query, key, key, None, multiplier, right=0, cu_seqlens_q=starts, cu_seqlens_k=starts, columns=every),
    )
    yield from rowwise_problems(query, key, multiplier)


def rowwise_problems(query: torch.Tensor, key: torch.Tensor, multiplier: torch.Tensor) -> Iterator[tuple[str, Problem]]:
    """The same for the rowwise normalizers."""
    every = state_columns((*ROWWISE_ONE_PASS, "mean_distance"), rowwise=True)
    mask = torch.ones(1, 1, 4096, 4096, dtype=torch.bool)
    starts = torch.tensor([0, 96, 4096])
    for name in NORMALIZERS:
        given: dict[str, Any] = {"normalizer": name, "number": 64.0 if name == "topk" else 1e-3, "right": 0}
        if name in ("entmax", "sigmoid"):
            given["per_head"] = torch.zeros(query.shape[1])
        yield f"{name}: output", Problem(query, key, key, None, multiplier, columns=ROWWISE_BASE, **given)
        yield f"{name}: statistics", Problem(query, key, None, None, multiplier, columns=every, **given)
        yield f"{name}: every statistic", Problem(query, key, key, None, multiplier, columns=every, **given)
        given |= {"softcap": 20.0, "left": 1000, "columns": every}
        yield f"{name}: every feature, bias", Problem(query, key, key, mask.to(query.dtype), multiplier, **given)
        packed = given | {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        yield f"{name}: packed, bool mask", Problem(query, key, key, mask, multiplier, **packed)
        one = query[:, :, :1]
        yield f"{name}: one query", Problem(one, key, key, None, multiplier, bottom_right=True, **given)


def launch_gradients(problem: Problem) -> None:
    """Every gradient of the call, that of a maximum among them where there are statistics."""
    problem = replace(problem, maximum_gradient=len(problem.columns) > 3)
    rows = problem.query.shape[:3]
    output = problem.query.new_empty((*rows, 0 if problem.value is None else problem.value.shape[3]))
    state = torch.empty((len(problem.columns), *rows))
    needs = tuple(tensor is not None and tensor.dtype.is_floating_point for tensor in problem.differentiable)
    kernels.backward(problem, output, state, Upstream(output, state, state), needs)


def resources(kernel: Any) -> dict[str, int]:
    """Registers, local memory, spilled registers and shared memory of a compiled kernel."""
    shared = {"shared_bytes": kernel.metadata.shared, "warps": kernel.metadata.num_warps}
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]
        found = {name: int(re.search(rf"\.{name}:\s+(\d+)", text)[1]) for name in ("vgpr_count", "vgpr_spill_count")}  # type: ignore[index]
        return {"registers": found["vgpr_count"], "spilled": found["vgpr_spill_count"], **shared}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = dict(re.findall(r"(\w+):(\d+)", text))
    return {"registers": int(usage["REG"]), "spilled": int(usage["STACK"]) + int(usage["LOCAL"]), **shared}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", nargs="+", default=list(TARGETS), choices=TARGETS)
    parser.add_argument("--size", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float16"])
    parser.add_argument("--kernel", nargs="+", default=[""], help="only calls whose name has one of these in it")
    parser.add_argument("--gradients", action="store_true", help="of the backward pass, not of the forward one")
    parser.add_argument("--write", action="store_true", help="compile what compiled.json keeps, and write it")
    options = parser.parse_args()
    if options.write:
        write()
        return
    launched: list[Any] = []
    flag, starts = torch.zeros(1, dtype=torch.int32), torch.arange(0, 4096, 32, dtype=torch.int32)
    compiled_instead(launched)
    for target in options.target:
        runtime.driver.set_active(cast(Any, Driver(target)))
        for size in options.size:
            for dtype in options.dtype:
                for name, problem in problems(size, getattr(torch, dtype)):
                    if not any(part in name for part in options.kernel):
                        continue
                    launch_gradients(problem) if options.gradients else kernels.forward(problem)
                    if name == "softmax: statistics":
                        kernels.accumulate(replace(problem, rows=starts), flag, empty_sums(2, flag.device))
                    for kernel in launched:
                        row = {"target": target, "kernel": name, "function": kernel.name, "size": size, "dtype": dtype}
                        print(json.dumps(row | resources(kernel)), flush=True)
                    launched.clear()


if __name__ == "__main__":
    main()
