"""A run at a glance: what it is, the course of every site, the heads that changed most, and its alarms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from attemper.readings.alarms import LOSS, with_shared_advice
from attemper.readings.history import History, Trend, block_means, is_telling, mean, trend
from attemper.readings.reading import FEWEST_KEYS, Alarm, number, untrained_note
from attemper.readings.sample import SiteKey, SiteLabel
from attemper.report import history
from attemper.statistics import SHOWN
from attemper.store.run import Coverage, StoredRun
from attemper.store.scalars import scalar_columns
from attemper.store.series import Lost, Segment
from attemper.store.verdict import why_unmeasured
from attemper.text import date_of

SCHEMA = 1
SHARPNESS, SIZE = "normalized_entropy", "max_logit"
"""Statistics whose course is shown of every site: the mean over heads, and the largest."""
ENDS = 10
"""A change is that from the mean of the first tenth of samples to that of the last: a trend does not see a fall that
takes a short part of the run.
"""
LATEST = 8
"""So many samples are looked at first for the last numbers of a site; sites of evaluation may be in none of them."""


@dataclass(frozen=True)
class Course:
    """One site over the run, in columns of neighbouring samples; None where nothing is known."""

    site: SiteLabel
    normalized_entropy: tuple[float | None, ...]
    """Mean over heads and samples."""
    max_logit: tuple[float | None, ...]
    """Largest over heads and samples."""
    last_normalized_entropy: float | None = None
    """Of the last sample of the site alone: mean over heads."""
    last_max_logit: float | None = None

    def to_dict(self) -> dict[str, Any]:
        courses = {SHARPNESS: list(self.normalized_entropy), SIZE: list(self.max_logit)}
        last = {f"last_{SHARPNESS}": self.last_normalized_entropy, f"last_{SIZE}": self.last_max_logit}
        return {**asdict(self.site), **courses, **last}


@dataclass(frozen=True)
class ScalarCourse:
    """A number that the loop gave with each step, over the run."""

    name: str
    values: tuple[float | None, ...]
    """In columns of neighbouring steps: the mean of those that are finite; None where none is."""
    steps: int
    last: float | None
    """None where it is not finite."""
    last_step: int


@dataclass(frozen=True)
class Change:
    """A head and how a statistic of it changed."""

    site: SiteLabel
    head: int
    first: float
    """Mean over the first tenth of its samples."""
    last: float
    per_1000_steps: float
    """The trend, and the ends of its interval of 95%; NaN where they say nothing (``history.is_telling``)."""
    low: float
    high: float

    def to_dict(self) -> dict[str, Any]:
        numbers = {name: number(value) for name, value in vars(self).items() if name != "site"}
        return {**_site(self.site.key), **numbers}


@dataclass(frozen=True)
class Overview:
    """What ``attemper show`` shows."""

    name: str
    model: str
    tags: tuple[str, ...]
    notes: str
    live: bool
    samples: int
    first_step: int | None
    last_step: int | None
    last_time: float | None
    """Of the last sample: seconds since 1970, UTC."""
    segments: tuple[Segment, ...]
    coverage: Coverage
    lost: tuple[Lost, ...]
    remarks: tuple[str, ...]
    courses: tuple[Course, ...]
    scalars: tuple[ScalarCourse, ...]
    """The loss first."""
    statistic: str
    """Of ``changes``."""
    changes: tuple[Change, ...]
    """The heads that changed most, the largest change first."""
    alarms: tuple[Alarm, ...]
    not_judged: tuple[str, ...]
    """What alarms do not cover, and why."""
    fewest_keys: int = FEWEST_KEYS
    """Rows that see fewer keys are in the courses, and some alarms leave them out."""
    unmeasured: str | None = None
    """Why nothing was measured; None where anything was."""

    def to_dict(self) -> dict[str, Any]:
        """The document of ``attemper show --json``."""
        plain = {name: value for name, value in vars(self).items() if name not in ("courses", "changes", "alarms")}
        return {
            "schema": SCHEMA,
            **plain,
            "last_time": None if self.last_time is None else date_of(self.last_time),
            "segments": [asdict(one) | {"began": date_of(one.began)} for one in self.segments],
            "coverage": {
                "expected": [_site(key) for key in self.coverage.expected],
                "seen": [_site(key) for key in self.coverage.seen],
                "skipped": [asdict(one) for one in self.coverage.skipped],
            },
            "lost": [asdict(one) | {"time": date_of(one.time)} for one in self.lost],
            "sites": [one.to_dict() for one in self.courses],
            "scalars": [asdict(one) for one in self.scalars],
            "changes": [one.to_dict() for one in self.changes],
            "alarms": [asdict(alarm) for alarm in self.alarms],
        }


def overview(run: StoredRun, statistic: str = SHARPNESS, *, bars: int = 32, top: int = 10) -> Overview:
    """What a run is and what happened in it.

    Args:
        statistic: of the heads that changed most.
        bars: columns of a course, at most.
        top: how many heads are listed.
    """
    with run.ranks.snapshot():
        steps, about, judge = run.steps, run.about, run.judge
        found = run.history(statistic) if len(steps) else None
        untrained = untrained_note(judge.held_back, sum(label.heads for label in run.sites))
        return Overview(
            name=run.name,
            model=str(about.get("model") or ""),
            tags=run.tags,
            notes=run.notes,
            live=run.live,
            samples=len(steps),
            first_step=int(steps[0]) if len(steps) else None,
            last_step=int(steps[-1]) if len(steps) else None,
            last_time=run.ranks.last_time,
            segments=run.segments,
            coverage=run.coverage,
            lost=run.lost,
            remarks=run.remarks,
            courses=tuple(_course(run, label, bars) for label in run.sites),
            scalars=tuple(_scalars(run, bars)),
            statistic=found.statistic if found else statistic,
            changes=tuple(_changes(found, top)) if found else (),
            alarms=with_shared_advice(judge.alarms, judge.alarms),
            not_judged=tuple(note for note in (untrained, *judge.notes) if note),
            fewest_keys=judge.fewest_keys,
            unmeasured=why_unmeasured(run.ranks),
        )


def _scalars(run: StoredRun, most: int) -> Iterator[ScalarCourse]:
    found = run.ranks.scalars
    for name in sorted(found, key=lambda name: name != LOSS):
        series = found[name]
        if len(series.steps):
            last, step = number(float(series.values[-1])), int(series.steps[-1])
            means = _numbers(scalar_columns(series, most).mean)
            yield ScalarCourse(name, means, len(series.steps), last, step)


def _course(run: StoredRun, label: SiteLabel, bars: int) -> Course:
    sharpness, size = (
        history.Course.of(run, name, label.key, bars).over_heads if name in run.statistics else None
        for name in (SHARPNESS, SIZE)
    )
    return Course(
        label,
        _numbers(sharpness.mean[:, 0]) if sharpness else (),
        _numbers(size.largest[:, 0]) if size else (),
        _last(run, SHARPNESS, label, lambda values: mean(values.T)) if sharpness else None,
        _last(run, SIZE, label, lambda values: np.fmax.reduce(values, 1, initial=np.nan)) if size else None,
    )


def _last(run: StoredRun, name: str, label: SiteLabel, over_heads: Callable[[np.ndarray], np.ndarray]) -> float | None:
    """A statistic of a site in the last of the run's samples that has a number of it."""
    steps = run.steps
    for latest in (steps[-LATEST:], steps):
        values = over_heads(next(run.ranks.values(name, [label.key], latest)))
        if np.isfinite(values).any():
            return float(values[np.isfinite(values)][-1])
    return None


def _changes(found: History, top: int) -> Iterator[Change]:
    """The heads whose mean differs most between the first and the last tenth of samples."""
    slopes = trend(found.steps, found.values)
    _, ends = block_means(found.steps, found.values, ENDS)
    sizes = np.abs(ends[-1] - ends[0])
    known = SHOWN.get(found.statistic.removeprefix("judged_"))
    room = np.inf if known is None or known.low is None or known.high is None else known.high - known.low
    ranked = np.argsort(np.where(np.isfinite(sizes), -sizes, np.inf), axis=None, kind="stable")
    for place in ranked[:top]:
        site, head = np.unravel_index(place, sizes.shape)
        if sizes[site, head] > 0:
            own = Trend(*(float(part[site, head]) for part in (slopes.slope, slopes.low, slopes.high)))
            seen = found.steps[~np.isnan(found.values[:, site, head])]
            told = (own.slope, own.low, own.high) if is_telling(own, seen[-1] - seen[0], room) else (math.nan,) * 3
            number_of = found.sites[site].first_head + int(head)
            yield Change(found.sites[site], number_of, float(ends[0][site, head]), float(ends[-1][site, head]), *told)


def _numbers(values: np.ndarray) -> tuple[float | None, ...]:
    return tuple(map(number, values.tolist()))


def _site(key: SiteKey) -> dict[str, str]:
    return dict(zip(("name", "kind", "mode"), key, strict=True))
