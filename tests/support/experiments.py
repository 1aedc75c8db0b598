"""Experiments of the lab, each computed once in a run of the tests: whichever test or worker asks first computes it."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from filelock import FileLock

from attemper.lab.experiment import Experiment

Run = Callable[..., Experiment]
"""``run(name, seed=0)``."""


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """Where the processes of one run of the tests keep what each of them can use."""
    folder = factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


def kept_in(folder: Path, run: Run) -> Run:
    """``run`` whose results are kept in ``folder``, for every process that is given it."""

    @cache
    def found(name: str, seed: int = 0) -> Experiment:
        path = folder / f"{name}-{seed}.pickle"
        with FileLock(f"{path}.lock"):
            if not path.exists():
                path.write_bytes(pickle.dumps(run(name, seed=seed)))
        return pickle.loads(path.read_bytes())

    return found
