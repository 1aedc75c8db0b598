"""The configurations that ship spill no register, on machines that are not here: the compilers say so themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
"""What a program may have at most."""

SCRIPT = Path(__file__).with_name("cross_compile.py")


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_no_kernel_spills_a_register_at_head_sizes_up_to_128(target: str):
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--target", target, "--size", "64", "128", "--dtype", "bfloat16", "float16"],
        capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "0"}, check=False, timeout=900,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    kernels = [json.loads(line) for line in run.stdout.splitlines()]
    for kernel in kernels:
        print(kernel)
    assert {(kernel["size"], kernel["dtype"]) for kernel in kernels} == {
        (size, dtype) for size in (64, 128) for dtype in ("bfloat16", "float16")
    }
    assert {"statistics", "forward", "forward without statistics"} <= {kernel["kernel"] for kernel in kernels}
    assert all(0 < kernel["registers"] <= 512 for kernel in kernels)
    assert [kernel for kernel in kernels if kernel["spilled"]] == []
    assert max(kernel["shared_bytes"] for kernel in kernels) <= SHARED_BYTES[target]


@pytest.mark.slow
def test_a_configuration_that_is_too_large_is_seen_to_spill():
    """What the test above would see: 255 registers are not enough for 128 x 128 scores and outputs in four warps."""
    change = (
        "from attemper.kernels.triton import configs; "
        "configs._FORWARD['nvidia'] = {256: configs.Config(128, 128, 4, 2)}"
    )
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import cross_compile; {change}; "
        "sys.argv = ['x', '--target', 'sm_80', '--size', '128', '--dtype', 'bfloat16', '--kernel', 'forward']; "
        "cross_compile.main()"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=900,
        env=os.environ | {"TRITON_INTERPRET": "0"},
    )  # fmt: skip
    assert json.loads(run.stdout.splitlines()[0])["spilled"] > 0
