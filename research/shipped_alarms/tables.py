"""Tables and charts of what the alarms that ship find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from attemper.lab.experiment import Axis, Cell, Chart, Experiment, Series, Table, headings
from attemper.readings.alarms import KINDS, SEVERITIES
from research.early_warning.faults import EVERY_KIND
from research.early_warning.judging import Share, clopper_pearson
from research.shipped_alarms.parts import ENCODER, GRID, LONG, NAME, UNSEEN, WATCHED

Row = Mapping[str, Any]

EVERY = "5"
"""The spacing of most tables."""
SAMPLES = 5
"""Sampled steps within which an abrupt rise of the rate should be told."""
ABRUPT = "jump"
HUNDRED_THOUSAND = 100_000
PARTS = {
    GRID: "the benchmark",
    ENCODER: "the pretrained encoder",
    UNSEEN: "runs that no limit was set on",
}
SOURCES = ("the loss", "masks", "heads")
"""What alarms look at."""


def experiment(content: Mapping[str, Any]) -> Experiment:
    """Tables and charts of a results file."""
    rows, severities = content["runs"], {kind: told[0] for kind, told in content["limits"].items()}
    warns = {kind for kind, severity in severities.items() if severity != SEVERITIES[0]}
    tables = (
        _together(rows, warns),
        _kinds(rows, severities, warns),
        _faults(rows, warns),
        _missed(rows, warns),
        _abrupt(rows, warns),
        _unseen(rows, warns),
        _unseen_healthy(content, warns),
        _rates(content, warns),
        _long(content, warns),
        _watched(rows, warns),
    )
    return Experiment(
        name=NAME,
        question="what do the alarms that ship find, by their defaults?",
        seed=0,
        tables=tuple(table for table in tables if table.rows),
        charts=(_chart(rows, warns),),
    )


def _of(rows: Iterable[Row], *parts: str) -> list[Row]:
    """Runs of these parts that are judged."""
    return [row for row in rows if row["part"] in parts and "alarms" in row]


def _healthy(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["fault"] is None]


def _faulty(rows: Iterable[Row], *, hurt: bool) -> list[Row]:
    return [row for row in rows if row["fault"] is not None and row.get("hurt") is hurt]


def _first(row: Row, kinds: Iterable[str], every: str = EVERY) -> int | None:
    """The step of the first alarm of these kinds."""
    return min((row["alarms"][every][kind] for kind in kinds if kind in row["alarms"].get(every, ())), default=None)


def _rung(rows: Sequence[Row], kinds: Iterable[str], every: str = EVERY) -> Share:
    return Share(sum(_first(row, kinds, every) is not None for row in rows), len(rows))


def _told(share: Share) -> str:
    return f"{share.hits} of {share.total}"


def _percent(share: Share) -> str | None:
    low, high = share.interval if share.total else (0.0, 0.0)
    return f"{100 * low:.0f} to {100 * high:.0f}%" if share.total else None


def _before_peak(rows: Sequence[Row], kinds: Iterable[str], every: str = EVERY) -> Share:
    """Of the faults that are found: told up to the step at which the loss is farthest above the twin's."""
    pairs = [(_first(row, kinds, every), row["peak"]) for row in rows]
    known = [(step, peak) for step, peak in pairs if step is not None and peak is not None]
    return Share(sum(step <= peak for step, peak in known), len(known))


def _together(rows: Sequence[Row], warns: set[str]) -> Table:
    found: list[tuple[Cell, ...]] = []
    grid = _of(rows, GRID)
    groups = {
        **{told: _of(rows, part) for part, told in PARTS.items()},
        "the benchmark, first half": [row for row in grid if row["half"]],
        "the benchmark, other half": [row for row in grid if not row["half"]],
    }
    for told, members in groups.items():
        for every in ("5", "10", "50"):
            hurt, healthy = _faulty(members, hurt=True), _healthy(members)
            asked = _rung(hurt, warns, every), _rung(healthy, warns, every)
            harmless = _rung(_faulty(members, hurt=False), warns, every)
            cells = (asked[0], _percent(asked[0]), _before_peak(hurt, warns, every), asked[1], _percent(asked[1]))
            if members:
                found.append(
                    (told, int(every), *(_told(one) if isinstance(one, Share) else one for one in cells),
                     _told(harmless))
                )  # fmt: skip
    return Table(
        title="all warnings together",
        see=(
            "Warnings and worse, by their defaults, as a stored run is judged: the loss at every step, heads and masks "
            "at sampled ones. Found: faults that hurt. Before the peak: no later than the step at which the loss is "
            "farthest above the healthy twin's. Intervals of 95% (Clopper and Pearson)."
        ),
        columns=headings(
            "runs", "every [steps]", "found", "in 95%", "before the peak", "healthy that warn", "in 95%",
            "without harm that warn",
        ),
        rows=tuple(found),
    )  # fmt: skip


def _kinds(rows: Sequence[Row], severities: Mapping[str, str], warns: set[str]) -> Table:
    members = _of(rows, GRID, ENCODER)
    hurt, healthy = _faulty(members, hurt=True), _healthy(members)
    found: list[tuple[Cell, ...]] = []
    silent = []
    for kind, severity in severities.items():
        rung = [_rung(group, [kind]) for group in (healthy, _faulty(members, hurt=False), hurt)]
        if not sum(share.hits for share in rung):
            silent += [] if kind in KINDS and KINDS[kind].needs_ranks else [kind]
            continue
        others = warns - {kind}
        alone = [
            sum(_first(row, [kind]) is not None and _first(row, others) is None for row in group)
            for group in (hurt, healthy)
        ]
        first = [(row["told"], _first(row, [kind])) for row in hurt]
        leads = [told - step for told, step in first if told is not None and step is not None]
        found.append(
            (kind, severity, *map(_told, rung), *(alone if kind in warns else (None, None)),
             _told(_before_peak(hurt, [kind])), median(leads) if leads else None)
        )  # fmt: skip
    return Table(
        title="each alarm by itself",
        see=(
            f"Of {len(healthy)} healthy runs and {len(hurt)} faults that hurt, the encoder's among them; a sample each "
            "5 steps. Alone: by no other warning. Lead: median steps until held-out loss, measured each 25 steps, "
            f"leaves the twin's. In no run at all: {', '.join(silent) or 'none'}."
        ),
        columns=headings(
            "alarm", "severity", "in healthy runs", "without harm", "found", "found alone", "false alone",
            "before the peak", "lead [steps]",
        ),
        rows=tuple(found),
    )  # fmt: skip


def _sources(warns: set[str]) -> dict[str, set[str]]:
    """Which warnings look at the loss, at masks, at heads."""
    kinds = {kind: KINDS[kind] for kind in warns if kind in KINDS}
    loss = {name for name, kind in kinds.items() if kind.of_loss}
    masks = {name for name, kind in kinds.items() if kind.statistic.endswith("_keys")}
    return dict(zip(SOURCES, (loss, masks, warns - loss - masks), strict=True))


def _faults(rows: Sequence[Row], warns: set[str]) -> Table:
    members, sources = _of(rows, GRID, ENCODER, UNSEEN), _sources(warns)
    found: list[tuple[Cell, ...]] = []
    for kind, told in EVERY_KIND.items():
        of = [row for row in members if row["fault"] and row["fault"]["kind"] == kind]
        hurt = _faulty(of, hurt=True)
        if not of:
            continue
        after = [step - row["fault"]["step"] for row in hurt if (step := _first(row, warns)) is not None]
        cells = (len(hurt), len(after), *(_rung(hurt, kinds).hits for kinds in sources.values()))
        harmless = _told(_rung(_faulty(of, hurt=False), warns))
        found.append((kind, told.says, *cells, median(after) if after else None, harmless))
    return Table(
        title="each kind of fault",
        see=(
            "Of all judged runs but watched ones; a sample each 5 steps. Found by any warning, and by those that look "
            "at the loss, at masks and at heads. After: median steps from the fault's first to the first warning."
        ),
        columns=headings(
            "kind", "fault", "hurt", "found", *(f"by {source}" for source in SOURCES), "after [steps]",
            "without harm that warn",
        ),
        rows=tuple(found),
    )  # fmt: skip


def _fault(row: Row) -> tuple[Cell, ...]:
    fault, excess = row["fault"], row.get("excess")
    return fault["kind"], _digits(fault["size"]), fault["step"], None if excess is None else _digits(excess)


def _digits(value: float) -> float:
    return float(f"{value:.3g}")


def _missed(rows: Sequence[Row], warns: set[str]) -> Table:
    hurt = _faulty(_of(rows, GRID, ENCODER, UNSEEN), hurt=True)
    missed = [row for row in hurt if _first(row, warns) is None]
    return Table(
        title="faults that hurt and raise no warning",
        see="A sample each 5 steps. Notices that begin after the fault may ring in healthy runs, too.",
        columns=headings("runs", "kind", "size", "step", "excess [nats]", "notices"),
        rows=tuple(
            (PARTS[row["part"]], *_fault(row), ", ".join(sorted(row["alarms"][EVERY])) or None)
            for row in sorted(missed, key=lambda row: (row["part"], row["fault"]["kind"], row["fault"]["size"]))
        ),
    )


def _abrupt(rows: Sequence[Row], warns: set[str]) -> Table:
    jumps = [row for row in _of(rows, GRID, ENCODER, UNSEEN) if row["fault"] and row["fault"]["kind"] == ABRUPT]
    groups = {
        "the benchmark and the encoder": [row for row in jumps if row["part"] != UNSEEN],
        PARTS[UNSEEN]: [row for row in jumps if row["part"] == UNSEEN],
    }
    found: list[tuple[Cell, ...]] = []
    for told, members in groups.items():
        hurt = _faulty(members, hurt=True)
        for source, kinds in {"any": warns, **_sources(warns)}.items():
            for every in ("5", "10"):
                steps = [(row["fault"]["step"], _first(row, kinds, every)) for row in hurt]
                # The samples from the first under the fault on: one at its step or behind is the first.
                waited = sorted(
                    step // int(every) - -(-since // int(every)) + 1 for since, step in steps if step is not None
                )
                within = sum(one <= SAMPLES for one in waited)
                if hurt and waited:
                    found.append(
                        (told, source, int(every), len(hurt), len(waited), within, median(waited), waited[-1],
                         _told(_before_peak(hurt, kinds, every)))
                    )  # fmt: skip
    return Table(
        title="abrupt rises of the learning rate that hurt: how soon they are told",
        see=(
            f"Sampled steps from the rise to the first warning; {SAMPLES} were the goal. A rise does nothing before "
            "its first step is done."
        ),
        columns=headings(
            "runs", "warnings of", "every [steps]", "faults", "found", f"within {SAMPLES}", "samples, median",
            "samples, most", "before the peak",
        ),
        rows=tuple(found),
    )  # fmt: skip


def _unseen(rows: Sequence[Row], warns: set[str]) -> Table:
    faulty = [row for row in _of(rows, UNSEEN) if row["fault"]]
    found = []
    for row in faulty:
        rung = {kind: step for kind, step in row["alarms"][EVERY].items() if kind in warns}
        first = min(rung.values(), default=None)
        told = [kind for kind, step in rung.items() if step == first]
        after = None if first is None else first - row["fault"]["step"]
        peak = None if row["peak"] is None else row["peak"] - row["fault"]["step"]
        cells = "yes" if row["hurt"] else "no", ", ".join(told) or None, after, peak
        found.append((row["optimizer"], *_fault(row), *cells))
    return Table(
        title="faults in the runs that no limit was set on",
        see="Peak: steps from the fault to where the loss is farthest above the twin's. A sample each 5 steps.",
        columns=headings(
            "optimizer", "kind", "size", "step", "excess [nats]", "hurt", "first warning", "after [steps]",
            "peak [steps]",
        ),
        rows=tuple(found),
    )  # fmt: skip


def _size(config: Mapping[str, Any]) -> str:
    return f"{config['layers']} x {config['width']}, {config['heads']} heads"


def _unseen_healthy(content: Mapping[str, Any], warns: set[str]) -> Table:
    healthy = _healthy(_of(content["runs"], UNSEEN))
    found = []
    for number, run in enumerate(content["configurations"].get(UNSEEN, ())):
        members = [row for row in healthy if row["configuration"] == number]
        kinds = sorted({kind for row in members for kind in row["alarms"][EVERY] if kind in warns})
        held_out = [row["held_out"] for row in members if row["held_out"] is not None]
        found.append(
            (run["optimizer"], run["schedule"], _size(run["config"]), run["config"]["context"], run["batch"],
             run["rate"], _told(_rung(members, warns)), ", ".join(kinds) or None,
             _digits(median(held_out)) if held_out else None)
        )  # fmt: skip
    return Table(
        title="healthy runs that no limit was set on",
        see="Those in which a warning rings, a sample each 5 steps.",
        columns=headings(
            "optimizer", "schedule", "layers x width", "context", "batch", "rate", "ring", "warnings",
            "held-out loss [nats]",
        ),
        rows=tuple(found),
    )  # fmt: skip


def _rate(hits: int, steps: int) -> tuple[Cell, ...]:
    """Steps, hits, and hits in 100,000 steps with their interval."""
    low, high = (HUNDRED_THOUSAND * bound for bound in clopper_pearson(hits, steps))
    return steps, hits, _digits(HUNDRED_THOUSAND * hits / steps), f"{low:.2g} to {high:.2g}"


def _rates(content: Mapping[str, Any], warns: set[str]) -> Table:
    rows = content["runs"]
    short = _healthy(_of(rows, GRID, ENCODER, UNSEEN))
    asked: list[tuple[str, int | str, Counter[str], int]] = []
    if short:
        # The encoder is trained for a quarter of the steps of the others.
        asked.append(("healthy runs of 600 steps", 5, _begun(short, "5"), sum(row["steps"] for row in short)))
    long = _healthy(_of(rows, LONG))
    for every in ("1", "5", "10"):
        if long:
            asked.append(("long healthy runs", int(every), _begun(long, every), sum(row["steps"] for row in long)))
    if content["resampled"]:
        begun: Counter[str] = sum((Counter(one["begun"]) for one in content["resampled"]), Counter())
        asked.append(("long runs, resampled", 1, begun, sum(one["steps"] for one in content["resampled"])))
    found: list[tuple[Cell, ...]] = []
    for told, every, begun, steps in asked:
        rang = [kind for kind in content["limits"] if kind in warns and begun[kind]]
        found.append((told, every, "all warnings", *_rate(sum(begun[kind] for kind in rang), steps)))
        found += [(told, every, kind, *_rate(begun[kind], steps)) for kind in rang]
    return Table(
        title="false alarms in 100,000 healthy steps",
        see=(
            "Times that an alarm of a kind begins, in whichever heads of a step; warnings that are not there began "
            "never. Resampled: 100,000 steps from each long run, of blocks of its own noise: no trend is in them, and "
            "where two blocks meet a value may leap."
        ),
        columns=headings("runs", "every [steps]", "alarm", "steps", "begun", "in 100,000", "in 95%"),
        rows=tuple(found),
    )


def _begun(rows: Sequence[Row], every: str) -> Counter[str]:
    return sum((Counter(row["begun"][every]) for row in rows), Counter())


def _long(content: Mapping[str, Any], warns: set[str]) -> Table:
    rows = _healthy(_of(content["runs"], LONG))
    found = []
    for row in rows:
        run = content["configurations"][LONG][row["configuration"]]
        begun = Counter({kind: many for kind, many in row["begun"]["1"].items() if kind in warns})
        told = ", ".join(f"{kind} {many}" for kind, many in begun.most_common())
        found.append((run["optimizer"], run["schedule"], run["rate"], row["steps"], sum(begun.values()), told or None))
    return Table(
        title="long healthy runs, sampled at every step",
        see="Warnings that begin in each.",
        columns=headings("optimizer", "schedule", "rate", "steps", "begun", "warnings"),
        rows=tuple(found),
    )


def _watched(rows: Sequence[Row], warns: set[str]) -> Table:
    members = _of(rows, WATCHED)
    groups = {
        "healthy": _healthy(members),
        "without harm": _faulty(members, hurt=False),
        "that hurt": _faulty(members, hurt=True),
    }
    found: list[tuple[Cell, ...]] = []
    for told, of in groups.items():
        if not of:
            continue
        same = sum(row["live"] == row["stored"] for row in of)
        again = sum(bool({kind for kind, *_ in row["stored"]}) == (_first(row, warns, "1") is not None) for row in of)
        every = [_rung(of, warns, spacing).hits for spacing in ("1", "5", "10")]
        before = sum(any(kind in warns for kind in row.get("before", ())) for row in of)
        found.append((told, len(of), same, again, *every, before))
    return Table(
        title="the benchmark's runs trained again under attemper.watch at every step",
        see=(
            "A sample drawn with a fixed seed. Live as stored: runs in which the warnings that came while it was "
            "trained are, with their steps, those of the stored run. From the file: runs in which a warning rings from "
            "their packed numbers, or in neither. Then runs in which a warning rings, by steps between samples; last, "
            "in the same runs of the benchmark, sampled each 5 steps."
        ),
        columns=headings(
            "runs", "trained", "live as stored", "from the file", "ring at 1", "at 5", "at 10", "benchmark at 5"
        ),
        rows=tuple(found),
    )


def _chart(rows: Sequence[Row], warns: set[str]) -> Chart:
    hurt = _faulty(_of(rows, GRID, ENCODER), hurt=True)
    places = tuple(float(step) for step in range(0, 151, 5))
    asked: dict[str, tuple[set[str], str]] = {f"all, every {every}": (warns, every) for every in ("5", "10", "50")}
    asked |= {f"{source}, every 5": (kinds, "5") for source, kinds in _sources(warns).items() if kinds}
    series = tuple(Series(name, places, _found_within(hurt, places, *one)) for name, one in asked.items())
    return Chart(
        "faults found: all warnings, and those of the loss, of masks and of heads",
        Axis("steps from the fault's first"),
        Axis("share of the faults that hurt", bounds=(0.0, 1.0)),
        series,
    )


def _found_within(
    rows: Sequence[Row], places: Sequence[float], kinds: set[str], every: str
) -> tuple[float | None, ...]:
    waited = [step - row["fault"]["step"] for row in rows if (step := _first(row, kinds, every)) is not None]
    return tuple(sum(one <= place for one in waited) / len(rows) if rows else None for place in places)
