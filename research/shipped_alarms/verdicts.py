"""What the alarms that ship say of the file of a run, by their defaults: the judge of stored runs on its numbers.

Samples hold what a watch would have kept. Numbers of the files have 11 significant bits, those of a store 16.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from attemper import AlarmLimits
from attemper.readings.alarms import KINDS, SEVERITIES
from attemper.readings.reading import FEWEST_KEYS, Alarm
from attemper.readings.run_judge import RunJudge
from attemper.readings.sample import Samples, SiteLabel
from attemper.readings.visible_keys import Surplus
from research.early_warning.default_alarms import COUNTS, JUDGED
from research.early_warning.grid import Trial
from research.early_warning.masks import visible_keys
from research.early_warning.run_file import RunFile
from research.early_warning.trial import Array

MASKED = ("visible_keys", "expected_keys")
"""Quantities that follow from masks, in files of watched runs; of others, the first is counted anew."""
KEPT = JUDGED | {name: name for name in MASKED}
"""Quantity of a sample that alarms look at -> signal."""
LENGTHS = ("queries", "keys")
"""Counts by which samples of like lengths are known."""


def is_warning(kind: str) -> bool:
    """Whether alarms of a kind are warnings or worse."""
    return KINDS[kind].severity != SEVERITIES[0]


def alarms_of(file: RunFile, every: int, limits: AlarmLimits | Mapping[str, Any] | None = None) -> tuple[Alarm, ...]:
    """Alarms of a run that was sampled each ``every`` steps, and gave its loss at every step."""
    run, known = file.about["trial"]["run"], quantities(file.signals, file)
    return judge_signals(run, known, file.signals["loss"], every, limits)


def quantities(signals: Mapping[str, Array], file: RunFile) -> dict[str, Array]:
    """Quantity -> [T, L, H] of the ``signals`` of a run like that of a file: what alarms look at, as far as known."""
    found = {name: signals[signal] for name, signal in KEPT.items() if signal in signals}
    if MASKED[0] not in found:
        found[MASKED[0]] = visible_keys(Trial.of(file.about["trial"]), len(signals["max_logit"]))
    return found


def judge_signals(
    run: Mapping[str, Any],
    signals: Mapping[str, Array],
    losses: Array,
    every: int,
    limits: AlarmLimits | Mapping[str, Any] | None = None,
) -> tuple[Alarm, ...]:
    """As ``alarms_of``; ``signals``: quantity -> [T, L, H], measured each ``run["every"]`` steps."""
    assert every % run["every"] == 0, f"measured each {run['every']} steps, asked for each {every}"
    judge = RunJudge(limits)
    judge.feed_all([with_surplus(samples(run, signals, every))])
    judge.loss.feed(np.arange(len(losses)), losses)
    return judge.alarms


def with_surplus(block: Samples) -> Samples:
    """With the keys too many or too few, as a watch adds them to one sample after another."""
    surplus = Surplus()
    each = [surplus.with_surplus(sample) for sample in block.each()]
    values = np.stack([sample.values for sample in each], 1)
    return block._replace(quantities=each[0].quantities, values=values)


def first_steps(alarms: tuple[Alarm, ...], since: int = 0) -> dict[str, int]:
    """Kind -> the step of its first alarm that begins at ``since`` or later."""
    found: dict[str, int] = {}
    for alarm in alarms:
        if alarm.since is not None and alarm.since >= since:
            found.setdefault(alarm.kind, alarm.since)
    return found


def begun(alarms: tuple[Alarm, ...]) -> dict[str, int]:
    """Kind -> steps at which alarms of it begin, in whichever heads."""
    return dict(Counter(kind for kind, _ in sorted({(alarm.kind, alarm.since) for alarm in alarms})))


def samples(run: Mapping[str, Any], signals: Mapping[str, Array], every: int) -> Samples:
    """What a watch would have kept, each ``every`` steps; scores that are no number make rows that are none."""
    config, examples = run["config"], run["batch"]
    heads = config["heads"]
    sites = tuple(
        SiteLabel(f"blocks.{layer}.attention", "self", "train", layer, "full", "softmax", heads)
        for layer in range(config["layers"])
    )
    stride = every // run["every"]
    values = [array[::stride].reshape(-(-len(array) // stride), -1) for array in signals.values()]
    broken = ~np.isfinite(signals["max_logit"][::stride]).reshape(values[0].shape)
    rows, tokens = examples * config["context"], config["context"]
    whole = rows, examples * max(0, tokens - FEWEST_KEYS + 1), 0
    counts = [np.where(broken, 0, count) for count in whole] + [np.where(broken, rows, 0)]
    counts += [np.full(broken.shape, tokens) for _ in LENGTHS]
    many = len(values[0])
    steps = list(range(0, many * every, every))
    stacked = np.stack([*values, *counts]).astype(np.float32)
    return Samples(steps, [0.0] * many, [0] * many, sites, (*signals, *COUNTS, *LENGTHS), stacked)
