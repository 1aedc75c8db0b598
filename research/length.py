"""A model read at eight times the length it was trained at: what a temperature by length saves, and a calibrated one.

The model has no positions: order is known from the causal mask only. What changes with length is how many keys share
the weight of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from attemper.lab.experiment import Axis, Cell, Chart, Experiment, Series, Table, headings
from attemper.lab.model import ByteConfig
from attemper.lab.trained.runs import records
from attemper.lab.trained.summary import summary
from attemper.lab.trained.training import Run
from research.lengthened import BUCKET, read_at_length, read_quickly

NAME = "length"
RESAMPLES = 2000
"""Of the bootstrap."""
PLAIN = "plain"

Rows = Sequence[Mapping[str, Any]]


def plan(steps: int = 800, seeds: int = 3, *, quick: bool = False) -> list[Run]:
    """A run a seed."""
    config = ByteConfig(width=64, context=128, positions="none")
    base = Run(rate=3e-3, steps=steps, every=100, config=config)
    if quick:
        config = ByteConfig(layers=1, heads=2, width=16, context=32, positions="none")
        base = Run(rate=3e-3, steps=10, batch=2, every=10, config=config)
    return [base.change(seed=seed) for seed in range(1 if quick else seeds)]


def results(planned: Sequence[Run], out: Path, *, quick: bool, **how: Any) -> dict[str, Any]:
    """The content of the results file, all of each record: it is small. ``how`` as in ``runs.records``."""
    job = read_quickly if quick else read_at_length
    return summary(NAME, len(planned), records(planned, out, job=job, **how), dict)


def experiment(content: Mapping[str, Any]) -> Experiment:
    """Tables and charts of a results file."""
    runs = content["runs"]
    return Experiment(
        name=NAME,
        question="read at eight times the length that it was trained at: what does a temperature save?",
        seed=0,
        tables=(_losses(content), _by_seed(runs), _temperatures(runs)),
        charts=(_place_chart(runs), _gain_chart(runs)),
    )


def interval(values: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """The 2.5th and 97.5th percentile of the mean of ``values`` over 2,000 bootstrap resamples."""
    data = torch.tensor(values, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(data), (RESAMPLES, len(data)), generator=generator)
    low, high = torch.quantile(data[drawn].mean(1), torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def _ways(runs: Rows) -> list[str]:
    return list(runs[0]["record"]["ways"])


def _losses_of(runs: Rows, way: str) -> list[float]:
    """The loss of each window, a mean over seeds: all seeds read the same windows."""
    return [fmean(each) for each in zip(*(row["record"]["ways"][way]["losses"] for row in runs), strict=True)]


def _gains(runs: Rows, way: str) -> list[float]:
    """What each window loses less than plain."""
    return [plain - loss for plain, loss in zip(_losses_of(runs, PLAIN), _losses_of(runs, way), strict=True)]


def _losses(content: Mapping[str, Any]) -> Table:
    runs = content["runs"]
    config = runs[0]["run"]["config"]
    read = len(runs[0]["record"]["ways"][PLAIN]["by_place"]) * min(BUCKET, config["context"] * 8)
    rows: list[tuple[Cell, ...]] = []
    for way in _ways(runs):
        gains = _gains(runs, way)
        low, high = interval(gains)
        entropy = fmean(row["record"]["ways"][way]["entropy_nats"] for row in runs)
        loss = fmean(_losses_of(runs, way))
        rows.append(
            (way, *map(_digits, (loss, *((None,) * 3 if way == PLAIN else (fmean(gains), low, high)), entropy)))
        )
    home = fmean(row["record"]["at_home"] for row in runs)
    missing = content["planned"] - len(runs)
    unfinished = f" {missing} of the {content['planned']} runs are still to be done." if missing else ""
    return Table(
        title=f"trained at {config['context']} bytes, read at {read}",
        see=_verdict(rows) + f" In windows of {config['context']} bytes its loss is {home:.3f} nats." + unfinished,
        columns=headings("way", "held-out loss [nats]", "less than plain [nats]", "from", "to", "mean entropy [nats]"),
        rows=tuple(rows),
    )


def _verdict(rows: Sequence[tuple[Cell, ...]]) -> str:
    ranked = sorted(rows, key=lambda row: float(row[1] or 0))
    helped = [row[0] for row in rows if isinstance(row[3], float) and row[3] > 0]
    harmed = [row[0] for row in rows if isinstance(row[4], float) and row[4] < 0]
    better, worse = (", ".join(map(str, names)) or "nothing" for names in (helped, harmed))
    return (
        f"Best first: {', '.join(f'{row[0]} {row[1]:.3f}' for row in ranked)}. Better than plain, by a 95% interval "
        f"that leaves 0 out: {better}; worse: {worse}. Means over seeds; intervals by bootstrap over windows."
    )


def _by_seed(runs: Rows) -> Table:
    ways = _ways(runs)
    rows = []
    for way in ways:
        losses = [fmean(row["record"]["ways"][way]["losses"]) for row in runs]
        least = min(interval(_gains([row], way))[0] for row in runs) if way != PLAIN else None
        rows.append((way, *map(_digits, losses), _digits(least)))
    return Table(
        title="each seed by itself: held-out loss",
        see="The last column is the least of the seeds' own lower bounds: above 0, every seed by itself tells.",
        columns=headings("way", *(f"seed {row['run']['seed']} [nats]" for row in runs), "least lower bound [nats]"),
        rows=tuple(rows),
    )


def _temperatures(runs: Rows) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for way in _ways(runs):
        for row in runs:
            found = row["record"]["ways"][way]["temperatures"]
            if found is not None and way != PLAIN:
                flat = [value for layer in found for value in layer]
                means = [fmean(layer) for layer in found]
                rows.append((way, row["run"]["seed"], *map(_digits, (min(flat), max(flat), *means))))
    layers = len(runs[0]["record"]["ways"][PLAIN]["temperatures"])
    return Table(
        title="temperatures that were found",
        see="Below 1 sharpens. A temperature by length is not among them: it differs from row to row.",
        columns=headings("way", "seed", "least", "largest", *(f"layer {layer}, mean" for layer in range(layers))),
        rows=tuple(rows),
    )


def _digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _place_chart(runs: Rows) -> Chart:
    series = []
    for way in _ways(runs):
        by_place = [fmean(each) for each in zip(*(row["record"]["ways"][way]["by_place"] for row in runs), strict=True)]
        places = tuple((place + 0.5) * BUCKET for place in range(len(by_place)))
        series.append(Series(way, places, tuple(by_place)))
    return Chart(
        "loss over the place in the window", Axis("place (bytes)"), Axis("loss (nats per byte)"), tuple(series)
    )


def _gain_chart(runs: Rows) -> Chart:
    series = []
    for way in _ways(runs):
        gains = _gains(runs, way)
        low, high = interval(gains)
        entropy = fmean(row["record"]["ways"][way]["entropy_nats"] for row in runs)
        series.append(Series(way, (entropy,), (fmean(gains),), errors=((high - low) / 2,), line=False))
    return Chart(
        "less loss than plain, with 95% intervals",
        Axis("mean entropy of attention (nats)"),
        Axis("nats per byte"),
        tuple(series),
    )
