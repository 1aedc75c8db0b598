"""What the files of runs come to by the alarms that ship: a small document, from which tables and page are made."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from attemper.readings.alarms import ALARMS
from research.early_warning.cases import Outcome, configuration, outcomes
from research.early_warning.judging import first_half
from research.early_warning.run_file import RunFile
from research.shipped_alarms.parts import ENCODER, GRID, LONG, UNSEEN, WATCHED
from research.shipped_alarms.resampled import false_alarms
from research.shipped_alarms.verdicts import alarms_of, begun, first_steps

SPACINGS = (1, 5, 10, 50)
"""Steps between two samples; a file is judged at those that are multiples of its own."""
SMOOTH = 5
"""Losses whose median counts where the peak of the loss is looked for."""


def rows_of(files: Mapping[str, Sequence[RunFile]]) -> list[dict[str, Any]]:
    """A row for each run of each part; what is said of it only if it is judged."""
    found = []
    known: dict[str, dict[str, Any]] = {}
    for part, members in files.items():
        judged = {id(one.file): one for one in outcomes(members)}
        names = list(dict.fromkeys(map(configuration, members)))
        half = first_half(names)
        for file in members:
            run = file.about["trial"]["run"]
            row = {
                "part": part,
                "configuration": names.index(configuration(file)),
                "half": int(configuration(file) in half),
                **{name: run[name] for name in ("seed", "rate", "optimizer", "steps") if name in run},
                "fault": file.about["trial"]["fault"],
                "held_out": file.about["held_out"],
            }
            found.append(row | _verdict(file, judged.get(id(file)), part))
            if part == GRID:
                known[_same(file)] = found[-1]
            elif part == WATCHED and _same(file) in known:
                before = known[_same(file)]
                found[-1] |= {"hurt": before.get("hurt"), "before": before["alarms"]["5"]}
    return found


def _same(file: RunFile) -> str:
    """What a run of the benchmark and the same run watched have in common."""
    trial = file.about["trial"]
    return json.dumps({**trial, "run": {**trial["run"], "every": None}}, sort_keys=True)


def _verdict(file: RunFile, one: Outcome | None, part: str) -> dict[str, Any]:
    fault = file.about["trial"]["fault"]
    if one is None and part in (UNSEEN, GRID, ENCODER):
        return {}
    alarms = {every: alarms_of(file, every) for every in SPACINGS if every % file.about["trial"]["run"]["every"] == 0}
    since = fault["step"] if fault else 0
    row: dict[str, Any] = {"alarms": {str(every): first_steps(of, since) for every, of in alarms.items()}}
    if fault is None:
        row["begun"] = {str(every): begun(of) for every, of in alarms.items()}
    elif one is not None:
        excess = None if one.excess is None or math.isinf(one.excess) else round(one.excess, 4)
        row |= {"excess": excess, "hurt": one.hurt, "told": one.told, "peak": peak(one)}
    if part == WATCHED:
        row |= {name: file.about[name] for name in ("live", "stored")}
    return row


def peak(one: Outcome) -> int | None:
    """The step from the fault's on at which the training loss is farthest above the twin's, or is no number."""
    diverged = one.file.about["diverged_at"]
    if diverged is not None or one.twin is None:
        return diverged
    since = one.file.about["trial"]["fault"]["step"]
    above = (one.file.signals["loss"].astype(float) - one.twin.signals["loss"])[since:]
    padded = np.pad(above, SMOOTH // 2, mode="edge")
    return since + int(np.median(np.lib.stride_tricks.sliding_window_view(padded, SMOOTH), 1).argmax())


def content(files: Mapping[str, Sequence[RunFile]]) -> dict[str, Any]:
    """What a results file says of runs, by part."""
    every = [file for members in files.values() for file in members]
    environments = {json.dumps(file.about["environment"], sort_keys=True) for file in every}
    return {
        "corpora": sorted({file.about["corpus"] for file in every}),
        "environments": [json.loads(text) for text in sorted(environments)],
        "limits": {kind.name: [kind.severity, kind.limit] for kind in ALARMS},
        "configurations": {
            part: [json.loads(text)["run"] for text in dict.fromkeys(map(configuration, files[part]))]
            for part in (UNSEEN, LONG)
            if part in files
        },
        "resampled": false_alarms(files.get(LONG, ())),
        "runs": rows_of(files),
    }
