"""From the files of runs to cases: scores of every detector, and what held-out loss says of each fault."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Any

import numpy as np

from research.early_warning.default_alarms import first_alarms
from research.early_warning.detectors import DETECTORS
from research.early_warning.grid import Trial
from research.early_warning.judging import Case, Course
from research.early_warning.masks import visible_keys
from research.early_warning.run_file import RunFile
from research.early_warning.spacing import HELD_OUT

DEVIATIONS = 3.0
"""A difference between twins beyond so many standard deviations of that between two seeds is above the noise floor."""
LEAST_SEEDS = 5
"""A configuration with fewer healthy runs has no noise floor, and is not judged."""


@dataclass(frozen=True, eq=False)
class JudgedRun:
    """A case, with what else tables say of its run."""

    case: Case
    document: Mapping[str, Any]
    """The trial, as in the file."""
    held_out: float | None
    excess: float | None
    """Held-out loss above the twin's, nats; None in a healthy run, inf in one that broke."""
    alarms: Mapping[str, int]
    """Default alarm -> step of its first, from the fault on."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a run came to beside its twin."""

    file: RunFile
    configuration: str
    twin: RunFile | None
    """Of a faulty run."""
    excess: float | None
    """As in ``JudgedRun``."""
    hurt: bool
    told: int | None
    """As in ``Case``."""


def outcomes(files: Iterable[RunFile]) -> list[Outcome]:
    """Of the configurations with at least five healthy runs, and of faults whose twin is there."""
    groups: dict[str, list[RunFile]] = {}
    for file in files:
        groups.setdefault(configuration(file), []).append(file)
    found = []
    for name, members in groups.items():
        twins = {_seed(file): file for file in members if file.about["trial"]["fault"] is None}
        if len(twins) < LEAST_SEEDS:
            continue
        floors = noise_floors(list(twins.values()))
        end = noise_floor([_loss(file) for file in twins.values()])
        found += [_outcome(file, name, twins[_seed(file)], end, floors) for file in members if _seed(file) in twins]
    return found


def judge_files(files: Iterable[RunFile]) -> list[JudgedRun]:
    """Cases of :func:`outcomes`."""
    return [_judge(one) for one in outcomes(files)]


def configuration(file: RunFile) -> str:
    """What a run follows from but its seed and its fault, and the text."""
    run = {name: value for name, value in file.about["trial"]["run"].items() if name != "seed"}
    return json.dumps({"run": run, "corpus": file.about["corpus"]}, sort_keys=True)


def noise_floor(losses: Sequence[float]) -> float:
    """3 standard deviations of the difference of two such losses: 3 sqrt(2) s."""
    return DEVIATIONS * math.sqrt(2) * stdev(losses)


def noise_floors(twins: Sequence[RunFile]) -> list[float]:
    """Of held-out loss on the way, at each of its measurements."""
    curves = np.stack([file.signals["held_out"] for file in twins]).astype(float)
    return [noise_floor(column.tolist()) for column in curves.T]


def _seed(file: RunFile) -> int:
    return file.about["trial"]["run"]["seed"]


def _loss(file: RunFile) -> float:
    return math.inf if file.about["held_out"] is None else file.about["held_out"]


def _outcome(file: RunFile, name: str, twin: RunFile, end: float, floors: Sequence[float]) -> Outcome:
    if file is twin:
        return Outcome(file, name, None, None, False, None)
    excess = _loss(file) - _loss(twin)
    return Outcome(file, name, twin, excess, excess > end, told_at(file, twin, floors))


def _judge(one: Outcome) -> JudgedRun:
    fault = one.file.about["trial"]["fault"]
    case = Case(
        configuration=one.configuration,
        seed=_seed(one.file),
        courses=courses(one.file),
        kind=fault["kind"] if fault else "",
        since=fault["step"] if fault else 0,
        hurt=one.hurt,
        told=one.told,
    )
    about = one.file.about
    return JudgedRun(case, about["trial"], about["held_out"], one.excess, first_alarms(one.file, case.since))


def courses(file: RunFile) -> dict[str, Course]:
    """Detector -> its scores at the steps where its signals were measured."""
    found = {}
    counts = visible_keys(Trial.of(file.about["trial"]), len(file.signals["max_logit"]))
    signals = {**file.signals, "visible_keys": counts}
    for name, detector in DETECTORS.items():
        scores = detector.score(signals)
        found[name] = Course(detector.spacing * np.arange(len(scores), dtype=float), scores)
    return found


def told_at(file: RunFile, twin: RunFile, floors: Sequence[float]) -> int | None:
    """The first step, from the fault's on, where held-out loss is above the twin's by more than the noise floor, or the
    training loss is no number.
    """
    since = file.about["trial"]["fault"]["step"]
    pairs = zip(file.signals["held_out"].tolist(), twin.signals["held_out"].tolist(), floors, strict=False)
    for place, (loss, healthy, floor) in enumerate(pairs):
        if HELD_OUT * place >= since and not loss - healthy <= floor:
            return HELD_OUT * place
    return file.about["diverged_at"]
