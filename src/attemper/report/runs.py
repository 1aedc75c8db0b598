"""The page of several runs: their losses, and any statistic of layers or heads, over each other by step or tokens.

Courses are deflated JSON of at most 300 columns: fewer, and then no single heads, where these have no room.
"""

from __future__ import annotations

import base64
import json
import string
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

from attemper.errors import InputError
from attemper.readings.alarms import level_of
from attemper.readings.reading import Alarm, number
from attemper.readings.sample import SiteKey
from attemper.readings.stacks import over_heads
from attemper.report.document import quantity
from attemper.report.headline import LEVELS, Verdict, distinct_warnings, verdict
from attemper.report.history import BRIEF, MOST_COLUMNS, Course, loss_course
from attemper.report.page import ECHARTS, LARGEST_BYTES, page_of
from attemper.report.run_page import last_reading, with_alarms
from attemper.report.texts import Clauses, Message, Names, brief, encode, message, page_texts, place_of_alarm
from attemper.statistics import SHOWN, Reduction
from attemper.store.run import StoredRun
from attemper.text import clean, cut, round_digits
from attemper.text import number as shown

MOST_RUNS = 8
MOST_ALARMS = 100
"""Steps of a run that the page marks, at which warnings began."""
_SCRIPTS = ("document", "texts", "colour_scale", "charts", "runs", "theme")
_EXTENTS = tuple((many, heads) for heads in (True, False) for many in (MOST_COLUMNS, 150, 75)) + ((30, False),)
"""Columns of a course, and whether single heads are there: a page takes the first that it has room for."""
_CALM = "calm"
"""The level notice of a run that never had a warning."""
_FEW = 100
"""Moments by which steps become tokens."""


def runs_page(given: Sequence[StoredRun]) -> str:
    """The page of several runs, as far as they are written."""
    runs, notes = _different(given)
    names = tuple(name for name in BRIEF if any(name in run.statistics for run in runs))
    found = [_facts(run, letter, names) for run, letter in zip(runs, string.ascii_uppercase, strict=False)]
    keys = list(dict.fromkeys(label.key for run in runs for label in run.sites))
    notes += _notes(runs, keys)
    data = {
        "texts": page_texts(of="runs"),
        "statistics": [
            {"key": n, "title": encode(quantity(n).title), "unit": encode(quantity(n).unit), "over": _over(n)}
            for n in names
        ],
        "sites": [[cut(clean(key[0]), 80), key[2] if key[2] != "eval" else "", _heads(runs, key)] for key in keys],
        "runs": found,
    }
    past = [[alarm for alarm in run.judge.alarms if alarm.ended is not None] for run in runs]
    verdicts = [verdict(with_alarms(last_reading(run), run), own) for run, own in zip(runs, past, strict=True)]
    words = {
        "title": message("runs.title", n=len(runs)),
        **sentence_of(verdicts, found),
        "rows": [_row(*one, names) for one in zip(runs, found, strict=True)],
        "notes": notes,
        "columns": [(message("loss.title"), "", ""), *map(_column, names)],
        "library": ECHARTS.read_text("utf-8"),
    }
    about = "runs", ("page", "runs"), _SCRIPTS
    room = LARGEST_BYTES - len(page_of(*about, data, **words).encode()) - 100
    each = sum(label.heads for run in runs for label in run.sites) * len(names)
    read, packed, heads = cache(Course.of), "", False
    for many, heads in _EXTENTS:
        if heads and each * many > room:  # a number takes more than a byte
            continue
        packed = _pack([_courses(run, keys, names, many, heads, read) for run in runs])
        if len(packed) <= room:
            break
    return page_of(*about, data | {"packed": packed, "single": heads}, **words)


def _different(given: Sequence[StoredRun]) -> tuple[list[StoredRun], list[Message]]:
    """Each run once, of those that have a sample; and what is said of the others."""
    if len(given) > MOST_RUNS:
        raise InputError(f"a page has room for {MOST_RUNS} runs, got {len(given)}: name those that differ most.")
    runs: list[StoredRun] = []
    notes = []
    for run in given:
        name = cut(clean(run.name), 80)
        if run.path is not None and any(run.path == one.path for one in runs):
            notes.append(message("runs.twice", run=name))
        elif not len(run.steps):
            notes.append(message("runs.empty", run=name))
        else:
            runs.append(run)
    if len(runs) < 2:
        raise InputError(
            "a page of several runs needs two different ones with a sample: "
            + ("; ".join(map(str, notes)) or "name two runs")
            + "."
        )
    return runs, notes


def _notes(runs: Sequence[StoredRun], keys: Sequence[SiteKey]) -> list[Message]:
    """What the reader must know to compare these runs."""
    letters = string.ascii_uppercase
    models = [str(run.about.get("model") or "?") for run in runs]
    found = []
    if len(set(models)) > 1:
        said = [message("runs.of", run=a, model=cut(clean(m), 60)) for a, m in zip(letters, models, strict=False)]
        found.append(message("runs.models", models=Names(said)))
    if not any(all(key in {one.key for one in run.sites} for run in runs) for key in keys):
        found.append(message("runs.apart"))
    without = [
        message("as_is", said=a) for a, run in zip(letters, runs, strict=False) if "loss" not in run.ranks.scalars
    ]
    if without:
        found.append(message("runs.no_loss", runs=Names(without)))
    return found


def _facts(run: StoredRun, letter: str, names: Sequence[str]) -> dict[str, Any]:
    """What the scripts need of a run beside its courses."""
    alarms = [alarm for alarm in run.judge.alarms if level_of(alarm.severity) != "notice"]
    warnings, moments = distinct_warnings(alarms), max(run.ranks.moments, key=len)
    gaps = np.diff(moments["step"], append=moments["step"][-1])
    tokens = np.concatenate([[0], np.cumsum(moments["tokens"] * gaps)[:-1]])
    few = np.unique(np.linspace(0, len(moments) - 1, _FEW).round().astype(int))
    return {
        "letter": letter,
        "name": cut(clean(run.name), 80),
        "loss": loss_course(run),
        "tokens": [moments["step"][few].tolist(), tokens[few].tolist()],
        "lacking": [name for name in names if name not in run.statistics],
        "warnings": len(warnings),
        "ended": sum(one.ended is not None for one in warnings),
        "alarms": list(dict.fromkeys((one.since, level_of(one.severity)) for one in alarms))[:MOST_ALARMS],
        "began": [encode(one) for one in _began(alarms)],
    }


def _began(alarms: Sequence[Alarm]) -> Iterator[Message]:
    """Of each kind the first alarm, where it is, and how many more there are."""
    kinds: dict[str, list[Alarm]] = {}
    for alarm in alarms:
        kinds.setdefault(alarm.kind, []).append(alarm)
    for first, *others in kinds.values():
        told = message("head.alarm", place=place_of_alarm(first), said=brief(first)[0])
        more = message("runs.more", n=len(others)) if others else ""
        yield message("runs.began", step=first.since or 0, said=told, more=more)


def _heads(runs: Sequence[StoredRun], key: SiteKey) -> int:
    return max((one.heads + one.first_head for run in runs for one in run.sites if one.key == key), default=0)


def _courses(
    run: StoredRun,
    keys: Sequence[SiteKey],
    names: Sequence[str],
    most: int,
    heads: bool,
    read: Callable[[StoredRun, str, SiteKey], Course],
) -> dict[str, list[Any]]:
    """Statistic -> of each site its steps, the mean over its heads or the largest, and each head; or None."""
    labels = {label.key: label for label in run.sites}
    found: dict[str, list[Any]] = {name: [] for name in names if name in run.statistics}
    for name in found:
        for key in keys:
            if key not in labels:
                found[name].append(None)
                continue
            course = read(run, name, key).coarser(most)
            single = [_numbers(one) for one in course.farthest.T] if heads else []
            before = labels[key].first_head if heads else 0
            whole = getattr(course.over_heads, _over(name))[:, 0]
            found[name].append([course.steps.tolist(), _numbers(whole), [None] * before + single])
    return found


def _numbers(values: np.ndarray) -> list[float | int | None]:
    return [round_digits(number(value), 4) for value in values.tolist()]


def _pack(courses: Sequence[dict[str, list[Any]]]) -> str:
    text = json.dumps(courses, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode("ascii")


def _over(name: str) -> str:
    """How heads are put together: of what is a largest itself, the largest."""
    return "largest" if SHOWN[name].reduction is Reduction.LARGEST else "mean"


def _column(name: str) -> tuple[Message, Message, Message | str]:
    """A number of the table: its title, over what it is, and its unit."""
    return quantity(name).title, message(f"runs.over.{_over(name)}"), quantity(name).unit


def _cell(name: str, value: float | None) -> str:
    """A number as the figures of a run's page have it: shares to three places."""
    return shown(round(value, 3) if value is not None and SHOWN[name].percent else value)


def sentence_of(verdicts: Sequence[Verdict], found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Which runs are ill, measured nothing, or have nothing wrong, the worst first; and the sentence of each."""
    # A run that never had a warning has none "now" no more than before.
    calm = [one.level == "notice" and not facts.get("warnings") for one, facts in zip(verdicts, found, strict=True)]
    states = [_CALM if is_calm else one.level for one, is_calm in zip(verdicts, calm, strict=True)]
    parts, levels = [], [level for level in (*LEVELS[:-1], _CALM, LEVELS[-1]) if level in states]
    for level in levels:
        own = [facts for one, facts in zip(states, found, strict=True) if one == level]
        names = [message("runs.named", run=facts["letter"], name=cut(facts["name"], 24)) for facts in own]
        runs = message("runs.several", first=Names(names[:-1]), last=names[-1]) if len(names) > 1 else names[0]
        parts.append(message(f"runs.verdict.{level}", n=len(own), runs=runs))
    each = [message("runs.of", run=facts["letter"], model=one.said) for one, facts in zip(verdicts, found, strict=True)]
    return {
        "level": "notice" if levels[0] == _CALM else levels[0],
        "said": message("verdict.ill", found=Clauses(parts)),
        "each": each,
    }


def warnings_said(many: int, ended: int, step: int) -> Message:
    """How many warnings stand, how many have ended, and when the first began."""
    if not 0 < ended < many:
        return message("runs.warnings", n=many, step=step)
    return message("runs.warnings_ended", now=many - ended, ended=ended, step=step)


def _row(run: StoredRun, facts: dict[str, Any], names: Sequence[str]) -> tuple[Any, ...]:
    """A run in the table of the page: its letter and name, its tags and model, its state, samples and warnings; then
    the last loss, and each statistic over the heads of the last sample.
    """
    loss = facts["loss"]
    known = [value for value in loss["mean"] if value is not None] if loss else []
    alarms = facts["alarms"]
    model = str(run.about.get("model") or "")
    first, last = int(run.steps[0]), int(run.steps[-1])
    about = [cut(clean(one), 80) for one in (", ".join(run.tags), model) if one]
    state = message("runs.live" if run.live else "runs.steps", first=first, last=last)
    warnings = warnings_said(facts["warnings"], facts["ended"], alarms[0][0]) if alarms else "0"
    cells = [_cell(name, over_heads(run.reading.heads, name)) for name in names]
    loss_cell = shown(known[-1] if known else None)
    return facts["letter"], facts["name"], about, state, len(run), warnings, [loss_cell, *cells]
