"""What the alarms that ship say of a run, by their defaults: ``readings/judge.py`` on the signals of its file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attemper import AlarmLimits
from attemper.readings.judge import Judge
from attemper.readings.reading import FEWEST_KEYS
from attemper.readings.sample import Sample, SiteLabel
from research.early_warning.run_file import RunFile
from research.early_warning.spacing import ATTENTION

JUDGED = {
    "judged_normalized_entropy": "normalized_entropy",
    "judged_first_token_mass": "first_token_mass",
    "max_logit": "max_logit",
    "logit_std": "logit_std",
}
"""Quantity of a sample -> signal."""
COUNTS = ("rows", "judged_rows", "empty_rows", "nonfinite_rows")


def first_alarms(
    file: RunFile, since: int = 0, limits: AlarmLimits | Mapping[str, Any] | None = None
) -> dict[str, int]:
    """Kind of alarm -> the step of its first from ``since`` on, at a sample each 5 steps; limits as in a watch."""
    import numpy as np

    run = file.about["trial"]["run"]
    config, examples = run["config"], run["batch"]
    rows = examples * config["context"]
    counts = (rows, examples * max(0, config["context"] - FEWEST_KEYS + 1), 0, 0)
    sites = tuple(
        SiteLabel(f"blocks.{layer}.attention", "self", "train", layer, "full", "softmax", config["heads"])
        for layer in range(config["layers"])
    )
    heads = config["layers"] * config["heads"]
    counted = np.repeat(np.array(counts, np.float32)[:, None], heads, 1)
    judge = Judge(limits)
    found: dict[str, int] = {}
    for place in range(len(file.signals["max_logit"])):
        measured = np.stack([file.signals[name][place].reshape(-1) for name in JUDGED.values()])
        sample = Sample(place * ATTENTION, 0.0, sites, (*JUDGED, *COUNTS), np.concatenate((measured, counted)))
        for alarm in judge.feed(sample):
            if alarm.ended is None and place * ATTENTION >= since:
                found.setdefault(alarm.kind, place * ATTENTION)
    return found
