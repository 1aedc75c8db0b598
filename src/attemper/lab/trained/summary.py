"""What is kept of an experiment's runs: a small file, from which its tables and its page are made."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from attemper.documents import parse_json
from attemper.errors import InputError
from attemper.files import replacement
from attemper.lab.trained.signals import least

SCHEMA = 1
POINTS = 30
"""Of a curve that are kept, about."""


def summary(
    experiment: str,
    planned: int,
    documents: Sequence[Mapping[str, Any]],
    kept: Callable[[Mapping[str, Any]], dict[str, Any]],
) -> dict[str, Any]:
    """The content of a results file.

    Args:
        experiment: its name.
        planned: runs that the whole experiment has; fewer documents are an unfinished one.
        documents: of :func:`attemper.lab.trained.runs.records`.
        kept: what is kept of a record.
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
    """A results file.

    Raises:
        InputError: it is missing, no JSON, or of another experiment.
    """
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
