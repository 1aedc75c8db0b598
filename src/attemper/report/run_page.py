"""The page of a run: what a training did to every head, step by step; otherwise as the page of a scan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from markupsafe import Markup

from attemper.readings.alarms import with_shared_advice, worst_first
from attemper.readings.reading import Alarm, Reading
from attemper.report import texts
from attemper.report.document import by_name, document, file_name, quantities, site_of, towers
from attemper.report.headline import verdict
from attemper.report.history import Courses, loss_course, restarts
from attemper.report.key_figures import figures, first_heard, first_warning, groups, origin
from attemper.report.page import LARGEST_BYTES, render, size_facts
from attemper.report.texts import Clauses, Date, Message, message
from attemper.store.run import StoredRun
from attemper.text import clean, cut, date_of

MOST_ALARMS = 300
"""Alarms that a page holds: those that stand before those that have ended, and the worst first."""
FEW_PLACES = 20
"""Heads of a kind of alarm that a card lists: the rest of the room is for the history."""
_ROOM = 6_000
"""Bytes that the description of a history takes beside its numbers, at most."""


def run_page(run: StoredRun, last: Reading | None = None, *, look: Mapping[str, Any] | None = None) -> str:
    """The page of a run, as far as it is written. The same samples give the same page, to the byte.

    Args:
        last: the last sample with its histograms and curves, which no run keeps, where somebody still has it.
        look: how the run looks, where the page is served and follows it; see ``live``.
    """
    with run.ranks.snapshot():
        judge = run.judge
        reading = last_reading(run)
        details = last is not None and _is_last(last, reading)
        alarms = _alarms(judge.alarms)
        reading = with_alarms(last if last is not None and details else reading, run)
        given = {
            **_words(run, reading, judge.alarms, [*reading.notes, *judge.notes, *run.remarks]),
            "details": details,
            "look": look,
        }
        drawn = given["towers"]
        data = document(reading, drawn, details=details, alarms=alarms) | {
            "pictures": [],
            "loss": loss_course(run),
            "opens": None if look else _opening(reading, judge.alarms),
        }
        bare = render(reading, data | {"run": None}, **given)
        room = LARGEST_BYTES - len(bare.encode("utf-8")) - _ROOM
        data["run"] = Courses(run, reading, alarms).pack(room)
        return render(reading, data, **given)


def with_alarms(reading: Reading, run: StoredRun) -> Reading:
    """The last sample of a run, and the alarms that stand then: what the verdict on the run is of."""
    alarms, held_back = _whole_first(run.judge.standing), run.judge.held_back
    return replace(reading, alarms=alarms, untrained_heads=held_back, model=run.name)


def _opening(reading: Reading, alarms: Sequence[Alarm]) -> dict[str, int | None] | None:
    """The head and the step of the first warning, where the page opens; one that follows its run stays at the end."""
    first = first_heard(alarms)
    return first and {"site": site_of(first, by_name(reading.sites)), "head": first.head, "step": first.since}


def _words(run: StoredRun, reading: Reading, alarms: Sequence[Alarm], notes: Sequence[str]) -> dict[str, Any]:
    """What the template says beside the numbers of the last sample."""
    drawn = towers(reading.sites)
    past = [alarm for alarm in alarms if alarm.ended is not None]
    first = first_warning(reading, drawn, alarms)
    return {
        "run": True,
        "pictured": (),
        "title": clean(run.name),
        "facts": _facts(run, reading),
        "backend": "",
        "origin": _origin(run, reading),
        "files": {"csv": Markup()},
        "file_name": file_name(run.name),
        "verdict": verdict(reading, past),
        "figures": (*([first] if first else ()), *figures(reading, drawn, _when(run, reading))),
        "groups": groups(reading, drawn, with_shared_advice(reading.alarms, alarms), FEW_PLACES),
        "ended": groups(reading, drawn, with_shared_advice(past, alarms), FEW_PLACES),
        "notes": [texts.note(note) for note in dict.fromkeys(notes)],
        "towers": drawn,
        "quantities": quantities(reading),
    }


def _when(run: StoredRun, reading: Reading) -> Message:
    """The step of the numbers of a reading; sites of evaluation may have theirs of an earlier one."""
    last = {site.key for site in run.reading.sites}
    of_one = all(site.key in last for site in reading.sites)
    return message("figure.when", step=int(run.steps[-1])) if of_one else message("figure.when_last")


def _facts(run: StoredRun, reading: Reading) -> list[tuple[int | Date | None, Message]]:
    steps, went_on = run.steps, restarts(run)
    ends = {"first": int(steps[0]), "last": int(steps[-1])}
    found = [(len(steps), message("fact.samples", n=len(steps))), (None, message("fact.steps", **ends))]
    if went_on:
        listed = Clauses([message("as_is", said=step) for step in went_on[:5]])
        found.append((None, message("fact.resumed", n=len(went_on), steps=listed)))
    return [*size_facts(reading), *found, *([(None, message("fact.live"))] if run.live else [])]


def _origin(run: StoredRun, reading: Reading) -> tuple[tuple[Message, Any], ...]:
    told = {
        "model": str(run.about.get("model") or ""),
        "tags": ", ".join(run.tags),
        "notes": run.notes,
    }
    own: list[tuple[Message, Any]] = [
        (message(f"origin.{name}"), cut(clean(value), 160)) for name, value in told.items() if value
    ]
    time = run.ranks.last_time
    if time is not None:
        own.append((message("fact.ended"), message("as_is", said=Date(date_of(time)))))
    return (*own, *origin(replace(reading, date=None, text=None)))


def _alarms(alarms: Sequence[Alarm]) -> list[Alarm]:
    """Those that a page holds, the worst that stand first."""
    return sorted(alarms, key=lambda one: (one.ended is not None, worst_first(one), one.since or 0))[:MOST_ALARMS]


def _whole_first(alarms: Sequence[Alarm]) -> tuple[Alarm, ...]:
    """As they were, but a collapse of layers before what else is as bad: it is what happened."""
    return tuple(sorted(alarms, key=lambda alarm: (worst_first(alarm), alarm.head is not None)))


def last_reading(run: StoredRun) -> Reading:
    """The last sample, and of the sites that are not in it the last one that they are in: those of evaluation."""
    steps = run.steps
    found = run.reading
    missing = [label.key for label in run.sites if label.key not in {site.key for site in found.sites}]
    for key in missing:
        (rows,) = run.ranks.values(run.statistics[0], [key], steps)
        seen = np.flatnonzero(~np.isnan(rows).all(1)) if rows.size else np.zeros(0, int)
        if len(seen):
            sites = run.reading_at(int(steps[seen[-1]]), alarms=False)[0].sites
            found = replace(found, sites=(*found.sites, *(site for site in sites if site.key == key)))
    order = [label.key for label in run.sites]
    return replace(found, sites=tuple(sorted(found.sites, key=lambda site: order.index(site.key))))


def _is_last(one: Reading, stored: Reading) -> bool:
    """Whether a reading is of the last sample: the same sites with the same rows."""
    counts = [[(site.key, [head.rows for head in site.heads]) for site in reading.sites] for reading in (one, stored)]
    return counts[0] == counts[1]
