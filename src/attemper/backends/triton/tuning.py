"""The small stored set of launch configurations: block sizes, warps and stages for each kernel, machine and size.

Those of softmax on "hopper" up to head size 128 are the fastest that ``benchmarks/gpu_tune.py`` found on an H100
(docs/gpu.md); some spill registers outside of their inner loop and are faster all the same. All others are chosen from what is
known of the machines (registers, shared memory, the shapes of their matrix instructions) and not measured; by
``tests/backends/triton/test_cross_compile.py`` none of them spills a register at head sizes up to 128 in sixteen bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton

from attemper.backends.contract import Problem
from attemper.backends.triton.scores import INTERPRETED


@dataclass(frozen=True)
class Config:
    """How a kernel is cut: rows and keys of a block, warps of a program, stages of the pipeline of loads."""

    rows: int
    keys: int
    warps: int
    stages: int


IN_THE_INTERPRETER = Config(16, 64, 4, 1)
"""For the interpreter, whose time goes with the number of operations more than with their size."""

FEW_ROWS, SPLIT_KEYS = 64, 256
"""Calls of at most so many rows per key head are split over keys, into parts of at least so many."""

_DECODE = {
    "nvidia": {128: Config(16, 32, 4, 3), 256: Config(16, 32, 4, 2)},
    "hopper": {128: Config(16, 32, 4, 3), 256: Config(16, 32, 4, 2)},
    "blackwell": {128: Config(16, 32, 4, 3), 256: Config(16, 32, 4, 2)},
    "amd": {128: Config(16, 64, 4, 1), 256: Config(16, 32, 4, 1)},
}

_FORWARD = {
    # machine: {largest padded head size: configuration}
    "nvidia": {128: Config(128, 32, 8, 3), 256: Config(64, 32, 8, 2)},
    "hopper": {64: Config(64, 128, 4, 2), 128: Config(64, 64, 4, 3), 256: Config(64, 32, 8, 2)},
    "blackwell": {128: Config(128, 32, 8, 3), 256: Config(64, 32, 8, 2)},
    "amd": {128: Config(64, 32, 4, 1), 256: Config(64, 32, 8, 1)},
}
_PLAIN = {
    "nvidia": {64: Config(128, 64, 8, 3), 128: Config(128, 32, 8, 3), 256: Config(64, 32, 8, 2)},
    "hopper": {64: Config(64, 128, 4, 2), 128: Config(64, 64, 4, 3), 256: Config(64, 32, 8, 2)},
    "blackwell": {64: Config(128, 64, 8, 3), 128: Config(128, 32, 8, 3), 256: Config(64, 32, 8, 2)},
    "amd": {64: Config(128, 64, 8, 1), 128: Config(128, 32, 8, 1), 256: Config(64, 32, 8, 1)},
}
"""Output without statistics."""
_STATISTICS = {
    "nvidia": {64: Config(128, 64, 8, 3), 128: Config(128, 32, 8, 3), 256: Config(64, 32, 8, 2)},
    "hopper": {128: Config(64, 128, 4, 2), 256: Config(128, 32, 8, 2)},
    "blackwell": {64: Config(128, 64, 8, 3), 128: Config(128, 32, 8, 3), 256: Config(128, 32, 8, 2)},
    "amd": {128: Config(128, 64, 8, 1), 256: Config(64, 32, 8, 1)},
}
"""Statistics without output."""
_SAMPLED = {
    "nvidia": _STATISTICS["nvidia"],
    "hopper": {128: Config(64, 128, 4, 2), 256: Config(64, 32, 8, 2)},
    "blackwell": _STATISTICS["blackwell"],
    "amd": _STATISTICS["amd"],
}
"""The same of a few rows of the query: smaller blocks, so that there are programs for all processors."""

# Of the backward pass: one accumulator of [rows or keys, head size], or two, beside scores and their gradients.
# Masks and softcap take registers of their own, and smaller blocks leave them.
_QUERY_GRADIENT = {
    "nvidia": {64: Config(64, 32, 4, 2), 128: Config(64, 32, 8, 2), 256: Config(32, 32, 8, 1)},
    "hopper": {64: Config(64, 32, 4, 3), 128: Config(128, 64, 8, 3), 256: Config(64, 32, 8, 1)},
    "blackwell": {128: Config(128, 32, 8, 2), 256: Config(64, 32, 8, 1)},
    "amd": {128: Config(64, 32, 4, 1), 256: Config(32, 32, 4, 1)},
}
_MASKED_QUERY_GRADIENT = _QUERY_GRADIENT | {
    "nvidia": {64: Config(64, 32, 4, 2), 128: Config(32, 32, 4, 2), 256: Config(32, 32, 8, 1)},
    "hopper": {64: Config(64, 32, 4, 2), 128: Config(128, 64, 8, 3), 256: Config(64, 32, 8, 1)},
}
_KEY_GRADIENT = {
    "nvidia": {64: Config(64, 32, 8, 2), 128: Config(32, 64, 8, 2), 256: Config(32, 32, 8, 1)},
    "hopper": {64: Config(64, 64, 4, 3), 128: Config(128, 64, 8, 2), 256: Config(32, 32, 8, 1)},
    "blackwell": {64: Config(64, 32, 8, 2), 128: Config(32, 64, 8, 2), 256: Config(32, 32, 8, 1)},
    "amd": {128: Config(32, 32, 4, 1), 256: Config(32, 32, 4, 1)},
}
_MASKED_KEY_GRADIENT = _KEY_GRADIENT | {
    "nvidia": {64: Config(32, 32, 4, 2), 128: Config(32, 32, 8, 2), 256: Config(32, 32, 8, 1)},
    "hopper": {64: Config(64, 64, 4, 1), 128: Config(128, 64, 8, 2), 256: Config(32, 32, 8, 1)},
    "blackwell": {64: Config(64, 32, 8, 2), 128: Config(32, 32, 8, 2), 256: Config(32, 32, 8, 1)},
}

# Of rowwise normalizers: one for all kernels of a call, so that a score has the same bits in each.
_ROWWISE = {
    "nvidia": {128: Config(32, 16, 8, 2), 256: Config(16, 16, 4, 1)},
    "hopper": {128: Config(64, 16, 8, 2), 256: Config(16, 16, 4, 1)},
    "blackwell": {128: Config(64, 16, 8, 2), 256: Config(16, 16, 4, 1)},
    "amd": {128: Config(32, 32, 4, 1), 256: Config(16, 16, 4, 1)},
}
_FEW_ROWS = {
    "nvidia": {128: Config(16, 32, 4, 2), 256: Config(16, 16, 4, 1)},
    "hopper": {128: Config(16, 32, 4, 1), 256: Config(16, 16, 4, 1)},
    "blackwell": {128: Config(16, 32, 4, 1), 256: Config(16, 16, 4, 1)},
    "amd": {128: Config(16, 32, 4, 1), 256: Config(16, 16, 4, 1)},
}
_MASKED_ROWWISE = _ROWWISE | {name: _FEW_ROWS[name] for name in ("hopper", "blackwell")}


def power_of_two(number: int) -> int:
    """The least power of two that is at least ``number`` and 16, the least side of a matrix product."""
    return max(16, 1 << (max(number, 1) - 1).bit_length())


def machine() -> str:
    """The row of the tables for the machine that Triton compiles for."""
    driver = triton.runtime.driver.active
    return _machine_of(driver, driver.get_current_device())


@cache
def _machine_of(driver: Any, device: Any) -> str:
    target = driver.get_current_target()
    if target.backend == "hip":
        return "amd"
    return "blackwell" if target.arch >= 100 else "hopper" if target.arch >= 90 else "nvidia"


def forward(problem: Problem) -> Config:
    """The configuration of the forward kernel, with the test's own block sizes where it gave any."""
    if INTERPRETED:
        config = IN_THE_INTERPRETER
    else:
        table = _STATISTICS if problem.value is None else _FORWARD if len(problem.columns) > 3 else _PLAIN
        if problem.rows is not None:
            table = _SAMPLED
        width = 0 if problem.value is None else problem.value.shape[3]
        config = choose(table[machine()], max(problem.query.shape[3], width), problem)
    return _test_config(config, problem)


def row_numbers(problem: Problem) -> Config:
    """Of what is computed once per row, before the other kernels of the backward pass."""
    return Config(min(64, power_of_two(problem.query.shape[2])), 0, 4, 1)


def query_gradient(problem: Problem) -> Config:
    """Of the kernel that holds rows and sweeps over keys."""
    # So do the documents of packed rows.
    small = _has_mask(problem) or problem.packed
    return _of_backward(_MASKED_QUERY_GRADIENT if small else _QUERY_GRADIENT, problem)


def bias_gradient(problem: Problem) -> Config:
    """Of the kernel of the bias, whose programs hold rows and keys."""
    config = query_gradient(problem)
    # With eight warps, which sixteen rows do not need, a register spills on sm_90.
    return replace(config, warps=min(config.warps, 4)) if config.rows <= 16 else config


def key_gradient(problem: Problem) -> Config:
    """Of the kernel that holds keys and sweeps over rows."""
    return _of_backward(_MASKED_KEY_GRADIENT if _has_mask(problem) else _KEY_GRADIENT, problem)


def rowwise(problem: Problem) -> Config:
    """Of every kernel of a rowwise normalizer, forward and backward."""
    table = _MASKED_ROWWISE if _has_mask(problem) else _ROWWISE
    return _of_backward(_FEW_ROWS if problem.query.shape[2] <= 16 else table, problem)


def all_registers() -> dict[str, int]:
    """What tells NVIDIA's compiler that a thread may have all 255: left to itself it settles for 128 or 168 where a few more
    would do, so that more programs fit a processor, and spills the rest.
    """
    return {} if INTERPRETED or machine() == "amd" else {"maxnreg": 255}


def _has_mask(problem: Problem) -> bool:
    return problem.mask is not None or problem.softcap > 0


def _of_backward(table: dict[str, dict[int, Config]], problem: Problem) -> Config:
    width = 0 if problem.value is None else problem.value.shape[3]
    size = max(problem.query.shape[3], width)
    if INTERPRETED:
        config = IN_THE_INTERPRETER
    else:
        config = choose(table[machine()], size, problem)
        if problem.query.dtype == torch.float32 and size > 128:
            # Four tiles of the widest rows must fit the shared memory of every machine.
            config = replace(config, rows=16, keys=16)
    return _test_config(config, problem)


def splits(problem: Problem) -> int:
    """Into how many parts the keys of a call with few queries are split; 1 where it has enough rows for the machine.

    It follows from shapes and the machine alone: the same call gives the same bits.
    """
    batch, groups, keys, _ = problem.key.shape
    if problem.repeats * problem.query.shape[2] > FEW_ROWS or keys < 2 * SPLIT_KEYS:
        return 1
    processors = 128
    if problem.query.device.type == "cuda":
        processors = torch.cuda.get_device_properties(problem.query.device).multi_processor_count
    return max(1, min(keys // SPLIT_KEYS, -(-2 * processors // (batch * groups))))


def decode(problem: Problem) -> Config:
    """Of the kernel that splits keys: all rows of a key head in one block."""
    width = 0 if problem.value is None else problem.value.shape[3]
    if INTERPRETED:
        config = IN_THE_INTERPRETER
    else:
        config = choose(_DECODE[machine()], max(problem.query.shape[3], width), problem)
    rows = power_of_two(problem.repeats * problem.query.shape[2])
    return replace(config, rows=rows, keys=_own(problem.tile_keys, config.keys))


def _test_config(config: Config, problem: Problem) -> Config:
    """The configuration with the test's own block sizes where it gave any."""
    if not (problem.tile_rows or problem.tile_keys):
        return config
    return replace(config, rows=_own(problem.tile_rows, config.rows), keys=_own(problem.tile_keys, config.keys))


def _own(given: int, chosen: int) -> int:
    """The block size that a test gives, rounded up to one that there is; only the interpreter has ones below 16."""
    if not given:
        return chosen
    return min(64, 1 << (given - 1).bit_length()) if INTERPRETED else power_of_two(given)


def choose(sizes: dict[int, Config], size: int, problem: Problem) -> Config:
    """The configuration for a head size: small blocks in float32, and no more rows than there are."""
    config = next(config for largest, config in sizes.items() if size <= largest)
    return _fit(config, problem.query.dtype, power_of_two(problem.query.shape[2]))


@cache
def _fit(config: Config, dtype: torch.dtype, rows: int) -> Config:
    if dtype == torch.float32:
        config = replace(config, rows=32, keys=32, warps=8, stages=1)
    return replace(config, rows=min(config.rows, rows))
