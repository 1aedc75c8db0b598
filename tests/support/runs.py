"""Runs on disk, as processes write them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

from attemper.readings.sample import Sample
from attemper.store.fragment import Fragment
from attemper.store.writer import Writer
from tests.support.samples import sites


def written(folder: Path, taken: Iterable[Sample], *, rank: int = 0, **options: object) -> list[Sample]:
    """Writes samples as one process does; what it wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    fragment = Fragment(folder / f"fragment-{rank}.sqlite", rank=rank, **options)  # type: ignore[arg-type]
    kept = []
    for one in taken:
        fragment.append(one)
        fragment.fold()
        kept.append(one)
    fragment.close()
    return kept


def taken_by(writer: Writer, samples: Iterable[Sample]) -> Writer:
    """A writer that has taken these and is closed."""
    for one in samples:
        writer.take(one)
    writer.close()
    return writer


def change(path: Path, *statement: Any) -> None:
    """Changes a file of a run behind its back: SQL and its parameters."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(*statement)


def of_site(taken: Iterable[Sample], place: int) -> Iterator[Sample]:
    """What a rank has that holds one of the sites."""
    for one in taken:
        label = one.sites[place]
        yield Sample(one.step, one.time, (label,), one.quantities, one.values[:, one.places[label.key]])


_DRAWN: dict[int, tuple[Iterator[Sample], list[Sample]]] = {}
"""Seed -> what draws the samples of a restless run, and those that were drawn."""


def restless(samples: int, seed: int) -> Iterator[Sample]:
    """Two sites whose numbers stay, jump, climb and fall by turns, so that alarms of all kinds begin and end."""
    source, drawn = _DRAWN.setdefault(seed, (_restless(seed), []))
    drawn.extend(islice(source, max(0, samples - len(drawn))))
    return iter(drawn[:samples])


def _restless(seed: int) -> Iterator[Sample]:
    rng = np.random.default_rng(seed)
    levels = {
        "max_logit": (12.0, 30.0, 60.0, 90.0, 120.0, 400.0),
        "logit_std": (0.5, 1.0, 4.0, 8.0, 30.0),
        "judged_normalized_entropy": (0.004, 0.03, 0.1, 0.3, 0.5, 0.9, 0.9995, 0.9999),
        "judged_first_token_mass": (0.1, 0.5, 0.85, 0.95),
        "nonfinite_rows": (0.0, 0.0, 2.0, 5.0),
        "rank_difference": (0.0, 0.02, 0.2, 0.4),
    }
    names = (
        *levels,
        "leaked_keys",
        "surplus_keys",
        "visible_keys",
        "farthest_rank",
        "rows",
        "judged_rows",
        "empty_rows",
    )
    masks = np.random.default_rng((seed, 11))
    counted: dict[str, Any] = {name: np.zeros((2, 3)) for name in ("leaked_keys", "surplus_keys")}
    goal = {name: np.full((2, 3), levels[name][0]) for name in levels} | {
        "judged_normalized_entropy": np.full((2, 3), 0.5)
    }
    now = {name: values.copy() for name, values in goal.items()}
    for place in count():
        for name, known in levels.items():
            whole = rng.random(2) < 0.06  # all heads of a site go together
            some = whole[:, None] | (rng.random((2, 3)) < (0 if name == "rank_difference" else 0.03))
            some &= place > 40  # calm until entropies have settled
            drawn = rng.choice(known, (2, 3))
            drawn[whole] = drawn[whole][:, :1]
            goal[name] = np.where(some, drawn, goal[name])
            now[name] = np.where(some | (rng.random((2, 3)) < 0.1), goal[name], (now[name] + goal[name]) / 2)
        noise = 1 + 1e-3 * rng.normal(size=(2, 3)) * (rng.random((2, 3)) < 0.5)
        numbers: dict[str, Any] = {
            name: np.round(one) if name.endswith("rows") else one * noise for name, one in now.items()
        }
        numbers["judged_normalized_entropy"] = np.minimum(numbers["judged_normalized_entropy"], 1.0)
        numbers["rank_difference"] = np.repeat(numbers["rank_difference"][:, :1], 3, 1)
        numbers["judged_rows"] = np.where(rng.random((2, 3)) < 0.03, 4.0, 256.0)
        beside = {"farthest_rank": np.ones((2, 3)), "rows": np.full((2, 3), 512.0), "empty_rows": np.zeros((2, 3))}
        for name, others in ("leaked_keys", (0.0, 0.0, 8.0)), ("surplus_keys", (0.0, 0.0, 8.0, -20.0)):
            moves = (masks.random((2, 1)) < 0.05) & (place > 40)
            counted[name] = np.where(moves, masks.choice(others, (2, 1)), counted[name])
        beside |= counted | {"visible_keys": np.full((2, 3), 40.0)}
        values = np.array([(numbers | beside)[name].reshape(6) for name in names])
        values[:, rng.random(6) < 0.03] = np.nan
        yield Sample(6 * place, 0.0, sites(2, 3), names, values.astype(np.float32))


def with_gaps(taken: Iterable[Sample], seed: int) -> Iterator[Sample]:
    """The samples at other steps, without some sites, statistics and numbers, with few rows and infinite numbers."""
    rng, step = np.random.default_rng((seed, 7)), 0
    for one in taken:
        step += int(rng.choice([1, 2, 6, 30]))
        values = one.values.copy()
        values[:, rng.random(values.shape[1]) < 0.1] = np.nan
        values[rng.random(values.shape) < 0.02] = np.nan
        values[rng.random(values.shape) < 0.003] = np.inf
        few = rng.random(values.shape[1]) < 0.1
        values[one.quantities.index("judged_rows"), few] = rng.integers(0, 9)
        one = replace(one, step=step, values=values)
        if rng.random() < 0.1:
            label = one.sites[int(rng.integers(2))]
            one = Sample(step, 0.0, (label,), one.quantities, values[:, one.places[label.key]])
        if rng.random() < 0.05:
            one = replace(one, quantities=one.quantities[1:], values=one.values[1:])
        yield one


def in_turns(taken: Iterable[Sample]) -> Iterator[Sample]:
    """Evaluations between steps of training, and some steps with two passes."""
    for place, one in enumerate(taken):
        yield one
        if place % 5 == 0:
            yield replace(one, sites=tuple(replace(site, mode="eval") for site in one.sites))
        if place % 7 == 0:
            yield one


def collapsing(many: int, *, falls: int = 200) -> Iterator[Sample]:
    """Two layers of three heads; from step ``falls`` on the second one collapses in 20 steps. Of the first one, the
    logits of a head are large from step 100 to 150.
    """
    labels = sites(2, 3)
    names = ("normalized_entropy", "judged_normalized_entropy", "judged_first_token_mass", "max_logit", "logit_std")
    for step in range(many):
        noise = 1 + 0.01 * np.random.default_rng(step).standard_normal(6)
        entropy = 0.6 * noise
        entropy[3:] *= max(0.01, 1 - max(0, step - falls) / 20)
        logits = 12 * noise
        logits[0] = 120 if 100 <= step < 150 else logits[0]
        counts = np.full((2, 6), 512.0)
        rows = (entropy, entropy, 0.1 * noise, logits, noise, *counts, *np.zeros((2, 6)))
        quantities = (*names, "rows", "judged_rows", "empty_rows", "nonfinite_rows")
        yield Sample(step, 1000.0 + step, labels, quantities, np.array(rows, np.float32))
