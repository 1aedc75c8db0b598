"""The configurations that ship spill no register, on machines that are not here: the compilers say so themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.backends.triton import kept

SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
"""What a program may have at most."""

SCRIPT = Path(__file__).with_name("cross_compile.py")

TARGETS = ["sm_80", "sm_90", "sm_100", "gfx942"]
FUNCTIONS = {
    "forward": {"forward_kernel", "split_kernel", "join_kernel", "chunk_sums_kernel", "accumulate_kernel"},
    "gradients": {"constants_kernel", "query_gradient_kernel", "key_gradient_kernel", "bias_gradient_kernel"},
    "forward, rowwise": {"rowwise_forward_kernel"},
    "gradients, rowwise": {"rowwise_query_kernel", "rowwise_key_kernel", "rowwise_bias_kernel"},
}


def compiled(*command: str) -> list[dict[str, Any]]:
    """What the compilers made of each kernel: ``cross_compile.py`` in a process of its own."""
    run = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, timeout=3600,
        env=os.environ | {"TRITON_INTERPRET": "0"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


ANEW = "the Triton kernels are not those that were compiled: python tests/backends/triton/cross_compile.py --write"


def test_what_is_kept_was_compiled_from_these_sources():
    found = kept.read()
    assert found["sources"] == kept.sources_hash(), ANEW
    assert found["triton"] == version("triton"), ANEW


MEASURED = {"sm_90": {"forward_kernel", "query_gradient_kernel", "key_gradient_kernel", "bias_gradient_kernel"}}
"""Whose configurations are the fastest on a machine (benchmarks/results/gpu-tune-h100.json), spilled registers or not."""


@pytest.mark.parametrize("which", FUNCTIONS)
@pytest.mark.parametrize("target", TARGETS)
def test_no_kernel_of_a_machine_that_was_not_measured_spills_a_register_at_head_sizes_up_to_128(
    target: str, which: str
):
    kernels = [kernel for kernel in kept.read()["kernels"] if (kernel["target"], kernel["which"]) == (target, which)]
    assert {(kernel["dtype"], kernel["size"]) for kernel in kernels} == set(product(("bfloat16", "float16"), (64, 128)))
    assert {kernel["function"] for kernel in kernels} >= FUNCTIONS[which]
    assert all(0 < kernel["registers"] <= 512 for kernel in kernels)
    spilled = {(kernel["function"], kernel["kernel"]) for kernel in kernels if kernel["spilled"]}
    assert {function for function, _ in spilled} <= MEASURED.get(target, set())
    assert max(kernel["shared_bytes"] for kernel in kernels) <= SHARED_BYTES[target]


TOO_LARGE = {
    "sm_80": ("nvidia", (128, 128, 4, 2)), "sm_90": ("hopper", (128, 128, 4, 2)),
    "sm_100": ("blackwell", (128, 128, 4, 2)), "gfx942": ("amd", (256, 256, 4, 1)),
}  # fmt: skip
"""Rows, keys, warps and stages whose scores and outputs no machine has registers for."""


@pytest.mark.slow("takes many seconds")
@pytest.mark.parametrize("target", TARGETS)
def test_a_configuration_that_is_too_large_is_seen_to_spill(target: str):
    """What the test above would see, as each machine's own tool tells it."""
    machine, sizes = TOO_LARGE[target]
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import cross_compile; "
        "from attemper.backends.triton import tuning; "
        f"tuning._PLAIN[{machine!r}] = {{256: tuning.Config{sizes}}}; "
        f"sys.argv = ['x', '--target', {target!r}, '--size', '128', '--dtype', 'bfloat16', '--kernel', 'without']; "
        "cross_compile.main()"
    )
    (kernel,) = compiled("-c", code)
    assert kernel["spilled"] > 0
