"""Histories of two runs side by side, as lines that need no script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attemper.report.document import number_said, quantity
from attemper.report.history import Course
from attemper.report.texts import Message, message
from attemper.store.ranks import columns
from attemper.store.run import StoredRun
from attemper.text import clean, cut

MOST_PAIRS = 24
"""Heads whose histories are shown of a statistic: those that differ most."""
WIDE, TALL = 150, 48
"""Of a line, in its own units: a column each."""
Array = np.ndarray


@dataclass(frozen=True)
class Pair:
    """One head in both runs."""

    place: Message
    change: Message
    lines: tuple[str, str]
    """Paths of an SVG."""
    labels: tuple[Message, Message]


@dataclass(frozen=True)
class Courses:
    """A statistic of the heads that differ most in it, the largest difference first."""

    title: Message
    help: Message
    pairs: tuple[Pair, ...]


def courses_of(
    runs: tuple[StoredRun, StoredRun], heads: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> list[Courses]:
    """Of each statistic the heads that differ most at the end of both runs."""
    return [_courses(runs, heads, name) for name in names]


def _courses(runs: tuple[StoredRun, StoredRun], heads: Sequence[Mapping[str, Any]], name: str) -> Courses:
    known = [head for head in heads if head[name]["change"]]
    most = sorted(known, key=lambda head: -abs(head[name]["change"]))[:MOST_PAIRS]
    found = [(head, [_course(run, head, name) for run in runs]) for head in most]
    values = [one for _, both in found for _, numbers in both for one in numbers[np.isfinite(numbers)].tolist()]
    display = quantity(name).display
    low = min(values, default=0.0) if display.low is None else display.low
    high = max(values, default=1.0) if display.high is None else display.high
    spans = [message("compared.steps", first=int(run.steps[0]), last=int(run.steps[-1])) for run in runs]
    pairs = tuple(
        Pair(
            message("head.named", site=cut(clean(head["site"]), 80), head=head["head"]),
            message("compared.change", **{side: number_said(name, head[name][side]) for side in ("before", "after")}),
            (_line(*both[0], low, high), _line(*both[1], low, high)),
            (message("compared.before", value=number_said(name, head[name]["before"])),
             message("compared.after", value=number_said(name, head[name]["after"]))),
        )
        for head, both in found
    )  # fmt: skip
    ends = {"low": number_said(name, float(low)), "high": number_said(name, float(high))}
    return Courses(
        quantity(name).title, message("compared.courses_help", before=spans[0], after=spans[1], **ends), pairs
    )


def _course(run: StoredRun, head: Mapping[str, Any], name: str) -> tuple[Array, Array]:
    """Steps, and the numbers of a head, of each column the one farthest from its median."""
    key = (head["site"], head["kind"], head["mode"])
    found = columns(run.ranks, name, key, WIDE)
    (label,) = (label for label in run.sites if label.key == key)
    course = Course(found.steps, found.least, found.mean, found.largest)
    return found.steps, course.farthest[:, head["head"] - label.first_head]


def _line(steps: Array, numbers: Array, low: float, high: float) -> str:
    span, rise = max(1, int(steps[-1] - steps[0])), (high - low) or 1.0
    points = [
        f"{(step - steps[0]) / span * WIDE:.1f} {TALL - 2 - (min(max(value, low), high) - low) / rise * (TALL - 4):.1f}"
        for step, value in zip(steps.tolist(), numbers.tolist(), strict=True)
        if np.isfinite(value)
    ]
    return f"M{'L'.join(points)}" if points else ""
