"""What is kept of an experiment's runs: a small file, from which its tables and its page are made; signs of trouble in
its curves, and differences paired by seed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, pstdev, stdev
from typing import Any, NamedTuple

from attemper.errors import InputError
from attemper.file_schema import parse_json
from attemper.files import replacement
from attemper.lab.trained.interventions import THRESHOLD

SCHEMA = 1
POINTS = 30
"""Of a curve that are kept, about."""


def summary(
    experiment: str,
    planned: int,
    documents: Sequence[Mapping[str, Any]],
    kept: Callable[[Mapping[str, Any]], dict[str, Any]],
) -> dict[str, Any]:
    """The content of a results file, from ``documents`` of :func:`attemper.lab.trained.runs.records`. ``planned``: runs
    that the whole experiment has; fewer documents are an unfinished one.
    """
    environments = {json.dumps(document["environment"], sort_keys=True) for document in documents}
    return {
        "schema": SCHEMA,
        "experiment": experiment,
        "planned": planned,
        "corpora": sorted({document["corpus"] for document in documents}),
        "environments": [json.loads(text) for text in sorted(environments)],
        "minutes": round(sum(document["seconds"] for document in documents) / 60, 1),
        "runs": [{"run": document["run"], "record": kept(document["record"])} for document in documents],
    }


def write_results(content: Mapping[str, Any], path: Path) -> Path:
    """Writes a results file: one line a run, so that a change is seen where it is."""
    runs = ",\n".join(json.dumps(run, allow_nan=False) for run in content["runs"])
    head = json.dumps({name: value for name, value in content.items() if name != "runs"}, indent=1, allow_nan=False)
    with replacement(path) as part:
        part.write_text(f'{head.rstrip()[:-1].rstrip()},\n "runs": [\n{runs}\n]}}\n', encoding="utf-8")
    return path


def read_summary(path: Path, experiment: str) -> dict[str, Any]:
    """A results file."""
    try:
        content = parse_json(path.read_bytes(), "its text")
    except (OSError, ValueError) as error:
        raise InputError(
            f"lab {experiment}: {str(path)!r} is not a results file: {error}. Name the results.json that the "
            "experiment wrote into its folder of runs."
        ) from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA or content.get("experiment") != experiment:
        raise InputError(
            f"lab {experiment}: {str(path)!r} holds no results of {experiment!r} in schema {SCHEMA}. Name the "
            "results.json that the experiment wrote into its folder of runs."
        )
    return content


def of_training(record: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a training run's record: its numbers, and its curves with fewer points."""
    return {
        **_numbers(record),
        "held_out_at_start": record["held_out_at_start"],
        "branches": {name: _numbers(branch) for name, branch in record["branches"].items()},
        "curve": thin_out(record["curve"]),
    }


def _numbers(record: Mapping[str, Any]) -> dict[str, Any]:
    curve = record["curve"]
    return {
        **{name: record[name] for name in ("held_out", "diverged_at", "signs")},
        "training": _mean(curve["losses"][-20:]),
        "largest_logit": _largest(curve["max_logits"]),
        "last_entropies": curve["entropies"][-1] if curve["entropies"] else [],
    }


def thin_out(curve: Mapping[str, Any]) -> dict[str, list[Any]]:
    """About 30 points: the mean loss and the largest gradient since the last, attention as it was measured."""
    steps = curve["measured"]
    chosen = list(range(0, len(steps), max(1, len(steps) // POINTS)))
    bounds = [steps[place] for place in chosen]
    parts = [(0 if place == 0 else bounds[place - 1] + 1, end + 1) for place, end in enumerate(bounds)]
    return {
        "steps": bounds,
        "losses": [_mean(curve["losses"][start:end]) for start, end in parts],
        "gradient_norms": [_largest(curve["gradient_norms"][start:end]) for start, end in parts],
        "max_logits": [curve["max_logits"][place] for place in chosen],
        "least_entropies": [_short(least(curve["entropies"][place])) for place in chosen],
    }


def _mean(values: Sequence[float | None]) -> float | None:
    return _short(fmean(values)) if values and None not in values else None  # type: ignore[arg-type]


def _largest(values: Sequence[float | None]) -> float | None:
    return _short(max(values)) if values and None not in values else None  # type: ignore[type-var]


def _short(value: float) -> float:
    return float(f"{value:.5g}")


COLLAPSED = 0.05
"""Normalised entropy of a layer below which its attention has collapsed."""
WINDOW = 50
"""Steps that a loss or a gradient is compared with: those before it."""
GRADIENT_FACTOR = 5.0
"""A gradient norm is a sign above so many medians of those before it."""
LOSS_DEVIATIONS = 5.0
"""A loss is a sign so many standard deviations above the mean of those before it."""

SIGNS = ("max logit", "entropy", "gradient norm", "loss")


def signs(curve: Mapping[str, Any]) -> dict[str, int | None]:
    """Sign -> the first step that gave it, None for never.

    ``max logit``: above 100. ``entropy``: the normalised entropy of a layer under 0.05. ``gradient norm``: above 5
    times the median of the 50 steps before. ``loss``: 5 standard deviations above the mean of the 50 steps before, or
    no number.
    """
    steps = curve["measured"]
    return {
        "max logit": _first(steps, [above(logit, THRESHOLD) for logit in curve["max_logits"]]),
        "entropy": _first(steps, [least(layers) < COLLAPSED for layers in curve["entropies"]]),
        "gradient norm": _first_over(curve["gradient_norms"], lambda before: GRADIENT_FACTOR * median(before)),
        "loss": _first_over(curve["losses"], lambda before: fmean(before) + LOSS_DEVIATIONS * pstdev(before)),
    }


def above(value: float | None, limit: float) -> bool:
    """A value that is no number is above every limit."""
    return value is None or not value <= limit


def least(layers: Sequence[float | None]) -> float:
    """The least of the numbers among ``layers``; inf without any."""
    return min((value for value in layers if value is not None and not math.isnan(value)), default=math.inf)


def _first(steps: Sequence[int], true: Sequence[bool]) -> int | None:
    return next((step for step, holds in zip(steps, true, strict=True) if holds), None)


def _first_over(values: Sequence[float | None], limit: Any) -> int | None:
    """The first value, with ``WINDOW`` before it, that is above what they say, or is no number."""
    for place, value in enumerate(values):
        before = values[max(0, place - WINDOW) : place]
        if value is None or not math.isfinite(value):
            return place
        if len(before) == WINDOW and value > limit(before):
            return place
    return None


QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Of Student's t at 97.5%, for 1 to 9 degrees of freedom. With more, the last: a little too wide, never too narrow."""


class Difference(NamedTuple):
    """A mean difference of pairs, and half of its 95% interval."""

    mean: float
    half: float
    """inf for one pair."""

    @property
    def told(self) -> bool:
        """Whether the interval leaves out 0."""
        return abs(self.mean) > self.half

    def __str__(self) -> str:
        return f"{self.mean:+.3f}" + (f" ± {self.half:.3f}" if math.isfinite(self.half) else "")


def paired_difference(values: Mapping[int, float], baseline: Mapping[int, float]) -> Difference | None:
    """``values`` less ``baseline``, each by seed, over the seeds of both; None without any.

    The interval is Student's, for differences that are normal.

    Example:
        >>> str(paired_difference({0: 2.0, 1: 2.2, 2: 2.1}, {0: 1.9, 1: 2.0, 2: 1.8}))
        '+0.200 ± 0.248'
    """
    found = [values[seed] - baseline[seed] for seed in values.keys() & baseline.keys()]
    if len(found) < 2:
        return Difference(found[0], math.inf) if found else None
    quantile = QUANTILES[min(len(found) - 1, len(QUANTILES)) - 1]
    return Difference(fmean(found), quantile * stdev(found) / math.sqrt(len(found)))
