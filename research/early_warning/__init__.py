"""Which alarm to believe: runs with known faults beside healthy twins, and what detectors say of both.

``docs/design/0014-early-warning.md`` is the plan: grid of runs, faults, the rule of twins, the file of a run, judging.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from attemper.lab.corpus import Corpus, standard_library
from attemper.lab.trained import runs
from research.early_warning import encoder, run_file
from research.early_warning.branch import Branch, measure_branch, plan_branches
from research.early_warning.grid import Trial, plan
from research.early_warning.results import NAME, content
from research.early_warning.tables import experiment
from research.early_warning.trial import measure_run

__all__ = ["NAME", "experiment", "plan", "results", "train"]


def results(
    planned: Sequence[Trial], out: Path, *, quick: bool, corpus: Corpus | None = None, **how: Any
) -> dict[str, Any]:
    """The content of the results file, from the runs in ``out`` once those that are missing are trained.

    When all of the byte-level model are there, remedies from the first alarm on are trained, too.
    """
    paths = dict(zip(planned, train(planned, out, corpus=corpus, **how), strict=True))
    of_bytes = {trial: path for trial, path in paths.items() if not trial.of_encoder}
    if all(path.is_file() for path in of_bytes.values()):
        branches = plan_branches([(trial, run_file.read(path)) for trial, path in of_bytes.items()])
        train_branches(branches, out, corpus=corpus, **how)
    return content(planned, out, corpus or standard_library())


def train(
    trials: Sequence[Trial],
    folder: Path,
    *,
    workers: int = 2,
    corpus: Corpus | None = None,
    at_most: int | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> list[Path]:
    """Trains those of ``trials`` that are missing in ``folder``; the paths of all, see ``runs.records``.

    Runs of the pretrained encoder are left out where its packages are not installed, and ``report`` is told.

    Raises:
        InputError: the folder cannot be made or written to, or the number of workers is not above 0.
    """
    text = corpus or standard_library()
    paths = [folder / run_file.file_name(trial, text) for trial in trials]
    absent = encoder.missing()
    left_out = sum(trial.of_encoder and not path.is_file() for trial, path in zip(trials, paths, strict=True))
    if absent is not None and left_out:
        report(f"{left_out} runs of {encoder.EncoderConfig.model} are left out; {absent}")
    work = {
        path: partial(_write, trial, corpus, path)
        for trial, path in zip(trials, paths, strict=True)
        if absent is None or not trial.of_encoder
    }
    runs.write_missing(work, folder, workers=workers, at_most=at_most, report=report)
    return paths


def train_branches(
    branches: Sequence[tuple[Trial, Branch]],
    folder: Path,
    *,
    workers: int = 2,
    corpus: Corpus | None = None,
    at_most: int | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> list[Path]:
    """As :func:`train`, of runs that go on from their alarm in another way."""
    text = corpus or standard_library()
    paths = [folder / run_file.file_name(trial, text, branch=asdict(branch)) for trial, branch in branches]
    work = {path: partial(_write_branch, *one, corpus, path) for one, path in zip(branches, paths, strict=True)}
    runs.write_missing(work, folder, workers=workers, at_most=at_most, report=report)
    return paths


def _write(trial: Trial, corpus: Corpus | None, path: Path) -> None:
    text = corpus or standard_library()
    run_file.write(path, run_file.identity(trial, text), *measure_run(trial, text))


def _write_branch(trial: Trial, branch: Branch, corpus: Corpus | None, path: Path) -> None:
    text = corpus or standard_library()
    known = run_file.identity(trial, text, branch=asdict(branch))
    run_file.write(path, known, *measure_branch(trial, branch, text))
