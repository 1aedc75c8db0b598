"""Samples of many ranks made one: the history of one process on the joined batch, by two collectives a sampled step.

The cases run in launches of ``merging.py``; each test asks what its case gave on every rank.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attemper
from tests.distributed import merging
from tests.distributed.test_training import of
from tests.support.ranks import ROOT, results

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch has no gloo on this platform"),
    pytest.mark.slow("starts several processes"),
]
LONG = pytest.mark.long("starts several processes")

SAMPLED = list(range(0, merging.STEPS, merging.EVERY))
SHORT = ("ddp", "fails", "differ", "loops")


def launched(folder: Path, ranks: int, *cases: str, killed: int | None = None) -> list[dict[str, Any]]:
    """What came out on every rank; nothing where one of them is ``killed``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    shared["PYTHONFAULTHANDLER"] = "1"  # says where a process aborts
    command = [sys.executable, "-m", "tests.distributed.merging", str(folder), *cases]
    processes = [
        subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **shared, "RANK": str(rank)}
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=300)[1] for process in processes]
    except subprocess.TimeoutExpired:
        pytest.fail("the processes wait for each other")
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == (0 if rank != killed else -signal.SIGKILL), output[-3000:]
    return [] if killed is not None else results(folder, ranks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all launches: what ranks gave, and the runs that they stored."""
    return tmp_path_factory.mktemp("merging")


@pytest.fixture(scope="module")
def short(folder: Path) -> list[dict[str, Any]]:
    return launched(folder, 2, *SHORT)


@pytest.fixture(scope="module")
def of_two(folder: Path) -> list[dict[str, Any]]:
    return launched(folder, 2, *(case for case in merging.OF_TWO if case not in SHORT))


@pytest.fixture(scope="module")
def of_four(folder: Path) -> list[dict[str, Any]]:
    return launched(folder, 4, *merging.OF_FOUR)


def check_merged(results: list[dict[str, Any]], case: str) -> None:
    """Readings of each rank are those of one process on the joined batch, by two collectives a sampled step."""
    for found in of(results, case):
        assert found["apart"] <= 1e-12
        assert found["tokens"][0] == found["tokens"][1] > 0
        assert found["failures"] == 0
        for step, calls in enumerate(found["sent"]):
            names, sizes = [name for name, _ in calls], [size for _, size in calls]
            if step == 0:  # the hash of the slots, once: two numbers
                assert (names.pop(0), sizes.pop(0)) == ("all_reduce", 16)
            assert names == (["all_reduce", "all_reduce"] if step in SAMPLED else [])
            assert step not in SAMPLED or f"2 collectives of {sum(sizes):,} bytes a sample" in found["text"]


def check_history(folder: Path, case: str, fragments: int) -> None:
    """The stored history, joined of so many fragments, is that of one process: float32 in the file."""
    merged, alone = attemper.open(folder / case), attemper.open(folder / f"{case} alone")
    assert len(list((folder / case).glob("fragment-*.sqlite"))) == fragments
    assert sorted(site.name for site in merged.sites) == sorted(site.name for site in alone.sites)
    if not case.startswith("pipeline"):  # its stages are given no loss
        loss, whole = merged.history("loss"), alone.history("loss")
        assert loss.steps.tolist() == whole.steps.tolist()
        assert np.allclose(loss.values[SAMPLED], whole.values[SAMPLED], rtol=1e-5), "the mean of all ranks"
    for statistic in alone.ranks.statistics:
        for site in alone.sites:
            one, other = (run.history(statistic, site.name) for run in (merged, alone))
            assert one.steps.tolist() == other.steps.tolist() == SAMPLED
            assert np.allclose(one.values, other.values, rtol=2e-7, atol=1e-12, equal_nan=True), statistic
    merged.close()
    alone.close()


def test_two_ranks_of_ddp_read_what_one_process_reads_of_the_joined_batch(
    short: list[dict[str, Any]], folder: Path
) -> None:
    check_merged(short, "ddp")
    check_history(folder, "ddp", 1)
    first, second = of(short, "ddp")
    assert "3 samples in ddp" in first["text"]
    assert "3 samples, merged over 2 ranks" in second["text"]
    assert second["text"].endswith("kept by rank 0)")


def test_a_failure_on_one_rank_leaves_the_rows_of_the_others_and_nobody_waits(short: list[dict[str, Any]]) -> None:
    first, second = of(short, "fails")
    assert first["rows"] == second["rows"] == [[80] * 4, [40] * 4, [80, 40, 80, 80]]
    assert (first["failures"], second["failures"]) == (0, 2)
    assert first["told"] == []
    assert second["told"] == ["attemper: ranks could not be measured: no memory. Training goes on."]
    assert first["skipped"] == [["ranks", "1 failure of ours on 2 ranks: this sample has what else they measured"]]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("heads", "heads of layers.0 (self, train): 2 on rank 0, 4 on rank 1"),
        ("layers", "rank 1 has seen layers.3 (self, train), rank 0 has not"),
        ("parameters", "the parameters of rank 1 are others than those of rank 0. Name the ranks that hold the same"),
        ("every", "The ranks watch otherwise: every is 1 on rank 0 and 2 on rank 1. Give watch the same options"),
        ("reduce", "must be \"data\", a process group of torch.distributed, a DeviceMesh or None, got 'tensor'"),
    ],
)
def test_ranks_that_disagree_fail_at_once_with_what_differs(short: list[dict[str, Any]], what: str, said: str) -> None:
    for found in of(short, "differ"):
        assert said in found[what]


def test_loops_of_another_length_on_another_rank_are_one_site_and_stay_what_ranks_agreed_on(
    short: list[dict[str, Any]],
) -> None:
    for found in of(short, "loops"):
        reason = "it attended another number of times on other ranks: the site layers.0 is the mean over its calls"
        assert found["differ"] == {
            "rows": [{"layers.0": 120}, {"layers.0": 160}], "told": [["layers.0#*", reason]], "failures": 0,
        }  # fmt: skip
        rows = [{"layers.0": 80, "layers.0#2": 80}, {"layers.0": 80, "layers.0#2": 40}]
        assert found["differ later"] == {"rows": rows, "told": [], "failures": 0}


def test_two_ranks_of_fsdp2_read_what_one_process_reads(of_two: list[dict[str, Any]], folder: Path) -> None:
    check_merged(of_two, "fsdp2")
    check_history(folder, "fsdp2", 1)


def test_two_ranks_that_hold_other_heads_send_nothing_and_readers_join_them_to_the_whole_model(
    of_two: list[dict[str, Any]], folder: Path
) -> None:
    for found in of(of_two, "tp"):
        assert found["apart"] <= 1e-12
        assert found["tokens"][0] == found["tokens"][1] > 0
        assert (found["failures"], [calls for calls in found["sent"] if calls]) == (0, [])
    check_history(folder, "tp", 2)


def test_stages_of_a_pipeline_write_a_fragment_each_which_readers_join(
    of_two: list[dict[str, Any]], folder: Path
) -> None:
    for found in of(of_two, "pipeline"):
        assert found == {"apart": 0.0, "sent": 0, "failures": 0}
    check_history(folder, "pipeline 1", 2)


def test_a_rank_that_read_nothing_in_a_step_joins_with_no_rows(of_two: list[dict[str, Any]]) -> None:
    for found in of(of_two, "no batch"):
        assert found == {"rows": [[40] * 4, [40] * 4, [80] * 4], "failures": 0}


def test_a_run_that_goes_on_is_sampled_on_all_ranks_where_it_would_have_been(
    of_two: list[dict[str, Any]], folder: Path
) -> None:
    assert of(of_two, "resumed") == [{"sampled": 2, "failures": 0}] * 2  # its first step is measured and not kept
    with attemper.open(folder / "resumed") as run:
        assert run.steps.tolist() == [10, 15, 20]


def test_callbacks_merge_by_default_and_the_main_process_reports(of_two: list[dict[str, Any]]) -> None:
    first, second = of(of_two, "callbacks")
    assert first["rows"] == [80] * 4
    assert second == {"rows": [None] * 4, "scalars": 0}


def test_a_callback_on_one_rank_only_watches_alone(of_two: list[dict[str, Any]]) -> None:
    first, second = of(of_two, "one callback")
    assert first["rows"] == [40] * 4
    assert second["rows"] == []


def test_a_callback_goes_on_alone_where_ranks_hold_other_models(of_two: list[dict[str, Any]]) -> None:
    assert of(of_two, "other models") == [{"watches": True, "tokens": 40}, {"watches": False, "tokens": None}]


def test_a_rank_that_dies_leaves_the_file_of_the_others_readable(folder: Path) -> None:
    launched(folder, 2, "dies", killed=1)
    with attemper.open(folder / "died") as run:
        assert run.steps.tolist() == SAMPLED
        assert run.history("rows", "layers.0", 0).values.tolist() == [80.0] * 3


# --- four ranks ---


@pytest.mark.parametrize("case", ["ddp of four", "hsdp"])
@LONG
def test_four_ranks_read_what_one_process_reads(of_four: list[dict[str, Any]], folder: Path, case: str) -> None:
    check_merged(of_four, case)
    check_history(folder, case, 1)


@LONG
def test_ranks_that_hold_other_heads_write_a_fragment_each_which_readers_join_to_the_whole_model(
    of_four: list[dict[str, Any]], folder: Path
) -> None:
    check_merged(of_four, "dp x tp")
    check_history(folder, "dp x tp", 2)


@LONG
def test_a_pipeline_of_data_parallel_ranks_writes_a_fragment_a_stage(
    of_four: list[dict[str, Any]], folder: Path
) -> None:
    for found in of(of_four, "pipeline of ddp"):
        assert found["apart"] <= 1e-12
        assert (found["sent"], found["failures"]) == (1 + 2 * len(SAMPLED), 0)
    check_history(folder, "pipeline 2", 2)


@LONG
def test_data_parallel_ranks_are_told_by_wrappers_and_by_names_of_meshes(of_four: list[dict[str, Any]]) -> None:
    everybody, unknown = [0, 1, 2, 3], "The data-parallel ranks of Model are unknown: "
    for rank, found in enumerate(of(of_four, "groups")):
        for case in ("plain", "ddp", "inside", "fsdp2 without names", "hsdp", "hsdp x tp of 1", "flat without cp"):
            assert found[case] == everybody, case
        assert found["tp of dp x tp"] == found["fsdp x tp"] == ([0, 2] if rank % 2 == 0 else [1, 3])
        assert found["pp x fsdp"] == ([0, 1] if rank < 2 else [2, 3])
        assert found["tp of all"] is None
        for case, name in (("flat with cp", "dp_cp"), ("no name for it", "y")):
            told = f"{unknown}the name of mesh dimension '{name}' does not say whether it is data parallel. Name the"
            assert found[case].startswith(told)


@LONG
def test_a_device_that_computes_otherwise_rings_and_is_named(of_four: list[dict[str, Any]]) -> None:
    first, *others = of(of_four, "bad device")
    assert others == [[]] * 3
    sites = [(site, head) for site, head, _ in first]
    assert ("layers.1", None) in sites
    assert ("layers.0", None) not in sites
    assert all("on rank 2" in message for _, _, message in first)
