"""The history of a run in few bytes: every head's course in at most 300 columns of 8 bits a number.

A column stands for neighbouring samples. What is kept of them is the sample farthest from the head's median, so that
a spike of one step stays visible; of layers, of heads with alarms and of one statistic also least, mean and largest.
Numbers are levels 0 to 254 between the least and the largest of their head (255: none), each the difference to the
level before, deflated together. Heads with alarms have float32 of what their alarms judge.

The page of two runs has courses of both side by side, as lines that need no script.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attemper.readings.alarms import KINDS, LOSS
from attemper.readings.history import mean
from attemper.readings.reading import Alarm, Reading, number
from attemper.readings.sample import SiteKey
from attemper.report.document import number_said, quantity
from attemper.report.texts import Message, message, place_said
from attemper.statistics import SHOWN
from attemper.store.ranks import columns
from attemper.store.run import StoredRun
from attemper.store.scalars import Columns, scalar_columns
from attemper.text import round_digits

Array = np.ndarray
MOST_COLUMNS = 300
LEVELS = 254
NONE = 255
MOST_EXACT = 48
"""Courses of heads with alarms that are kept as they are."""
BANDED = "normalized_entropy"
"""The one statistic of which every head has its band."""
MOST_PAIRS = 24
"""Heads whose histories are shown of a statistic: those that differ most."""
WIDE, TALL = 150, 48
"""Of a line, in its own units: a column each."""
BRIEF = tuple(name for name, shown in SHOWN.items() if shown.brief)


@dataclass(frozen=True)
class Extent:
    """How much of a history a page has room for."""

    columns: int
    statistics: tuple[str, ...]
    banded: bool = False
    """Whether every head has a band of ``BANDED``."""
    alarmed: int = MOST_EXACT
    """Courses of heads with alarms that are kept as they are, and have a band."""


class Course(Columns):
    """A statistic of a site over a run, [columns, heads] each."""

    @classmethod
    def of(cls, run: StoredRun, name: str, key: SiteKey, most: int = MOST_COLUMNS) -> Course:
        """In at most so many columns."""
        return cls(*columns(run.ranks, name, key, most))

    def coarser(self, most: int) -> Course:
        """In at most so many columns."""
        many = -(-len(self.steps) // most)
        if many == 1:
            return self
        pad = ((0, -len(self.steps) % many), (0, 0))
        least, middle, largest = (
            np.pad(part, pad, constant_values=np.nan).reshape(-1, many, part.shape[1])
            for part in (self.least, self.mean, self.largest)
        )
        means = np.stack([mean(block) for block in middle]).astype(np.float32)
        return Course(self.steps[::many], np.fmin.reduce(least, 1), means, np.fmax.reduce(largest, 1))

    @property
    def over_heads(self) -> Course:
        """[columns, 1]: the least number of all heads, the mean over heads, and the largest."""
        least = np.fmin.reduce(self.least, 1, keepdims=True, initial=np.nan)
        largest = np.fmax.reduce(self.largest, 1, keepdims=True, initial=np.nan)
        return Course(self.steps, least, mean(self.mean.T)[:, None], largest)

    @property
    def farthest(self) -> Array:
        """[columns, heads] of each column the number farthest from the head's median."""
        ranked = np.sort(self.mean, 0)  # NaN last
        known = np.maximum((~np.isnan(ranked)).sum(0), 1)
        median = np.take_along_axis(ranked, (known // 2)[None], 0)
        return np.where(np.abs(self.least - median) > np.abs(self.largest - median), self.least, self.largest)

    @property
    def ends(self) -> Array:
        """[heads, 2] the least and the largest number of each head; NaN where it has none."""
        return np.stack([np.fmin.reduce(self.least, 0), np.fmax.reduce(self.largest, 0)], 1).astype("<f4")


def extents(run: StoredRun) -> Iterator[Extent]:
    """From the whole to nothing but the sharpest statement: a page takes the first that it has room for."""
    known = tuple(name for name in SHOWN if name in run.statistics)
    brief, one = (tuple(name for name in names if name in known) for names in (BRIEF, BRIEF[:1]))
    yield Extent(MOST_COLUMNS, known, banded=True)
    for alarmed in (MOST_EXACT, 8, 1):
        yield Extent(MOST_COLUMNS, known, alarmed=alarmed)
    yield Extent(150, known)
    for names in (brief, one):
        for many in (MOST_COLUMNS, 150, 100, 75, 50):
            yield Extent(many, names)


class Courses:
    """What a page may draw of a run: read once, and packed in whatever extent there is room for."""

    def __init__(self, run: StoredRun, reading: Reading, alarms: Sequence[Alarm]) -> None:
        self._run, self._sites, self._alarms = run, reading.sites, alarms
        self._keys: list[SiteKey] = [site.key for site in reading.sites]
        self._heads = [len(site.heads) for site in reading.sites]
        self._read: dict[tuple[SiteKey, str], Course] = {}

    def pack(self, room: int) -> dict[str, Any]:
        """The largest extent that takes at most ``room`` bytes; without ``packed`` where none does."""
        steps = self._run.steps
        about = {
            "first": int(steps[0]),
            "last": int(steps[-1]),
            "samples": len(steps),
            "resumed": restarts(self._run),
            "packed": "",
        }
        heads = sum(self._heads)
        for extent in extents(self._run):
            if heads * extent.columns * len(extent.statistics) < 2 * room:  # less than half a byte is for constants
                found = self._pack_extent(extent)
                if len(found["packed"]) <= room:
                    return about | found
        return about | {"axes": [[int(steps[-1])]], "axis": [0] * len(self._keys), "statistics": []}

    def _pack_extent(self, extent: Extent) -> dict[str, Any]:
        courses = [[self._course(key, name, extent.columns) for name in extent.statistics] for key in self._keys]
        axes, axis = _axes([site[0].steps for site in courses])
        bands = self._bands_of(extent)
        exact = [
            (site, head, extent.statistics.index(name))
            for site, head, name in list(dict.fromkeys(self._alarm_courses()))[: extent.alarmed]
            if name in extent.statistics
        ]
        width = max(map(len, axes))
        data = b"".join(
            (
                *(_of_heads(course.ends, heads).tobytes() for site, heads in zip(courses, self._heads, strict=True)
                  for course in site),
                *(_wide(courses[s][q].farthest[:, h], width, np.nan).astype("<f4").tobytes() for s, h, q in exact),
                *(part for site, heads in zip(courses, self._heads, strict=True) for course in site
                  for part in _levels_of_site(course, heads, width)),
                *(part for s, h, q in bands for part in _band(courses[s][q], slice(h, h + 1), width)),
            )
        )  # fmt: skip
        return {
            "axes": [steps.tolist() for steps in axes],
            "axis": axis,
            "columns": width,
            "per_column": -(-len(self._run) // max(1, len(axes[0]))),
            "statistics": list(extent.statistics),
            "bands": bands,
            "exact": exact,
            "packed": _base64(data),
        }

    def _course(self, key: SiteKey, name: str, most: int) -> Course:
        if (key, name) not in self._read:
            steps, *parts = Course.of(self._run, name, key)
            self._read[key, name] = Course(steps, *(np.where(np.isfinite(part), part, np.nan) for part in parts))
        return self._read[key, name].coarser(most)

    def _alarm_courses(self) -> Iterator[tuple[int, int, str]]:
        """Site, place of the head and statistic of each alarm, the worst first."""
        for alarm in self._alarms:
            for place, site in enumerate(self._sites):
                if alarm.site == site.name and alarm.kind in KINDS and KINDS[alarm.kind].statistic in SHOWN:
                    for at, head in enumerate(site.heads):
                        if alarm.head == head.head:
                            yield place, at, KINDS[alarm.kind].statistic

    def _bands_of(self, extent: Extent) -> list[tuple[int, int, int]]:
        """Site, head and statistic of what has a band; nothing where a column is one sample."""
        if len(self._run) <= extent.columns:
            return []
        of = {name: place for place, name in enumerate(extent.statistics)}
        every = [
            (site, head, of[BANDED])
            for site, heads in enumerate(self._heads if extent.banded and BANDED in of else [])
            for head in range(heads)
        ]
        alarmed = [(site, head, of[name]) for site, head, name in self._alarm_courses() if name in of]
        return list(dict.fromkeys((*every, *alarmed[: extent.alarmed])))


def loss_course(run: StoredRun) -> dict[str, Any] | None:
    """The loss of every step in at most ``MOST_COLUMNS`` columns; None where the loop gave none."""
    series = run.ranks.scalars.get(LOSS)
    if series is None or not len(series.steps):
        return None
    steps, *parts = scalar_columns(series, MOST_COLUMNS)
    names = ("least", "mean", "largest")
    numbers = {
        name: [round_digits(number(one)) for one in part.tolist()] for name, part in zip(names, parts, strict=True)
    }
    return {
        "steps": steps.tolist(),
        "last": int(series.steps[-1]),
        "each": -(-len(series.steps) // MOST_COLUMNS),
        **numbers,
    }


def restarts(run: StoredRun) -> list[int]:
    """The steps at which the run went on in another process, or after going back."""
    first = [segment for segment in run.segments if segment.rank == min(one.rank for one in run.segments)]
    return sorted(one.first_step for one in first if one.samples and one.first_step is not None)[1:]


def _base64(data: bytes) -> str:
    """Deflated as differences are best: by how often each occurs, more than by what repeats."""
    deflate = zlib.compressobj(9, strategy=zlib.Z_FILTERED)
    return base64.b64encode(deflate.compress(data) + deflate.flush()).decode("ascii")


def _axes(steps: Iterable[Array]) -> tuple[list[Array], list[int]]:
    """The different first steps of columns, the longest first, and which of them each site has."""
    all_steps = list(steps)
    different = {found.tobytes(): found for found in sorted(all_steps, key=len, reverse=True)}
    order = list(different)
    return list(different.values()), [order.index(found.tobytes()) for found in all_steps]


def _levels_of_site(course: Course, heads: int, width: int) -> Iterator[bytes]:
    """Least, mean and largest over the heads of a site; then each head."""
    yield from _band(course.over_heads, slice(0, 1), width)
    farthest, ends = course.farthest, _of_heads(course.ends, heads)
    for head in range(heads):
        known = farthest[:, head] if head < farthest.shape[1] else np.full(len(farthest), np.nan)
        yield _levels(known, ends[head], width)


def _band(course: Course, heads: slice, width: int) -> Iterator[bytes]:
    ends = course.ends[heads][0]
    for part in (course.least, course.mean, course.largest):
        yield _levels(part[:, heads][:, 0], ends, width)


def _levels(values: Array, ends: Array, width: int) -> bytes:
    """[columns] as levels between both ends, each less the one before."""
    low, high = (float(end) for end in ends)
    known = ~np.isnan(values)
    share = (np.where(known, values, low) - low) / ((high - low) or 1.0)
    levels = np.where(known, np.round(np.nan_to_num(share).clip(0.0, 1.0) * LEVELS), NONE).astype(np.uint8)
    return np.diff(_wide(levels, width, NONE), prepend=np.uint8(0)).astype(np.uint8).tobytes()


def _wide(values: Array, width: int, nothing: float) -> Array:
    return np.concatenate([values, np.full(width - len(values), nothing, values.dtype)])


def _of_heads(ends: Array, heads: int) -> Array:
    """[heads, 2], also where some heads of a site were never stored."""
    found = np.full((heads, 2), np.nan, "<f4")
    found[: min(heads, len(ends))] = ends[:heads]
    return found


# --- two runs side by side ---


Pair = tuple[Message, Message, list[tuple[str, Message]]]
"""One head in both runs: its place, its change, and of each run the path of an SVG and its label."""


def courses_of(
    runs: tuple[StoredRun, StoredRun], heads: Sequence[Any], name: str
) -> tuple[Message, Message, list[Pair]]:
    """The heads that differ most in a statistic at the end of both runs, the largest difference first: after the title
    of the statistic, and what the lines are.
    """
    known = [head for head in heads if head.change(name)]
    most = sorted(known, key=lambda head: -head.size(name))[:MOST_PAIRS]
    found = [(head, [_course(run, head, name) for run in runs]) for head in most]
    values = [one for _, both in found for _, numbers in both for one in numbers[np.isfinite(numbers)].tolist()]
    display = quantity(name).display
    low = min(values, default=0.0) if display.low is None else display.low
    high = max(values, default=1.0) if display.high is None else display.high
    spans = [message("compared.steps", first=int(run.steps[0]), last=int(run.steps[-1])) for run in runs]
    pairs: list[Pair] = []
    for head, both in found:
        before, after = (number_said(name, value) for value in head.pairs[name])
        labels = message("compared.before", value=before), message("compared.after", value=after)
        lines = [(_line(*course, low, high), label) for course, label in zip(both, labels, strict=True)]
        change = message("compared.change", before=before, after=after)
        pairs.append((place_said(head.site, head.head, 80), change, lines))
    ends = {"low": number_said(name, float(low)), "high": number_said(name, float(high))}
    return quantity(name).title, message("compared.courses_help", before=spans[0], after=spans[1], **ends), pairs


def _course(run: StoredRun, head: Any, name: str) -> tuple[Array, Array]:
    """Steps, and the numbers of a head, of each column the one farthest from its median."""
    key = (head.site, head.kind, head.mode)
    course = Course.of(run, name, key, WIDE)
    (label,) = (label for label in run.sites if label.key == key)
    return course.steps, course.farthest[:, head.head - label.first_head]


def _line(steps: Array, numbers: Array, low: float, high: float) -> str:
    span, rise = max(1, int(steps[-1] - steps[0])), (high - low) or 1.0
    points = [
        f"{(step - steps[0]) / span * WIDE:.1f} {TALL - 2 - (min(max(value, low), high) - low) / rise * (TALL - 4):.1f}"
        for step, value in zip(steps.tolist(), numbers.tolist(), strict=True)
        if np.isfinite(value)
    ]
    return f"M{'L'.join(points)}" if points else ""
