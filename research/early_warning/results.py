"""What the files of runs come to: a small document, from which tables and page are made."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Any

from attemper.lab.corpus import Corpus
from attemper.lab.trained.runs import plain
from attemper.lab.trained.summary import SCHEMA
from research.early_warning import run_file
from research.early_warning.cases import (
    LEAST_SEEDS,
    JudgedRun,
    configuration,
    judge_files,
    noise_floor,
)
from research.early_warning.costs import measure_costs
from research.early_warning.detectors import DETECTORS, GRADIENT_NORM, LOSS
from research.early_warning.grid import Trial
from research.early_warning.judging import (
    Case,
    Judgement,
    Share,
    fit,
    judge,
    judge_left_out,
    recall_at,
    recall_together,
    ring,
    shuffle_labels,
    typical,
)
from research.early_warning.run_file import RunFile

NAME = "early-warning"
COMBINATION = "combination"
MOST_FALSE_ALARMS = 10
"""Up to which recall is said at so many false alarms."""
SHUFFLES = 20
GROUPS = ("attention", "gradient_norm", "update_norm", "output_rank", "increment_entropy")
"""Of signals that are measured together: keys of ``seconds`` in the file of a run."""


def content(planned: Sequence[Trial], folder: Path, corpus: Corpus) -> dict[str, Any]:
    """The content of a results file, from the files in a folder that are of planned runs, whatever their text.

    What detectors cost is measured now, on the first of the planned models, with ``corpus``.
    """
    run = planned[0].run
    costs = measure_costs(run, corpus)
    wanted = {json.dumps(plain(asdict(trial)), sort_keys=True): trial.of_encoder for trial in planned}
    read = [run_file.read(path) for path in sorted(folder.glob(f"*{run_file.SUFFIX}"))]
    asked = [(file, wanted.get(json.dumps(file.about["trial"], sort_keys=True))) for file in read]
    files = [file for file, of_encoder in asked if of_encoder is False]
    plain_files = [file for file in files if "branch" not in file.about]
    judged = judge_files(plain_files)
    encoder = [file for file, of_encoder in asked if of_encoder]
    return {
        "schema": SCHEMA,
        "experiment": NAME,
        "planned": sum(not of_encoder for of_encoder in wanted.values()),
        "corpora": sorted({file.about["corpus"] for file in files}),
        "environments": _distinct([file.about["environment"] for file in files + encoder]),
        "minutes": round(sum(sum(file.about["seconds"].values()) for file in files + encoder) / 60, 1),
        "costs": {
            "run": plain(asdict(run)),
            "step": _three_digits(costs["step"]),
            "together": {group: _share_of_training(plain_files, group) for group in GROUPS},
        },
        **_sum_up(plain_files, judged, costs["detectors"]),
        "encoder": {"planned": sum(wanted.values()), "done": len(encoder), "runs": _transfer(judged, encoder)},
        "branches": _branches(files),
    }


def _transfer(judged: Sequence[JudgedRun], files: Sequence[RunFile]) -> list[dict[str, Any]]:
    """Runs of another model, by limits at which no healthy run of ``judged`` rings: detector -> step of its ring."""
    cases = [one.case for one in judged]
    limits = {name: fit(cases, name) for name in DETECTORS}
    found = judge_files(files)
    names = list(dict.fromkeys(map(configuration, files)))
    rows = [_row(file, names, found) for file in files]
    for one in found:
        row = rows[next(place for place, file in enumerate(files) if file.about["trial"] is one.document)]
        row["rings"] = {name: step for name in DETECTORS if (step := ring(one.case, {name: limits[name]})) is not None}
    return rows


def _sum_up(
    files: Sequence[RunFile], judged: Sequence[JudgedRun], costs: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    cases = [one.case for one in judged]
    names = list(dict.fromkeys(map(configuration, files)))
    together = judge(cases, list(DETECTORS), LOSS.name, combined=True)
    controls = [shuffle_labels(cases, seed) for seed in range(SHUFFLES)]
    return {
        "configurations": [_configuration(name, judged) for name in names],
        "runs": [_row(file, names, judged) for file in files],
        "detectors": {
            name: {
                **_judgement(judge(cases, [name], LOSS.name)),
                "gradient_lead": _lead(judge(cases, [name], GRADIENT_NORM.name)),
                "recalls": [list(recall_at(cases, name, count)) for count in range(MOST_FALSE_ALARMS + 1)],
                "control": _control(controls, [name]),
                "cost": {part: _three_digits(value) for part, value in costs[name].items()},
                "limit": _finite(fit(cases, name)),
            }
            for name in DETECTORS
        }
        | {
            COMBINATION: {
                **_judgement(together),
                "gradient_lead": _lead(judge(cases, list(DETECTORS), GRADIENT_NORM.name, combined=True)),
                "recalls": [list(recall_together(cases, list(DETECTORS), count)) for count in (0, 1)],
                "control": _control(controls, list(DETECTORS), combined=True),
                "cost": _cost_together(together.members, costs),
            }
        },
        "left_out": {
            kind: _judgement(found) for kind, found in judge_left_out(cases, list(DETECTORS), LOSS.name).items()
        },
    }


def _branches(files: Sequence[RunFile]) -> list[dict[str, Any]]:
    """What each remedy came to: held-out loss of the healthy twin, of the faulty run unchanged, and with the remedy;
    and the noise floor of the configuration.
    """
    plain_runs = {_key(file): file.about["held_out"] for file in files if "branch" not in file.about}
    floors = _floors(files)
    found = []
    for file in files:
        if "branch" in file.about:
            twin = _key(file, {**file.about["trial"], "fault": None})
            losses = {
                "twin": plain_runs.get(twin),
                "unchanged": plain_runs.get(_key(file)),
                "remedied": file.about["held_out"],
            }
            floor = floors.get(configuration(file))
            found.append({**file.about["branch"], "fault": file.about["trial"]["fault"], **losses, "floor": floor})
    return found


def _floors(files: Sequence[RunFile]) -> dict[str, float]:
    """Configuration -> noise floor, of those with healthy runs enough."""
    losses: dict[str, list[float]] = {}
    for file in files:
        known = file.about["held_out"]
        if file.about["trial"]["fault"] is None and known is not None:
            losses.setdefault(configuration(file), []).append(known)
    return {name: round(noise_floor(found), 4) for name, found in losses.items() if len(found) >= LEAST_SEEDS}


def _key(file: RunFile, trial: Mapping[str, Any] | None = None) -> str:
    return json.dumps([trial or file.about["trial"], file.about["corpus"]], sort_keys=True)


def _distinct(environments: Sequence[Mapping[str, str]]) -> list[Any]:
    return [json.loads(text) for text in sorted({json.dumps(one, sort_keys=True) for one in environments})]


def _configuration(name: str, judged: Sequence[JudgedRun]) -> dict[str, Any]:
    losses = [one.held_out for one in judged if one.case.configuration == name and not one.case.kind]
    known = [loss for loss in losses if loss is not None]
    return {
        "run": json.loads(name)["run"],
        "healthy": len(losses),
        "held_out": round(fmean(known), 4) if known else None,
        "floor": round(noise_floor(known), 4) if len(known) > 1 else None,
    }


def _row(file: RunFile, names: Sequence[str], judged: Sequence[JudgedRun]) -> dict[str, Any]:
    """A run; what is said of it only if it is judged."""
    row = {
        "configuration": names.index(configuration(file)),
        "seed": file.about["trial"]["run"]["seed"],
        "fault": file.about["trial"]["fault"],
        "held_out": file.about["held_out"],
    }
    one = next((one for one in judged if one.document is file.about["trial"]), None)
    if one is None:
        return row
    row["alarms"] = dict(one.alarms)
    if not one.case.kind:
        return row
    excess = None if one.excess is None or math.isinf(one.excess) else round(one.excess, 4)
    return row | {"excess": excess, "hurt": one.case.hurt, "told": one.case.told}


def _judgement(found: Judgement) -> dict[str, Any]:
    return {
        "found": list(found.found),
        "false": list(found.false),
        "by_kind": {kind: list(share) for kind, share in found.by_kind.items()},
        "lead": _lead(found),
        "held_out_lead": [typical(found.held_out_leads), len(found.held_out_leads)],
        "members": list(found.members),
    }


def _lead(found: Judgement) -> list[float | None]:
    """The median of its leads, and how many they are."""
    return [typical(found.leads), len(found.leads)]


def _control(controls: Sequence[Sequence[Case]], names: Sequence[str], **how: bool) -> list[int]:
    """In all shuffles together: runs called faulty that were found, of how many; the same of those called healthy."""
    found = [judge(cases, names, LOSS.name, **how) for cases in controls]
    return [sum(numbers) for numbers in zip(*((*one.found, *one.false) for one in found), strict=True)]


def _finite(value: float) -> float | None:
    """None in the place of what JSON has no number for."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _share_of_training(files: Sequence[RunFile], group: str) -> float | None:
    """What a group of signals took in the runs, measured together, as a share of the training: the median."""
    shares = [file.about["seconds"][group] / file.about["seconds"]["training"] for file in files]
    return round(median(shares), 4) if shares else None


def _cost_together(members: Sequence[str], costs: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Of several detectors: a signal that several need is measured once."""
    signals = {DETECTORS[name].signal: costs[name]["signal"] for name in members}
    scores = [costs[name]["score"] for name in members]
    return {"signal": _three_digits(sum(signals.values())), "score": _three_digits(sum(scores))}


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}")


def share(pair: Sequence[int]) -> Share:
    """A share as it stands in a results file."""
    return Share(*pair)
