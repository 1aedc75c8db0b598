"""Tables and charts of the benchmark's results."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from attemper.lab.experiment import Axis, Cell, Chart, Experiment, Series, Table, headings
from attemper.readings.alarms import KINDS as ALARMS
from research.early_warning.default_alarms import COUNTS, JUDGED
from research.early_warning.faults import KINDS
from research.early_warning.results import COMBINATION, NAME, share

CHARTS = {
    "loss, norms, weights, outputs": (
        "loss z-score", "gradient norm", "update norm", "increment entropy", "loss of rank",
    ),
    "scores": ("largest logit", "logit growth", "logit variance"),
    "weights of attention": ("entropy", "entropy fall", "entropy spread", "first-token mass", "disagreement"),
    "masks; a few together": ("visible keys", COMBINATION),
}  # fmt: skip
"""Title -> detectors of a chart."""


def experiment(content: Mapping[str, Any]) -> Experiment:
    """Tables and charts of a results file."""
    others, *attention, together = CHARTS.values()
    return Experiment(
        name=NAME,
        question="which alarm to believe?",
        seed=0,
        tables=(
            _runs(content),
            _detectors(content),
            _leads(content),
            _kinds(content, "found of each kind of fault, by what needs no attention weights", [*others, *together]),
            _kinds(content, "found of each kind of fault, by scores and weights of attention", sum(attention, ())),
            _left_out(content),
            _default_alarms(content),
            _encoder(content),
            _branches(content),
            _configurations(content),
        ),
        charts=tuple(_chart(content, title, names) for title, names in CHARTS.items()),
    )


def _of(pair: Sequence[int]) -> str:
    return f"{pair[0]} of {pair[1]}"


def _percent(pair: Sequence[int]) -> str:
    low, high = share(pair).interval
    return f"{100 * low:.0f} to {100 * high:.0f}%"


def _faulty(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Faults that are judged."""
    return [row for row in content["runs"] if "hurt" in row]


def _healthy(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [row for row in content["runs"] if "alarms" in row and row["fault"] is None]


def _runs(content: Mapping[str, Any]) -> Table:
    faulty = _faulty(content)
    rows: list[tuple[Cell, ...]] = []
    for kind, told in KINDS.items():
        found = [row for row in faulty if row["fault"]["kind"] == kind]
        hurt = [row for row in found if row["hurt"]]
        excesses = [row["excess"] for row in hurt if row["excess"] is not None]
        rows.append((kind, told.says, len(found), len(hurt), _digits(median(excesses)) if excesses else None))
    done, judged = len(content["runs"]), len(faulty) + len(_healthy(content))
    return Table(
        title="the runs",
        see=(
            f"{done} of {content['planned']} runs are done, {judged} are judged: {len(_healthy(content))} healthy ones "
            f"and {len(faulty)} with a fault, of which {sum(row['hurt'] for row in faulty)} hurt. A fault hurt if "
            "held-out loss ends above that of the healthy twin by more than the noise floor of its configuration."
        ),
        columns=headings("kind", "fault", "runs", "hurt", "median excess [nats]"),
        rows=tuple(rows),
    )


def _detectors(content: Mapping[str, Any]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for name, found in content["detectors"].items():
        at = [_of(found["recalls"][count]) if len(found["recalls"]) > count else None for count in (0, 1)]
        rows.append(
            (name, _of(found["found"]), _percent(found["found"]), _of(found["false"]), _percent(found["false"]), *at,
             _control(found["control"]))
        )  # fmt: skip
    members = ", ".join(content["detectors"][COMBINATION]["members"]) or "nothing"
    return Table(
        title="found and false alarms",
        see=(
            "Found: faults that hurt. False: healthy runs that warn. Limits are fitted on the other half of the "
            "configurations. At 0, at 1: found if no, or one, healthy run may warn, with limits from all runs. "
            "Control: found and false if a coin decides which twin is faulty: with nothing to find, both are alike. "
            f"Combined, in either half: {members}."
        ),
        columns=headings("detector", "found", "in 95%", "false", "in 95%", "found at 0", "at 1", "control"),
        rows=tuple(rows),
    )


def _control(pair: Sequence[int]) -> str | None:
    shares = [100 * pair[place] / pair[place + 1] for place in (0, 2) if pair[place + 1]]
    return " / ".join(f"{one:.0f}%" for one in shares) or None


def _leads(content: Mapping[str, Any]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    costs = content["costs"]
    sizes = costs["run"]["config"]
    for name, found in content["detectors"].items():
        signal, score = found["cost"]["signal"], found["cost"]["score"]
        share = f"{100 * (signal + score) / costs['step']:.2g}%"
        limit = None if found.get("limit") is None else _digits(found["limit"])
        leads = (*found["lead"], *found["held_out_lead"], *found["gradient_lead"])
        rows.append((name, *leads, signal, score, share, limit))
    return Table(
        title="lead and cost",
        see=(
            "Median steps from the warning until (a) the loss z-score warns, (b) held-out loss, measured each 25 "
            "steps, leaves the twin's by more than the floor, (c) the gradient norm warns; each over the number of "
            "faults beside it, which both find. Signal and score: microseconds of one core a step. Share: of a "
            f"training step of {costs['step']:g} microseconds (layers x width {_size(sizes)}, context "
            f"{sizes['context']}). Scores and weights are read each 5 steps, ranks and spectra each 10; measured "
            f"together, scores and weights took {_share(costs['together']['attention'])} of the training. Limit: the "
            "largest score of all healthy runs; below 0, low values warn."
        ),
        columns=headings(
            "detector",
            "lead (a) [steps]",
            "of",
            "lead (b) [steps]",
            "of",
            "lead (c) [steps]",
            "of",
            "signal [µs]",
            "score [µs]",
            "share",
            "limit",
        ),
        rows=tuple(rows),
    )


def _size(sizes: Mapping[str, Any]) -> str:
    """Layers and width, and the name of a pretrained model."""
    return f"{sizes['model'] + ' ' if 'model' in sizes else ''}{sizes['layers']} x {sizes['width']}"


def _share(value: float | None) -> str:
    return "no time" if value is None else f"{100 * value:.1f}%"


def _kinds(content: Mapping[str, Any], title: str, names: Sequence[str]) -> Table:
    hurt = Counter(row["fault"]["kind"] for row in _faulty(content) if row["hurt"])
    rows = [
        (kind, hurt[kind], *(content["detectors"][name]["by_kind"].get(kind, [0])[0] for name in names))
        for kind in KINDS
        if hurt[kind]
    ]
    return Table(
        title=title,
        see="Limits as in the table of all faults. Few runs a kind: no interval is narrow.",
        columns=headings("kind", "hurt", *names),
        rows=tuple(rows),
    )


def _left_out(content: Mapping[str, Any]) -> Table:
    rows = [
        (kind, _of(found["found"]), _percent(found["found"]), ", ".join(found["members"]))
        for kind, found in content["left_out"].items()
    ]
    together = [sum(found["found"][place] for found in content["left_out"].values()) for place in (0, 1)]
    return Table(
        title="the combination without one kind of fault, judged on that kind",
        see=(
            f"Together {_of(together)} ({_percent(together)}). Limits of single detectors follow from healthy runs "
            "alone: leaving a kind out changes nothing for them."
        ),
        columns=headings("kind", "found", "in 95%", "chosen in either half"),
        rows=tuple(rows),
    )


def _default_alarms(content: Mapping[str, Any]) -> Table:
    healthy, faulty = _healthy(content), _faulty(content)
    hurt, harmless = ([row for row in faulty if row["hurt"] == wanted] for wanted in (True, False))
    heard = [kind for kind, told in ALARMS.items() if told.severity != "notice"]
    asked = {kind: (told.severity, [kind]) for kind, told in ALARMS.items()} | {"any above notice": (None, heard)}
    rows: list[tuple[Cell, ...]] = []
    silent: list[str] = []
    for name, (severity, kinds) in asked.items():
        rung = [[row for row in runs if row["alarms"].keys() & set(kinds)] for runs in (healthy, harmless, hurt)]
        first = [(row, min(row["alarms"][kind] for kind in kinds if kind in row["alarms"])) for row in rung[-1]]
        leads = [row["told"] - step for row, step in first if row["told"] is not None]
        parts = [_of((len(some), len(runs))) for some, runs in zip(rung, (healthy, harmless, hurt), strict=True)]
        if any(rung):
            rows.append((name, severity, *parts, median(leads) if leads else None, len(leads)))
        elif name in ALARMS and ALARMS[name].quantity in (*JUDGED, *COUNTS):
            silent.append(name)
    loud = sum(bool(row["alarms"].keys() & set(heard)) for row in healthy)
    return Table(
        title="the alarms that ship, by their defaults",
        see=(
            f"{loud} of {len(healthy)} healthy runs raise an alarm above notice ({_percent((loud, len(healthy)))} of "
            "such runs). In faulty runs: alarms that begin after the fault; lead (b) as above. A sample each 5 steps. "
            f"In no run at all: {', '.join(silent) or 'none'}."
        ),
        columns=headings(
            "alarm", "severity", "in healthy runs", "in faults without harm", "in faults that hurt",
            "lead (b) [steps]", "of",
        ),
        rows=tuple(rows),
    )  # fmt: skip


def _encoder(content: Mapping[str, Any]) -> Table:
    found = content["encoder"]
    judged = [row for row in found["runs"] if "rings" in row]
    groups = [
        [row for row in judged if row["fault"] is None],
        [row for row in judged if row["fault"] is not None and not row["hurt"]],
        [row for row in judged if row["fault"] is not None and row["hurt"]],
    ]
    heard = {kind for kind, told in ALARMS.items() if told.severity != "notice"}
    asked = {name: {name} for name in content["detectors"] if name != COMBINATION} | {"any alarm above notice": heard}
    rung = [[{*row["rings"], *row["alarms"]} for row in group] for group in groups]
    rows = [
        (name, *(_of((sum(bool(names & rings) for rings in group), len(group))) for group in rung))
        for name, names in asked.items()
    ]
    hurt = ", ".join(row["fault"]["kind"] for row in groups[2]) or "none"
    loud = sorted({kind for row in groups[0] for kind in row["alarms"] if kind in heard})
    return Table(
        title="the same limits on a pretrained encoder",
        see=(
            f"{found['done']} of {found['planned']} runs of all-MiniLM-L6-v2, which learns to tell from which of eight "
            "packages a piece of source is, by limits at which no healthy run of the small models rings, and by "
            f"default alarms. Faults that hurt: {hurt}. Alarms above notice in healthy runs: "
            f"{', '.join(loud) or 'none'}."
        ),
        columns=headings("detector", "in healthy runs", "in faults without harm", "in faults that hurt"),
        rows=tuple(rows),
    )


def _branches(content: Mapping[str, Any]) -> Table:
    groups: dict[tuple[str, bool], list[Mapping[str, Any]]] = {}
    for one in content["branches"]:
        groups.setdefault((one["remedy"], _excess(one) > _floor(one)), []).append(one)
    rows: list[tuple[Cell, ...]] = []
    for (remedy, hurt), chosen in sorted(groups.items(), key=lambda group: (not group[0][1], group[0][0])):
        pairs = [(_gain(one), _floor(one)) for one in chosen]
        known = [gain for gain, _ in pairs if math.isfinite(gain)]
        lower, far_lower = sum(gain > 0 for gain, _ in pairs), sum(gain > floor for gain, floor in pairs)
        far_higher = sum(-gain > floor for gain, floor in pairs)
        told = "hurt" if hurt else "without harm"
        rows.append((remedy, told, len(pairs), lower, far_lower, far_higher, _digits(median(known)) if known else None))
    branched = {(json.dumps(one["fault"]), one["twin"]) for one in content["branches"]}
    return Table(
        title="branch at the alarm: the same faulty runs, gone on otherwise from their first warning",
        see=(
            f"{len(content['branches'])} branches of {len(branched)} faulty runs, which were drawn by seed among the "
            "small ones with a default alarm above notice. A remedy starts one step after that alarm; a lasting fault "
            "goes on under it. Hurt: unchanged, the run ends above its twin by more than the noise floor. Far: by more "
            "than that floor. Roll-back: to weights and moments of 50 steps before."
        ),
        columns=headings(
            "remedy", "fault", "runs", "ended lower than unchanged", "far lower", "far higher", "median gain [nats]"
        ),
        rows=tuple(rows),
    )


def _floor(branch: Mapping[str, Any]) -> float:
    """The noise floor of its configuration; infinite where none is known."""
    return math.inf if branch["floor"] is None else branch["floor"]


def _excess(branch: Mapping[str, Any]) -> float:
    """By how much the run ended above its twin without the remedy."""
    return _loss(branch["unchanged"]) - _loss(branch["twin"])


def _gain(branch: Mapping[str, Any]) -> float:
    """By how much a remedy ended lower than the run unchanged: 0 if both broke, infinite if one did."""
    unchanged, remedied = _loss(branch["unchanged"]), _loss(branch["remedied"])
    return 0.0 if unchanged == remedied else unchanged - remedied


def _loss(value: float | None) -> float:
    """Of a run that broke: inf."""
    return math.inf if value is None else value


def _configurations(content: Mapping[str, Any]) -> Table:
    rows = []
    for told in content["configurations"]:
        run, sizes = told["run"], told["run"]["config"]
        rows.append(
            (_size(sizes), sizes["context"], "yes" if sizes["qk_norm"] else "no",
             run["rate"], f"{100 * run['warmup']:.0f}%", told["healthy"], told["held_out"], told["floor"])
        )  # fmt: skip
    return Table(
        title="configurations and their noise floors",
        see=(
            "Floor: 3 standard deviations of the difference of two healthy runs that differ in their seed. Without "
            "five healthy runs a configuration is not judged."
        ),
        columns=headings(
            "layers x width", "context", "QK-norm", "rate", "warm-up", "healthy runs", "held-out loss [nats]",
            "noise floor [nats]",
        ),
        rows=tuple(rows),
    )  # fmt: skip


def _digits(value: float) -> float:
    return float(f"{value:.3g}")


def _chart(content: Mapping[str, Any], title: str, names: Sequence[str]) -> Chart:
    series = []
    for name in names:
        recalls = content["detectors"][name]["recalls"]
        shares = tuple(hits / total if total else None for hits, total in recalls)
        series.append(Series(name, tuple(map(float, range(len(recalls)))), shares))
    return Chart(
        f"faults found: {title}",
        Axis(f"false alarms in {len(_healthy(content))} healthy runs"),
        Axis("share of the faults that hurt", bounds=(0.0, 1.0)),  # alike in all charts
        tuple(series),
    )
