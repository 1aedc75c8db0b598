"""``benchmarks/gpu.py`` where there is no GPU: it says so, and a dry run in the interpreter goes through all of its code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    # Warnings of Triton and of FlexAttention outside compile are for whoever runs it, not for this test.
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "gpu.py"), *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_what_it_needs_and_measures_nothing(tmp_path: Path):
    ended = run("--json", str(tmp_path / "gpu.json"))
    assert ended.returncode == 1
    assert "measures kernels on a GPU, and torch.cuda.is_available() is False here" in ended.stderr
    assert ended.stdout == ""
    assert not (tmp_path / "gpu.json").exists()


@pytest.mark.slow
def test_a_dry_run_checks_times_and_reports(tmp_path: Path):
    ended = run("--interpret", "--bitwise", "2", "--json", str(tmp_path / "gpu.json"))
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["dry_run"] is True
    assert report["correct"] is True
    assert len(report["checks"]) == 2 * 17
    assert all(row["holds"] and row["error"] > 0 and row["different_repeats"] == 0 for row in report["checks"])
    (shape,) = report["shapes"]
    assert {"ours: forward and backward, entropy penalty", "two sdpa calls: entropy"} <= set(shape["times"])
    assert all("ms" in row for name, row in shape["times"].items() if not name.startswith(("sdpa", "flex")))
    assert set(report["limits"]) == {"matrix_tflops", "copy_gb_per_s"}
    last = ended.stdout.splitlines()[-4:]
    assert [line.split("at most")[1].split()[0] for line in last] == ["0.15", "0.02", "1.05", "1.15"]


WRONG = """
import sys
sys.path.insert(0, {folder!r})
sys.argv = ["gpu.py", "--interpret", "--bitwise", "2", "--only", {only!r}, "--json", {path!r}]
import os
os.environ["TRITON_INTERPRET"] = "1"
import gpu, gpu_checks
from attemper.kernels.triton import backward as _  # noqa: F401
from attemper.kernels import triton
from dataclasses import replace
real = triton.backward
def wrong(problem, output, state, upstream, needs):
    grads = real(problem, output, state, upstream, needs)
    return replace(grads, value=grads.value * 1.001)
triton.backward = wrong
gpu.main()
"""


@pytest.mark.slow
def test_a_gradient_that_is_wrong_by_a_thousandth_is_found_and_nothing_is_timed(tmp_path: Path):
    path = tmp_path / "gpu.json"
    code = WRONG.format(folder=str(ROOT / "benchmarks"), only="one query", path=str(path))
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 1
    assert "The kernels are not right on this machine: nothing was timed." in ended.stderr
    report = json.loads(path.read_text())
    assert report["correct"] is False
    assert "shapes" not in report
    assert [row["worst"] for row in report["checks"] if not row["holds"]] == ["dvalue"]
