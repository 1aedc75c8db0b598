"""Several processes of gloo under torchrun: inside pytest they would hang it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def torchrun(worker: Path, folder: Path, *cases: str, processes: int = 2, seconds: float = 300) -> list[dict[str, Any]]:
    """Runs cases of a worker, all of them where none is named. It writes what came out as ``RANK.json`` into the
    folder: case -> that, by rank.

    A named case that ended in a traceback fails the test with it.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    with subprocess.Popen(
        [*launcher, str(worker), str(folder), *cases],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"the processes wait for each other: {process.communicate()[0][-3000:]}")
    assert process.returncode == 0, output[-3000:]
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]
    for case in cases:
        for one in found:
            assert not (isinstance(one[case], dict) and "traceback" in one[case]), one[case]["traceback"]
    return found
