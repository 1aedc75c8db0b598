"""Runs a table of mutants: copies ``src``, changes one text, and runs the mutant's tests against the copy.

Nothing here imports attemper: a mutant's process imports this file first, and must then find the copy.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUICK = "tests/backends/test_blocked_quick.py"
TIME_LIMIT = 600
BROKEN = 70
"""How a process ends where not even pytest ran: pytest's own numbers are less."""
SURVIVED = "SURVIVED"
SERVER = multiprocessing.get_context("forkserver")
"""Forks a process for each mutant."""


@dataclass(frozen=True)
class Mutant:
    """One change: ``before`` stands exactly once in ``file`` (under src/attemper) and becomes ``after``.

    ``tests``: what is run against it, in pytest's words; one of them must fail.
    """

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...] = (QUICK,)

    @property
    def source(self) -> Path:
        return ROOT / "src" / "attemper" / self.file


def run_table(table: Sequence[Mutant], jobs: int) -> int:
    """Prints the outcome of every mutant; 0 where all are killed. Without a mutation all their tests must pass."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    SERVER.set_forkserver_preload(["torch", "pytest", "triton"])
    native = any(mutant.file.startswith("backends/native/source/") for mutant in table)
    whole = outcome(tuple(dict.fromkeys(test for mutant in table for test in mutant.tests)), native=native)
    if whole != SURVIVED:
        print(f"the tests fail without any mutation: {whole}")
        return 1
    with ThreadPoolExecutor(jobs) as pool:
        results = []
        for mutant, result in zip(table, pool.map(lambda one: mutated(one, native), table), strict=True):
            results.append(result)
            print(f"{mutant.name:58s} {result}", flush=True)
    killed = sum(result.startswith("killed") for result in results)
    print(f"{killed} of {len(results)} mutants killed")
    return 0 if killed == len(results) else 1


def mutated(mutant: Mutant, native: bool) -> str:
    """The outcome of one mutant; "NOT FOUND" where the kernel no longer has the text."""
    found = mutant.source.read_text().count(mutant.before)
    return f"NOT FOUND ({found} times)" if found != 1 else outcome(mutant.tests, mutant, native=native)


def outcome(tests: tuple[str, ...], mutant: Mutant | None = None, *, native: bool) -> str:
    """ "killed ...", "SURVIVED", or what kept these tests from running against the copy.

    ``native``: the copy's libraries are compiled, with -O1 and for this processor alone.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder) / "src"
        # What Python compiled of other files is taken along, for it takes a second to compile again.
        left = [f"{mutant.source.stem}.*.pyc"] if mutant else []
        shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns(*left, *(["*.so"] if native else [])))
        if mutant:
            text = mutant.source.read_text()
            (copy / "attemper" / mutant.file).write_text(text.replace(mutant.before, mutant.after))
        if native and (complaint := _compiled(copy)):
            return complaint
        return tested(copy, tests)


def _compiled(copy: Path) -> str:
    """Compiles the copy's native kernels; what went wrong, or nothing."""
    from attemper.backends.native import build

    folder = copy / "attemper" / "backends" / "native"
    try:
        build.libraries(folder, ["-O1", "-w"], source=folder / "source", sets=[_instruction_set()])
    except build.CannotBuildError as error:
        return f"DOES NOT COMPILE: {error}"
    return ""


def _instruction_set() -> str:
    """The best that this processor and the built libraries have."""
    import ctypes

    import torch

    from attemper.backends.native import library

    folder = Path(library.__file__).parent
    for name in library.builds(torch.backends.cpu.get_cpu_capability()):
        path = folder / f"attemper_native_{name}.so"
        if path.exists() and library.declare_types(ctypes.CDLL(str(path))).attemper_usable():
            return name
    raise SystemExit("no library is built for this processor: python scripts/build_native.py")


def tested(source: Path, tests: Sequence[str]) -> str:
    """These tests against this copy of ``src``, in a process that has imported what no mutant changes."""
    with tempfile.NamedTemporaryFile("r", prefix="mutant-") as report:
        child = SERVER.Process(target=_run_tests, args=(str(source), tuple(tests), report.name))
        child.start()
        child.join(TIME_LIMIT)
        if child.exitcode is None:
            child.kill()
            child.join()
            return "killed by the time limit"
        text = report.read()
    if child.exitcode == 0:
        return SURVIVED
    if child.exitcode != 1:
        return f"BROKEN (pytest ended with {child.exitcode}): {text[-300:]}"
    lines = [line for line in text.splitlines() if "Error" in line or line.startswith("E ")]
    return f"killed ({lines[0].split('/')[-1][:110] if lines else 'a test failed'})"


def _run_tests(source: str, tests: tuple[str, ...], report: str) -> None:
    with open(report, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.chdir(ROOT)
    sys.path.insert(0, source)
    sys.dont_write_bytecode = True
    options = (
        "--all --long --assert=plain -x -q --no-header -p no:cacheprovider -p no:randomly -p no:xdist -rN --tb=line"
    )
    code = BROKEN
    try:
        code = pytest.main([*tests, *options.split()])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
