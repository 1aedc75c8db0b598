"""Training in which attention collapses onto single keys, and the same training held by what tempers it.

The setting is the highest learning rate of ``research/lr_sensitivity.py``, in windows of twice the length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from attemper.lab.experiment import Axis, Cell, Chart, Experiment, Series, Table, headings
from attemper.lab.model import ByteConfig
from attemper.lab.trained.interventions import BASELINE, INTERVENTIONS, OURS, PROPOSED
from attemper.lab.trained.runs import records
from attemper.lab.trained.summary import COLLAPSED, of_training, paired_difference, summary
from attemper.lab.trained.training import Run

NAME = "collapse"
SETTING = Run(rate=3e-2, steps=300, config=ByteConfig(width=64, context=128))
QUICK = Run(rate=3e-2, steps=12, batch=2, every=4, config=ByteConfig(layers=2, heads=2, width=16, context=32))

Rows = Sequence[Mapping[str, Any]]


def plan(steps: int = SETTING.steps, seeds: int = 3, *, quick: bool = False) -> list[Run]:
    """Every run, one seed of everything first."""
    base = QUICK if quick else SETTING.change(steps=steps)
    return [
        base.change(intervention=name, seed=seed) for seed in range(1 if quick else seeds) for name in INTERVENTIONS
    ]


def results(planned: Sequence[Run], out: Path, *, quick: bool, **how: Any) -> dict[str, Any]:
    """The content of the results file; ``how`` as in ``runs.records``."""
    return summary(NAME, len(planned), records(planned, out, **how), of_training)


def experiment(content: Mapping[str, Any]) -> Experiment:
    runs = content["runs"]
    return Experiment(
        name=NAME,
        question="what holds attention in a training where it collapses?",
        seed=0,
        tables=(_side_by_side(content), _layers(runs), _by_seed(runs)),
        charts=_charts(runs),
    )


def _names(runs: Rows) -> list[str]:
    return [name for name in INTERVENTIONS if any(row["run"]["intervention"] == name for row in runs)]


def _losses(runs: Rows, name: str) -> dict[int, float]:
    """Seed -> held-out loss at the end."""
    return {row["run"]["seed"]: _loss(row["record"]) for row in runs if row["run"]["intervention"] == name}


def _records(runs: Rows, name: str) -> list[Mapping[str, Any]]:
    return [row["record"] for row in runs if row["run"]["intervention"] == name]


def _loss(record: Mapping[str, Any]) -> float:
    """Held-out loss at the end; that before training for a run that diverged."""
    return record["held_out_at_start"] if record["held_out"] is None else record["held_out"]


def _entropy(record: Mapping[str, Any]) -> float:
    """The least of the layers' normalised entropies at the end."""
    return min((value for value in record["last_entropies"] if value is not None), default=0.0)


def _largest(records: Rows) -> float | None:
    logits = [record["largest_logit"] for record in records]
    return None if None in logits else max(logits)


def _side_by_side(content: Mapping[str, Any]) -> Table:
    runs = content["runs"]
    rows: list[tuple[Cell, ...]] = []
    for name in _names(runs):
        records = _records(runs, name)
        losses = [_loss(record) for record in records]
        collapsed = sum(_entropy(record) < COLLAPSED for record in records)
        entropy = fmean(map(_entropy, records))
        numbers = (fmean(losses), min(losses), max(losses))
        against = None if name == BASELINE else paired_difference(_losses(runs, name), _losses(runs, BASELINE))
        ends = (_digits(entropy), f"{collapsed} of {len(records)}", _digits(_largest(records)))
        rows.append((name, *map(_digits, numbers), None if against is None else str(against), *ends))
    missing = content["planned"] - len(runs)
    unfinished = f" {missing} of the {content['planned']} runs are still to be done." if missing else ""
    run = runs[0]["run"]
    return Table(
        title=f"after {run['steps']} steps at learning rate {run['rate']:g}",
        see=_verdict(runs) + unfinished,
        columns=headings(
            "intervention",
            "held-out loss [nats]",
            "least of the seeds [nats]",
            "most [nats]",
            f"less {BASELINE} [nats]",
            "least entropy of a layer",
            "collapsed",
            "largest logit",
        ),
        rows=tuple(rows),
    )


def _verdict(runs: Rows) -> str:
    means = {name: fmean(map(_loss, _records(runs, name))) for name in _names(runs)}
    held = [name for name in means if all(_entropy(record) >= COLLAPSED for record in _records(runs, name))]
    ranked = ", ".join(f"{name} {means[name]:.3f}" for name in sorted(means, key=lambda name: means[name]))
    better = [
        ", ".join(name for name in names if name in means and means[name] < means.get(BASELINE, 0.0)) or "nothing"
        for names in (OURS, PROPOSED)
    ]
    return (
        f"Best first: {ranked}. No layer ended under {COLLAPSED:g} with: {', '.join(held) or 'none'}. Of ours, a lower "
        f"loss than {BASELINE}, the baseline: {better[0]}. Of what papers propose: {better[1]}. Less {BASELINE}: "
        "paired by seed, with 95% interval (Student). Entropy is normalised; logits are the largest of the run."
    )


def _layers(runs: Rows) -> Table:
    rows = []
    for name in _names(runs):
        ends = [record["last_entropies"] for record in _records(runs, name)]
        rows.append((name, *(_digits(fmean(values)) for values in zip(*ends, strict=True))))
    return Table(
        title="normalised entropy of each layer at the end, mean of the seeds",
        see=f"Under {COLLAPSED:g}, nearly all weight of a row lies on one key.",
        columns=headings("intervention", *(f"layer {layer}" for layer in range(len(rows[0]) - 1))),
        rows=tuple(rows),
    )


def _by_seed(runs: Rows) -> Table:
    rows = []
    for name in _names(runs):
        for row in runs:
            if row["run"]["intervention"] == name:
                record = row["record"]
                halves = _fall(record["curve"])
                numbers = (_loss(record), halves, _entropy(record))
                rows.append((name, row["run"]["seed"], *map(_digits, numbers), record["signs"]["entropy"]))
    return Table(
        title="each seed by itself",
        see="The fall is from the middle of the training to its end: near 0, the loss is stuck.",
        columns=headings(
            "intervention",
            "seed",
            "held-out loss [nats]",
            "fall in the second half [nats]",
            "least entropy of a layer",
            "entropy under 0.05 [step]",
        ),
        rows=tuple(rows),
    )


def _fall(curve: Mapping[str, Any]) -> float | None:
    """Training loss in the middle tenth less that in the last tenth."""
    losses = curve["losses"]
    tenth = max(1, len(losses) // 10)
    middle, end = losses[len(losses) // 2 : len(losses) // 2 + tenth], losses[-tenth:]
    return None if None in middle + end else fmean(middle) - fmean(end)


def _digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _charts(runs: Rows) -> tuple[Chart, ...]:
    kinds = (
        ("least_entropies", "least entropy of a layer", Axis("normalised entropy", "log")),
        ("losses", "training loss", Axis("loss (nats per byte)")),
        ("max_logits", "largest logit", Axis("largest logit", "log")),
    )
    first = [row for row in runs if row["run"]["seed"] == 0]
    return tuple(
        Chart(
            f"{title}, seed 0",
            Axis("step"),
            axis,
            tuple(
                Series(name, tuple(map(float, record["curve"]["steps"])), tuple(record["curve"][key]))
                for name in _names(first)
                for record in _records(first, name)
            ),
        )
        for key, title, axis in kinds
    )
