"""How much the loss of a small model depends on its learning rate, plain and under what tempers its attention.

The protocol of Wortsman et al. 2023 (arXiv 2309.14322), "Small-scale proxies for large-scale Transformer training
instabilities": the same training at several learning rates, and how much is lost by a wrong one. Beside it: what is
saved, from the first alarm on, by a lower rate and by clipping.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from attemper.lab.experiment import Axis, Cell, Chart, Experiment, Series, Table, headings
from attemper.lab.model import ByteConfig
from attemper.lab.trained.interventions import BASELINE, BRANCHES, INTERVENTIONS, OURS, PLAIN, PROPOSED
from attemper.lab.trained.runs import records
from attemper.lab.trained.summary import SIGNS, Difference, of_training, paired_difference, summary
from attemper.lab.trained.training import Run

NAME = "lr-sensitivity"
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
QUICK = Run(steps=12, batch=2, every=4, config=ByteConfig(layers=2, heads=2, width=16, context=32))
COMPARED = RATES[1:]
COMPARISON = Run(every=50, config=ByteConfig(layers=2, width=64, context=64))
"""Half the depth of the others and a third of the steps: so many seeds that a few hundredths of a nat are told."""
SEEDS = 5
"""Of the comparison."""

Rows = Sequence[Mapping[str, Any]]


def plan(steps: int = 600, seeds: int = 2, *, quick: bool = False) -> list[Run]:
    """Every run: one seed of everything first, whose plain ones go on from their first alarm in other ways, too; then
    the comparison, what others do before what attemper does.
    """
    base = QUICK if quick else Run(steps=steps)
    main = [
        base.change(intervention=name, rate=rate, seed=seed, branch=name == PLAIN)
        for seed in range(1 if quick else seeds)
        for name in (PLAIN, BASELINE, *OURS)
        for rate in (RATES[1::2] if quick else RATES)
    ]
    return [*main, *_comparison(base, quick)]


def _comparison(base: Run, quick: bool) -> list[Run]:
    small = (
        base.change(config=replace(base.config, layers=1)) if quick else COMPARISON.change(steps=(base.steps + 2) // 3)
    )
    return [
        small.change(intervention=name, rate=rate, seed=seed)
        for names in ((PLAIN, BASELINE, *PROPOSED), OURS)
        for seed in range(1 if quick else SEEDS)
        for name in names
        for rate in (RATES[1::2] if quick else COMPARED)
    ]


def results(planned: Sequence[Run], out: Path, *, quick: bool, **how: Any) -> dict[str, Any]:
    """The content of the results file; ``how`` as in ``runs.records``."""
    content = summary(NAME, len(planned), records(planned, out, **how), of_training)
    for row in _parts(content["runs"])[1]:
        del row["record"]["curve"]  # no chart shows it
    return content


def _parts(runs: Rows) -> tuple[Rows, Rows]:
    """The runs over all rates, and those of the comparison, whose models have fewer layers."""
    layers = max((row["run"]["config"]["layers"] for row in runs), default=0)
    main = [row for row in runs if row["run"]["config"]["layers"] == layers]
    return main, [row for row in runs if row["run"]["config"]["layers"] < layers]


def experiment(content: Mapping[str, Any]) -> Experiment:
    """Tables and charts of a results file."""
    runs, compared = _parts(content["runs"])
    return Experiment(
        name=NAME,
        question="how much does the loss depend on the learning rate, and what holds attention at a rate too high?",
        seed=0,
        tables=(_losses(content), *_against_baseline(compared), _by_seed(runs), _branches(runs), _signs(runs)),
        charts=(_loss_chart(runs), *_curve_charts(runs)),
    )


def sensitivity(losses: Sequence[float | None], at_start: float) -> float:
    r"""What a wrong learning rate costs on average, in nats: 0 if every one gives the same loss.

    .. math:: \mathrm{E}_\eta [ \min(L(\eta), L_0) - \min_\eta L(\eta) ]

    Args:
        losses: at each learning rate; None for a run that diverged, which counts as ``at_start``.
        at_start: the loss before training.

    Source: Wortsman et al. 2023, section 2.2.
    """
    bounded = [at_start if loss is None else min(loss, at_start) for loss in losses]
    return fmean(bounded) - min(bounded)


def _names(runs: Rows) -> list[str]:
    return [name for name in INTERVENTIONS if any(row["run"]["intervention"] == name for row in runs)]


def _rates(runs: Rows) -> list[float]:
    return sorted({row["run"]["rate"] for row in runs})


def _seeds(runs: Rows) -> list[int]:
    return sorted({row["run"]["seed"] for row in runs})


def _of(runs: Rows, **wanted: Any) -> list[Mapping[str, Any]]:
    return [row for row in runs if all(row["run"][name] == value for name, value in wanted.items())]


def _final_loss(row: Mapping[str, Any]) -> float:
    """The held-out loss of a run; that before training for one that diverged or did worse."""
    start, end = row["record"]["held_out_at_start"], row["record"]["held_out"]
    return start if end is None else min(start, end)


def _mean_loss(runs: Rows, name: str, rate: float) -> float | None:
    found = [_final_loss(row) for row in _of(runs, intervention=name, rate=rate)]
    return fmean(found) if found else None


def sensitivities(runs: Rows, name: str) -> dict[int, float]:
    """Seed -> sensitivity, of the seeds that ran at every learning rate."""
    found = {}
    for seed in _seeds(runs):
        rows = _of(runs, intervention=name, seed=seed)
        if len(rows) == len(_rates(runs)):
            found[seed] = sensitivity(
                [row["record"]["held_out"] for row in rows], rows[0]["record"]["held_out_at_start"]
            )
    return found


def _losses(content: Mapping[str, Any]) -> Table:
    runs = _parts(content["runs"])[0]
    rates = _rates(runs)
    rows: list[tuple[Cell, ...]] = []
    for name in _names(runs):
        losses = [_mean_loss(runs, name, rate) for rate in rates]
        known = [loss for loss in losses if loss is not None]
        best = min(known) if len(known) == len(rates) else None
        found = sensitivities(runs, name)
        mean = fmean(found.values()) if found else None
        rows.append((name, *(_digits(loss) for loss in losses), _digits(best), _digits(mean)))
    missing = content["planned"] - len(content["runs"])
    unfinished = f" {missing} of the {content['planned']} runs are still to be done." if missing else ""
    return Table(
        title=f"held-out loss after {runs[0]['run']['steps']} steps, and its sensitivity to the learning rate",
        see=_verdict(runs) + unfinished,
        columns=headings(
            "intervention", *(f"at {rate:g} [nats]" for rate in rates), "best [nats]", "sensitivity [nats]"
        ),
        rows=tuple(rows),
    )


def _verdict(runs: Rows) -> str:
    """What beat the baseline: in sensitivity and best loss of what ran at every rate, and at the highest rate."""
    rates = _rates(runs)
    found = {name: list(sensitivities(runs, name).values()) for name in _names(runs)}
    if not found.get(BASELINE):
        return f"Means over seeds. {BASELINE}, the baseline, has not run at every rate yet: no comparison."
    steadiness = {name: fmean(each) for name, each in found.items() if each}
    at = {name: {rate: _mean_loss(runs, name, rate) for rate in rates} for name in found}
    best = {name: min(loss for loss in at[name].values() if loss is not None) for name in steadiness}
    last = {name: loss for name in found if (loss := at[name][rates[-1]]) is not None}
    return (
        f"Means over {_count(found[BASELINE])}. {BASELINE} is the baseline: sensitivity {steadiness[BASELINE]:.3f}, "
        f"best loss {best[BASELINE]:.3f}, {last[BASELINE]:.3f} at {rates[-1]:g}. Of ours, less sensitive: "
        f"{_beaten(steadiness)}; a lower best loss: {_beaten(best)}; a lower loss at {rates[-1]:g}: {_beaten(last)}."
    )


def _count(seeds: Sequence[float]) -> str:
    return f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''}"


def _beaten(values: Mapping[str, float]) -> str:
    """Those of ours whose value is below the baseline's."""
    better = [f"{name} ({values[name]:.3f})" for name in OURS if name in values and values[name] < values[BASELINE]]
    return ", ".join(better) or "nothing"


def _by_rate(runs: Rows, name: str) -> dict[str, dict[int, float]]:
    """Where it is compared -> seed -> final loss: at each rate, and the least and the mean of a seed's rates."""
    rates = _rates(runs)
    found = {rate: _of(runs, intervention=name, rate=rate) for rate in rates}
    at = {rate: {row["run"]["seed"]: _final_loss(row) for row in rows} for rate, rows in found.items()}
    whole = [seed for seed in _seeds(runs) if all(seed in losses for losses in at.values())]
    each = {seed: [losses[seed] for losses in at.values()] for seed in whole}
    return {
        **{f"at {rate:g}": losses for rate, losses in at.items()},
        "best rate": {seed: min(losses) for seed, losses in each.items()},
        "mean": {seed: fmean(losses) for seed, losses in each.items()},
    }


def _against_baseline(runs: Rows) -> tuple[Table, ...]:
    """The comparison; nothing before its first run."""
    if not runs:
        return ()
    baseline = _by_rate(runs, BASELINE)
    found = {
        name: {place: paired_difference(losses, baseline[place]) for place, losses in _by_rate(runs, name).items()}
        for name in _names(runs)
        if name != BASELINE
    }
    rows = [
        (name, len(_by_rate(runs, name)["mean"]), *(None if one is None else str(one) for one in places.values()))
        for name, places in found.items()
    ]
    told = [
        f"{which}: {', '.join(f'{name} ({places})' for name, places in _beyond(found, sign).items()) or 'nothing'}"
        for which, sign in (("Lower", -1), ("Higher", 1))
    ]
    size = runs[0]["run"]
    table = Table(
        title=f"against {BASELINE}, paired by seed",
        see=(
            f"{size['config']['layers']} layers, {size['steps']} steps. Held-out loss less that of {BASELINE} with the "
            "same seed, mean with 95% interval (Student). Best rate and mean: of each seed's rates. "
            f"{'; '.join(told)}. No other shows a clear difference. "
            "Of twenty such intervals, one leaves out 0 by chance."
        ),
        columns=headings("intervention", "seeds", *(f"{place} [nats]" for place in baseline)),
        rows=tuple(rows),
    )
    return (table,)


def _beyond(found: Mapping[str, Mapping[str, Difference | None]], sign: int) -> dict[str, str]:
    """Intervention -> where its difference of this sign is told apart; those without any left out."""
    places = {
        name: ", ".join(place for place, one in each.items() if one is not None and one.told and sign * one.mean > 0)
        for name, each in found.items()
    }
    return {name: text for name, text in places.items() if text}


def _by_seed(runs: Rows) -> Table:
    rows = []
    for name in _names(runs):
        for seed, value in sensitivities(runs, name).items():
            losses = {row["run"]["rate"]: _final_loss(row) for row in _of(runs, intervention=name, seed=seed)}
            best = min(losses, key=lambda rate: losses[rate])
            rows.append((name, seed, _digits(losses[best]), f"{best:g}", _digits(losses[max(losses)]), _digits(value)))
    return Table(
        title="each seed by itself",
        see="Ignore differences between interventions that are smaller than those between seeds of one.",
        columns=headings(
            "intervention",
            "seed",
            "best loss [nats]",
            "at rate",
            "loss at the highest rate [nats]",
            "sensitivity [nats]",
        ),
        rows=tuple(rows),
    )


def _branches(runs: Rows) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for row in runs:
        branches, record = row["record"]["branches"], row["record"]
        if branches:
            ends = [branches[name]["held_out"] for name in BRANCHES]
            start = record["signs"]["max logit"]
            rows.append((row["run"]["rate"], row["run"]["seed"], start, *map(_digits, (record["held_out"], *ends))))
    return Table(
        title="branch at the alarm: the same plain run, gone on in three ways from its first max logit over 100",
        see=_branch_note(rows),
        columns=headings(
            "learning rate", "seed", "alarm [step]", "unchanged [nats]", *(f"{name} [nats]" for name in BRANCHES)
        ),
        rows=tuple(rows),
    )


def _branch_note(rows: Sequence[tuple[Cell, ...]]) -> str:
    if not rows:
        return "No plain run raised the alarm."
    said = []
    for place, name in enumerate(BRANCHES, 4):
        pairs = [(row[3], row[place]) for row in rows]
        better = sum(isinstance(b, float) and (a is None or (isinstance(a, float) and b < a)) for a, b in pairs)
        gains = [a - b for a, b in pairs if isinstance(a, float) and isinstance(b, float)]
        said.append(f"{name} ended lower in {better} of {len(rows)}, by {fmean(gains):.3f} nats on average")
    return f"Than unchanged, {'; '.join(said)}. Held-out loss at the end of the same number of steps."


def _signs(runs: Rows) -> Table:
    rows = [
        (
            row["run"]["rate"],
            row["run"]["seed"],
            *(row["record"]["signs"][name] for name in SIGNS),
            _digits(row["record"]["held_out"]),
            _digits(row["record"]["largest_logit"]),
            _digits(min(row["record"]["last_entropies"], default=None)),
        )
        for row in _of(runs, intervention="plain")
    ]
    counts = [sum(row[2 + place] is not None for row in rows) for place in range(len(SIGNS))]
    both = [(row[2], row[3]) for row in rows if row[2] is not None and row[3] is not None]
    earlier = sum(logit < entropy for logit, entropy in both)
    counted = ", ".join(f"{name} gave a sign in {count}" for name, count in zip(SIGNS, counts, strict=True))
    return Table(
        title="what gave a sign, and at which step, in plain runs",
        see=(
            f"Of {len(rows)} runs, {counted}. Where max logit and entropy both did, max logit was earlier "
            f"in {earlier} of {len(both)}. Max logit: over 100; entropy: normalised entropy of a layer under "
            "0.05; gradient norm: 5 medians of the 50 steps before; loss: 5 standard deviations over "
            "their mean."
        ),
        columns=headings(
            "learning rate",
            "seed",
            *(f"{name} [step]" for name in SIGNS),
            "held-out loss [nats]",
            "largest logit",
            "least entropy at the end",
        ),
        rows=tuple(rows),
    )


def _digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _loss_chart(runs: Rows) -> Chart:
    series = []
    for name in _names(runs):
        points = [(rate, _mean_loss(runs, name, rate)) for rate in _rates(runs)]
        known = [(rate, loss) for rate, loss in points if loss is not None]
        series.append(Series(name, tuple(rate for rate, _ in known), tuple(loss for _, loss in known)))
    return Chart(
        "held-out loss over the learning rate",
        Axis("peak learning rate", "log"),
        Axis("loss (nats per byte)"),
        tuple(series),
    )


def _curve_charts(runs: Rows) -> tuple[Chart, ...]:
    rate = max(_rates(runs))
    first = _of(runs, rate=rate, seed=0)
    kinds = (
        ("max_logits", "largest logit", Axis("largest logit", "log")),
        ("least_entropies", "least entropy of a layer", Axis("normalised entropy", "log")),
        ("losses", "training loss", Axis("loss (nats per byte)")),
    )
    return tuple(
        Chart(
            f"{title} at learning rate {rate:g}, seed 0",
            Axis("step"),
            axis,
            tuple(
                Series(
                    row["run"]["intervention"],
                    tuple(map(float, row["record"]["curve"]["steps"])),
                    tuple(row["record"]["curve"][key]),
                )
                for name in _names(first)
                for row in _of(first, intervention=name)
            ),
        )
        for key, title, axis in kinds
    )
