"""The alarms that ship, by their defaults: what they find, how early, and how often they ring where nothing is wrong.

Judged are the packed runs of the benchmark of early warnings, and three parts that are trained here: runs that no limit
was set on, long healthy ones, and a sample of the benchmark's as a user would watch them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from attemper.lab.corpus import Corpus, standard_library
from attemper.lab.trained import runs
from attemper.lab.trained.runs import plain
from attemper.lab.trained.summary import SCHEMA
from research.early_warning import NAME as GRID_NAME
from research.early_warning import run_file
from research.early_warning.grid import Trial
from research.early_warning.run_file import RunFile
from research.shipped_alarms.long_runs import measure_together
from research.shipped_alarms.parts import ENCODER, GRID, LONG, NAME, UNSEEN, WATCHED, Job
from research.shipped_alarms.results import content
from research.shipped_alarms.tables import experiment
from research.shipped_alarms.unseen import measure_unseen, plan_long, plan_unseen
from research.shipped_alarms.watched import measure_watched, plan_watched

__all__ = ["NAME", "experiment", "plan", "results", "train"]

ALONE = {UNSEEN: measure_unseen, WATCHED: measure_watched}
"""Part -> what trains one of its runs."""
QUICK = 24
"""Steps of a run that only shows whether it works."""


def plan(steps: int | None = None, seeds: int = 5, *, quick: bool = False) -> list[Job]:
    """Runs that nobody has seen, long ones, and watched ones; quick: of each kind the first few, and short."""
    told = QUICK if quick and steps is None else steps
    shorter = {} if told is None else {"steps": told}
    parts = {UNSEEN: plan_unseen(seeds=seeds, **shorter), LONG: plan_long(**shorter), WATCHED: plan_watched(**shorter)}
    return [Job(part, trial) for part, trials in parts.items() for trial in (trials[:2] if quick else trials)]


def results(
    planned: Sequence[Job], out: Path, *, quick: bool, corpus: Corpus | None = None, **how: Any
) -> dict[str, Any]:
    """The content of the results file, from the runs in ``out`` once those that are missing are trained, and from the
    packed runs of the benchmark; without these if ``quick``.
    """
    train(planned, out, corpus=corpus, **how)
    wanted = {_key(job.part, plain(asdict(job.trial))) for job in planned}
    read = [run_file.read(path) for path in sorted(out.glob(f"*{run_file.SUFFIX}"))]
    here = [file for file in read if _key(file.about.get("part"), file.about["trial"]) in wanted]
    files = {} if quick else packed()
    files |= {part: [file for file in here if file.about["part"] == part] for part in (UNSEEN, LONG, WATCHED)}
    many = len(planned) + sum(len(files.get(part, ())) for part in (GRID, ENCODER))
    return {**content(files), "schema": SCHEMA, "experiment": NAME, "planned": many}


def packed() -> dict[str, list[RunFile]]:
    """The runs of the benchmark of early warnings, without those that went on from an alarm in another way."""
    from research import RESULTS

    files = [one for one in run_file.read_packed(RESULTS / f"{GRID_NAME}.zip") if "branch" not in one.about]
    encoder = [one for one in files if Trial.of(one.about["trial"]).of_encoder]
    known = set(map(id, encoder))
    return {GRID: [one for one in files if id(one) not in known], ENCODER: encoder}


def train(
    planned: Sequence[Job],
    folder: Path,
    *,
    workers: int = 2,
    corpus: Corpus | None = None,
    at_most: int | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> list[Path]:
    """Trains those that are missing in ``folder``; the paths of all, see ``runs.records``.

    Long runs are trained together: all of them where the first is missing.
    """
    text = corpus or standard_library()
    paths = {job: job.path(folder, text) for job in planned}
    long = {job: path for job, path in paths.items() if job.part == LONG}
    work: dict[Path, Callable[[], None]] = {}
    for job, path in paths.items():
        if job.part != LONG:
            work[path] = partial(_write, job, corpus, path)
        elif path == next(iter(long.values())):
            work[path] = partial(_write_together, long, corpus)
    runs.write_missing(work, folder, workers=workers, at_most=at_most, report=report)
    return list(paths.values())


def _key(part: str | None, trial: Mapping[str, Any]) -> str:
    return json.dumps([part, trial], sort_keys=True)


def _write(job: Job, corpus: Corpus | None, path: Path) -> None:
    text = corpus or standard_library()
    known = run_file.identity(job.trial, text, part=job.part)
    run_file.write(path, known, *ALONE[job.part](job.trial, text))


def _write_together(paths: Mapping[Job, Path], corpus: Corpus | None) -> None:
    """The first file is written last: it says that all are there."""
    text = corpus or standard_library()
    found = measure_together([job.trial for job in paths], text)
    for (job, path), (values, signals) in reversed(list(zip(paths.items(), found, strict=True))):
        run_file.write(path, run_file.identity(job.trial, text, part=job.part), values, signals)
