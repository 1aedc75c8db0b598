"""``benchmarks/gpu.py`` where there is no GPU: it says so, and a dry run in the interpreter goes through all of its code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from attemper.sites import tap_buffers

ROOT = Path(__file__).parents[3]


def run(*arguments: str, script: str = "gpu.py") -> subprocess.CompletedProcess[str]:
    # Warnings of Triton and of FlexAttention outside compile are for whoever runs it, not for this test.
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / script), *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.slow("a process of its own")
def test_without_a_gpu_it_says_what_it_needs_and_measures_nothing(tmp_path: Path):
    ended = run("--json", str(tmp_path / "gpu.json"))
    assert ended.returncode == 1
    assert "measures kernels on a GPU, and torch.cuda.is_available() is False here" in ended.stderr
    assert ended.stdout == ""
    assert not (tmp_path / "gpu.json").exists()


@pytest.mark.long("takes a minute")
def test_a_dry_run_checks_times_and_reports(tmp_path: Path):
    ended = run("--interpret", "--bitwise", "2", "--json", str(tmp_path / "gpu.json"))
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["dry_run"] is True
    assert report["correct"] is True
    assert report["not_reached"] == []
    assert {"torch", "triton", "python"} <= set(report["environment"])
    features = [row["feature"] for row in report["checks"] if row["dtype"] == "float32"]
    assert len(features) == len(set(features)) == 24
    brief = ["plain", "everything at once", "few queries", "statistics alone", "packed documents"]
    for dtype in ("float16", "bfloat16"):
        assert [row["feature"] for row in report["checks"] if row["dtype"] == dtype] == brief
    assert all(row["holds"] and row["error"] > 0 and row["different_repeats"] == 0 for row in report["checks"])
    assert all(row["repeats"] == 2 for row in report["checks"])
    (shape,) = report["shapes"]
    assert shape["shape"]["causal"] is True
    assert {"ours: forward and backward, entropy penalty", "two sdpa calls: entropy"} <= set(shape["times"])
    assert all("ms" in row for name, row in shape["times"].items() if not name.startswith(("sdpa", "flex")))
    peers = {name.split(":")[0] for name in shape["times"]}
    assert peers == {
        "ours", "sdpa flash", "sdpa cudnn", "sdpa efficient", "sdpa math", "two sdpa calls", "flex",
        "eager with entropy", "limit",
    }  # fmt: skip
    assert set(report["limits"]) == {"matrix_tflops", "copy_gb_per_s"}
    table = ended.stdout.splitlines()[-13:]
    assert table[0].split() == ["tokens", "of", "a", "sequence", "(c:", "causal)", "16c", "at", "most"]
    limits = ["0.15", "0.15", "0.02", "0.02", "1.05", "1.03", "1.03", "1.15", "1.5", "1.15", "1.5", "0.1"]
    assert [line.split()[-1] for line in table[1:]] == limits


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module("gpu")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 GiB"), "OutOfMemoryError: out of memory"),
        (RuntimeError("No kernel\nfor this"), "RuntimeError: No kernel"),
        (AssertionError(), "AssertionError: "),
        (OutOfResources(300, 227, "shared memory"), "OutOfResources: out of resource: shared memory, Required: 300"),
    ],
)
def test_a_call_that_fails_is_told_and_the_next_one_is_timed(gpu: Any, error: Exception, reason: str):
    peers = import_module("gpu_peers")
    clock, options = peers.Clock(torch.device("cpu"), 2), SimpleNamespace(end=float("inf"))

    def fails() -> None:
        raise error

    assert gpu.timed(clock, fails, options)["missing"].startswith(reason)
    assert gpu.timed(clock, lambda: None, options)["ms"] >= 0


def test_what_is_not_reached_in_time_is_not_begun_and_shown_as_not_measured(gpu: Any):
    options = SimpleNamespace(end=float("-inf"))
    times = {gpu.OURS: gpu.timed(None, None, options), gpu.FLEX: {"ms": 1.0}}
    assert times[gpu.OURS] == {"missing": "not reached in time"}
    assert all(row["ratio"] is None and row["met"] is None for row in gpu.targets(times))
    assert gpu.cell(gpu.targets(times)[0], dry=False) == "-"


def test_a_ratio_is_to_the_fastest_of_the_peers_that_ran(gpu: Any):
    names = gpu.SDPA
    times = {"ours: forward": {"ms": 3.0}, names[0]: {"ms": 2.5}, names[1]: {"missing": "-"}, names[2]: {"ms": 1.5}}
    (row,) = (row for row in gpu.targets(times) if row["what"] == "forward / fastest sdpa")
    assert row == {"what": "forward / fastest sdpa", "at_most": 1.5, "ratio": 2.0, "met": False}
    assert gpu.cell(row, dry=False) == "2.000!"


WRONG = """
import sys
sys.path.insert(0, {folder!r})
sys.argv = ["gpu.py", "--interpret", "--bitwise", "2", "--only", {only!r}, "--json", {path!r}]
import gpu
gpu.interpret()
from attemper.backends.triton import backward as _  # noqa: F401
from attemper.backends import triton
from dataclasses import replace
real = triton.backward
def wrong(problem, output, state, upstream, needs):
    grads = real(problem, output, state, upstream, needs)
    return replace(grads, value=grads.value * 1.001)
triton.backward = wrong
gpu.main()
"""


@pytest.mark.slow("takes many seconds")
def test_a_gradient_that_is_wrong_by_a_thousandth_is_found_and_nothing_is_timed(tmp_path: Path):
    path = tmp_path / "gpu.json"
    code = WRONG.format(folder=str(ROOT / "benchmarks"), only="few queries", path=str(path))
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 1
    assert "The kernels are not right on this machine: nothing was timed." in ended.stderr
    report = json.loads(path.read_text())
    assert report["correct"] is False
    assert "shapes" not in report
    assert {row["worst"] for row in report["checks"] if not row["holds"]} == {"dvalue"}


@pytest.mark.long("takes a minute")
def test_a_dry_run_of_the_tuning_times_every_kernel_and_writes_the_best(tmp_path: Path, gpu: Any):
    path = tmp_path / "tune.json"
    ended = run("--interpret", "--sizes", "16", "--out", str(path), script="gpu_tune.py")
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    report = json.loads(path.read_text())
    assert report["dry_run"] is True
    kernels = ["statistics", "sampled", "forward", "plain", "key_gradient", "query_gradient"]
    kernels += ["key_gradient, softcap", "query_gradient, softcap", "decode"]
    assert [row["kernel"] for row in report["best"]] == kernels
    for kernel in kernels:
        shipped, other = (row for row in report["tried"] if row["kernel"] == kernel)
        assert [shipped["shipped"], other["shipped"]] == [True, False]
        assert shipped["config"] != other["config"]
        assert min(shipped["ms"], other["ms"]) > 0
    assert {tuple(row["config"]) for row in report["best"]} == {("rows", "keys", "warps", "stages")}
    last = ended.stdout.splitlines()[-len(kernels) :]
    tables = import_module("gpu_tune").TABLES
    assert [line.split("[")[0] for line in last] == [tables[kernel] for kernel in kernels]


def test_the_best_configuration_is_the_fastest_that_is_right_and_is_compared_with_the_shipped_one(gpu: Any):
    tune = import_module("gpu_tune")
    row = {"kernel": "plain", "size": 64, "dtype": "bfloat16"}
    rows = [
        row | {"config": {"rows": 1}, "shipped": True, "ms": 3.0},
        row | {"config": {"rows": 2}, "shipped": False, "ms": 2.0},
        row | {"config": {"rows": 3}, "shipped": False, "missing": "its results differ"},
        row | {"config": {"rows": 4}, "shipped": False, "ms": 2.5},
    ]
    assert tune.best(rows) == [row | {"config": {"rows": 2}, "ms": 2.0, "times_faster": 1.5}]
    one = torch.tensor([1.0, -torch.inf, 100.0])
    assert tune.agree(one, one + torch.tensor([1.0, 0.0, 1.0]))
    assert not tune.agree(one, one + torch.tensor([2.0, 0.0, 0.0]))
    assert not tune.agree(one, torch.tensor([1.0, 0.0, 100.0]))
    assert not tune.agree(torch.tensor([torch.nan]), torch.tensor([1.0]))


@pytest.mark.parametrize("name", ["attention with statistics", "statistics of sampled rows", "tap, flag up and down"])
@pytest.mark.quick("sampled rows")
def test_a_check_of_graphs_holds_where_kernels_run_again_and_not_where_a_replay_does_nothing(
    name: str, gpu: Any, monkeypatch: pytest.MonkeyPatch
):
    """A stand-in replays: the function again, into the tensors of the first time."""
    graphs, capturing = import_module("gpu_graphs"), False
    monkeypatch.setattr(tap_buffers, "is_capturing", lambda device=None: capturing)
    monkeypatch.setattr(tap_buffers, "has_graphs", lambda device: True)

    def capture(function: Any, replays: bool = True) -> tuple[Any, Any]:
        nonlocal capturing
        capturing = True
        results = function()

        def replay() -> None:
            found = function() if replays else results
            for one, two in zip(results, found, strict=True):
                one.copy_(two)

        return results, replay

    def holds(capture: Any) -> bool:
        check = graphs.CHECKS[f"graph: {name}"]
        return gpu.attempt(lambda: check(graphs.Inputs(torch.device("cpu"), torch.float32, 20, 8), capture))[0] is True

    try:
        assert holds(capture)
        assert not holds(partial(capture, replays=False))
    finally:
        tap_buffers._buffers.clear()
        tap_buffers._switches.clear()
        tap_buffers._rows.clear()


def test_where_there_is_no_gpu_every_check_of_graphs_is_skipped_by_name(gpu: Any, capsys: pytest.CaptureFixture[str]):
    rows = list(gpu.replays(torch.device("cpu")))
    assert [row["feature"] for row in rows] == list(import_module("gpu_graphs").CHECKS)
    assert all(row["skipped"] == "a CUDA graph needs a GPU" and gpu.right(row) for row in rows)
    assert capsys.readouterr().out.count("skip  graph: ") == len(rows)


@pytest.mark.long("takes a minute")
def test_a_dry_run_of_the_training_step_goes_every_way_and_reports(tmp_path: Path):
    path = tmp_path / "train.json"
    ended = run("--dry-run", "--steps", "1", "--rounds", "1", "--json", str(path), script="gpu_train.py")
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    report = json.loads(path.read_text())
    assert (report["dry_run"], report["agree"], report["missing"]) == (True, True, {})
    assert len(report["losses"]) == 6
    assert all(len(taken) == 1 and taken[0] > 0 for taken in report["milliseconds"].values())
    assert report["sites_seen"] == {"tap, 128 rows, every step": 1, "tap, all rows, every 50th step": 1}
    assert [row["at_most"] for row in report["targets"]] == [1.01, 1.005, 1.05, 1.03]
    assert all(row["rounds"] == 1 for row in report["targets"])
    assert "A dry run: the times mean nothing." in ended.stdout


def test_a_training_step_is_compared_round_by_round(gpu: Any):
    train = import_module("gpu_train")
    times = {name: [2.0, 4.0, 8.0] for name in train.WAYS} | {"largest score, every step": [2.2, 4.0, 12.0], "ours": []}
    rows = {row["what"]: row for row in train.targets(times)}
    found = rows["largest score, every step / plain"]
    assert (found["ratio"], found["lowest"], found["highest"], found["at_most"]) == (1.1, 1.0, 1.5, 1.05)
    assert rows["ours with statistics, every step / ours"]["ratio"] is None
