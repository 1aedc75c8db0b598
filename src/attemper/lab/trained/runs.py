"""Many training runs that go on where they were: one JSON file a run, by as many processes as asked for.

A file is named for what its run follows from, so that a folder may hold runs of several experiments and of several
sizes, and it is written whole or not at all: an experiment that was killed repeats at most the runs it was in.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attemper.checks import whole_number
from attemper.distributed.workers import block_interrupts
from attemper.errors import InputError
from attemper.file_schema import parse_json
from attemper.files import replacement
from attemper.lab.corpus import Corpus, standard_library
from attemper.lab.experiment import json_value
from attemper.lab.trained.training import Run, trained

SCHEMA = 1

Job = Callable[[Run, Corpus], dict[str, Any]]
"""What is done with a run: a function at the top of a module, which another process can import."""


def identity(run: Run, job: Job, corpus: Corpus) -> dict[str, Any]:
    """What must agree for a file to stand for a run, as plain values."""
    return {"job": job.__name__, "run": plain(asdict(run)), "corpus": corpus.digest}


def file_name(known: dict[str, Any]) -> str:
    """A name to read, and a hash of everything."""
    run = known["run"]
    slug = run["intervention"].lower().replace(" ", "-")
    return f"{known['job']}-{slug}-{run['rate']:g}-seed{run['seed']}-{digest(known)}.json"


def digest(known: dict[str, Any]) -> str:
    """A short hash of everything that a run follows from."""
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:10]


def records(
    runs: Sequence[Run],
    folder: Path,
    *,
    job: Job = trained,
    workers: int = 2,
    corpus: Corpus | None = None,
    at_most: int | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """The documents of ``runs``, in their order: read from ``folder`` where they are there, else computed into it.

    A document is ``{"schema", "job", "run", "corpus", "environment", "seconds", "record"}``.

    Args:
        runs: started in this order.
        folder: made if it is missing.
        workers: processes, each with one thread of torch; with 1, this process does it all.
        corpus: bytes to train on; None for the sources of this Python's library.
        at_most: so many of those that are missing are computed, the others left out; None for all.
    """
    text = corpus or standard_library()
    paths = [folder / file_name(identity(run, job, text)) for run in runs]
    work = {path: partial(_write, run, job, corpus, path) for run, path in zip(runs, paths, strict=True)}
    write_missing(work, folder, workers=workers, at_most=at_most, report=report)
    return [parse_json(path.read_bytes(), str(path)) for path in paths if path.is_file()]


def write_missing(
    work: Mapping[Path, Callable[[], None]],
    folder: Path,
    *,
    workers: int,
    at_most: int | None,
    report: Callable[[str], None],
) -> None:
    """Calls what writes each file of ``folder`` that is not there yet, in this order; see :func:`records`. ``work``:
    path -> what writes this file, whole or not at all; another process must be able to import it.
    """
    whole_number("lab: workers", workers)
    _make(folder)
    missing = [path for path in work if not path.is_file()]
    report(f"{len(work) - len(missing)} of {len(work)} runs are in {folder}")
    missing = missing[:at_most]
    for count, place in enumerate(_run_all([work[path] for path in missing], workers), 1):
        report(f"{count} of {len(missing)}: {missing[place].name}")


def _run_all(work: list[Callable[[], None]], workers: int) -> Iterator[int]:
    """Does it all; the place of each as it is done."""
    if workers == 1 or len(work) < 2:
        for place, one in enumerate(work):
            one()
            yield place
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _one_thread) as pool:
        try:
            with block_interrupts():
                places = {pool.submit(one): place for place, one in enumerate(work)}
            for future in as_completed(places):
                future.result()
                yield places[future]
        except BaseException:
            # A run is written when it is done and not before: ending one in its middle loses nothing else.
            for process in multiprocessing.active_children():
                process.terminate()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _one_thread() -> None:
    torch.set_num_threads(1)


def _write(run: Run, job: Job, corpus: Corpus | None, path: Path) -> None:
    """Computes a run and puts its document in place at once."""
    text = corpus or standard_library()
    began = time.monotonic()
    record = job(run, text)
    document = {
        "schema": SCHEMA,
        **identity(run, job, text),
        "environment": environment(),
        "seconds": round(time.monotonic() - began, 1),
        "record": plain(record),
    }
    with replacement(path) as part:
        part.write_text(json.dumps(document, allow_nan=False), encoding="utf-8")


def environment() -> dict[str, str]:
    """What digits may depend on beside a run."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"lab: no results can be kept in {str(folder)!r}: {error.strerror or error}. Name a folder with --out."
        ) from error
    if not os.access(folder, os.W_OK):
        raise InputError(f"lab: the folder {str(folder)!r} is write-protected. Name another one with --out.")


plain = partial(json_value, digits=6)
"""What JSON can hold, numbers with six digits."""
