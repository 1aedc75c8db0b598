"""Several processes of gloo under torchrun, and what each of them does: inside pytest they would hang it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]


def torchrun(worker: str, folder: Path, *cases: str, processes: int = 2, seconds: float = 300) -> list[dict[str, Any]]:
    """Runs cases of a worker, a module that calls ``run_cases``; all of them where none is named.

    Returns:
        What came out, by rank: case -> that. A case that ended in a traceback fails the test with it.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    with subprocess.Popen(
        [*launcher, "-m", worker, str(folder), *cases],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},  # says where a process aborts
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"the processes wait for each other: {process.communicate()[0][-3000:]}")
    assert process.returncode == 0, output[-3000:]
    return results(folder, processes)


def results(folder: Path, processes: int) -> list[dict[str, Any]]:
    """What the processes of ``run_cases`` have left, by rank. A traceback fails the test."""
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]
    failures = [one[FAILED] for one in found if FAILED in one]
    assert not failures, "\n".join(failures)
    return found


FAILED = "the case that failed"


def run_cases(cases: Mapping[str, Callable[[], Any]]) -> None:
    """What a process does: the cases that its command line names after a folder, all of them where it names none.

    What comes out goes to ``RANK.json`` in the folder. The first failure is the last: other ranks may wait for this.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found: dict[str, Any] = {}
    try:
        for name in sys.argv[2:] or cases:
            torch.manual_seed(0)
            found[name] = json.loads(json.dumps(cases[name]()))
    except Exception:
        found[FAILED] = traceback.format_exc()
    (folder_of_cases() / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def folder_of_cases() -> Path:
    """The folder that this process was given."""
    return Path(sys.argv[1])
