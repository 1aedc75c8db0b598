"""While a cache of keys grows, nothing is compiled again: a kernel would take seconds in the midst of decoding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys
sys.path.insert(0, {folder!r})
from cross_compile import Driver
import torch
from triton import knobs, runtime
from attemper.statistics import ONE_PASS, state_columns
from attemper.backends import triton as kernels
from attemper.backends.contract import Problem

compiled = []
def not_compiled(*, key, fn, **_):
    compiled.append((fn.name.split(".")[-1], str(key)))
    return True

runtime.driver.set_active(Driver("sm_90"))
knobs.runtime.jit_cache_hook = not_compiled
query = torch.empty(2, 8, 1, 64, dtype=torch.bfloat16)
for masked in (False, True):
    for lengths in ({short}, {long}):
        compiled.clear()
        for count in lengths:
            key = torch.empty(2, 2, count, 64, dtype=torch.bfloat16)
            mask = torch.ones(2, 1, 1, count, dtype=torch.bool) if masked else None
            first = torch.ones(2, count, dtype=torch.bool) if masked else None
            kernels.forward(Problem(
                query, key, key, mask, torch.full((1, 1, 1), 0.1), first_keys=first, right=0, bottom_right=True,
                columns=state_columns(ONE_PASS),
            ))
        print(json.dumps(sorted(name for name, _ in set(compiled))))
"""


@pytest.mark.slow("takes many seconds")
def test_a_growing_cache_compiles_each_kernel_of_decoding_once():
    """Lengths and diagonals that 16 divides, and others, and 1: Triton compiles a kernel anew for each such kind."""
    short, long = (2, 16, 17, 33, 48, 500), (600, 601, 640, 641, 1024, 1025, 5000)
    code = SCRIPT.format(folder=str(Path(__file__).parent), short=short, long=long)
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False, timeout=300,
        env=os.environ | {"TRITON_INTERPRET": "0"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    few, many, masked_few, masked_many = (json.loads(line) for line in run.stdout.splitlines())
    assert few == ["forward_kernel"]
    assert many == masked_many == ["join_kernel", "split_kernel"]
    # Below 512 keys a mask is read with its strides known: two kinds, those that 16 divides and the others.
    assert masked_few == ["forward_kernel"] * 2
