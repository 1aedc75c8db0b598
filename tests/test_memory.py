"""Peak memory of the blocked backend beyond inputs, outputs and gradients: weights of n x n must never exist."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
import torch
import attemper

heads, tokens = int(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)  # two would wait for one another where the machine is busy
options = {"causal": {"is_causal": True}, "masked": {}, "dense": {"backend": "reference"}}[sys.argv[3]]


def peak_bytes():
    return 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))


def resident_bytes():
    return 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))


def extra_mib(work):
    # 5 sets the high-water mark to what is resident now.
    open("/proc/self/clear_refs", "w").write("5")
    before = resident_bytes()
    result = work()
    return (peak_bytes() - before) / 2**20, result


def step(tokens):
    query, key, value = (torch.randn(1, heads, tokens, 64, requires_grad=True) for _ in range(3))
    mask = torch.arange(tokens) < tokens - 7 if sys.argv[3] == "masked" else None
    call = dict(query=query, key=key, value=value, attn_mask=mask, stats="all", **({"backend": "blocked"} | options))
    forward, (output, stats) = extra_mib(lambda: attemper.attention(**call))
    loss = output.sum() + stats.entropy.sum() + stats.logit_variance.sum() + stats.max_weight.sum()
    backward, _ = extra_mib(loss.backward)
    results = (output.numel() + sum(stats[name].numel() for name in stats)) * 4 / 2**20
    gradients = 3 * query.numel() * 4 / 2**20
    return forward - results, backward - gradients


step(64)
print(*step(tokens))
"""


def extra_mib(heads: int, tokens: int, what: str) -> tuple[float, float]:
    """MiB beyond results in the forward pass, beyond gradients in the backward pass."""
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(heads), str(tokens), what],
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
        # What is freed goes back to the system at once: a block that is used again would not be counted.
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    assert run.returncode == 0, run.stderr
    forward, backward = (float(part) for part in run.stdout.split())
    return forward, backward


@pytest.mark.slow("takes many seconds")
def test_the_measurement_sees_the_weights_that_the_reference_holds():
    forward, backward = extra_mib(2, 1024, "dense")
    square = 2 * 1024**2 * 8 / 2**20
    assert forward > square
    assert backward > square


@pytest.mark.parametrize(
    ("limit", "heads", "tokens", "what"),
    [
        (20, 1, 4096, "causal"),
        pytest.param(150, 2, 8192, "masked", marks=pytest.mark.slow("the full size of what runs smaller by default")),
        pytest.param(300, 8, 16384, "causal", marks=pytest.mark.long("takes a minute")),
    ],
)
def test_many_tokens_need_few_mib_beyond_results_and_gradients(limit: float, heads: int, tokens: int, what: str):
    forward, backward = extra_mib(heads, tokens, what)
    square = heads * tokens**2 * 4 / 2**20
    figures = (
        f"forward {forward:.0f} MiB, backward {backward:.0f} MiB, limit {limit} MiB, n x n would be {square:.0f} MiB"
    )
    assert limit < square / 3, "the limit would not notice n x n"
    assert forward <= limit, figures
    assert backward <= limit, figures
    assert forward > -5, f"measured less than the results themselves: {figures}"
