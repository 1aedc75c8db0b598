"""Ways to do one thing, timed in turns in one process; and a training step, timed with and without a watch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn

from attemper.bench.hardware import Clock, Machine, kept_memory, machine, peak_flops
from attemper.monitor.watch import watch

Way = Callable[[], object]
Times = dict[str, list[float]]
"""Seconds of every way in every round."""
SECONDS = 20.0
"""About how long the rounds of one row may take."""
BATCH, TOKENS = 4, 512
"""Sequences of a training step."""
WATCHED_ROWS = 128
"""Query rows of each sequence that a sampled step measures."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What every row of a benchmark has. A ratio is the median over the rounds of one time divided by another."""

    machine: Machine
    pairs: int
    """Rounds that were timed."""
    ms: float
    """Median time of what the row is about."""
    ratios: dict[str, float]
    ratio_ranges: dict[str, tuple[float, float]]
    """Least and largest quotient of a round. The quotient of the two medians lies between them: a ratio that is far
    from it was measured on a machine that did something else meanwhile.
    """
    ratio_quartiles: dict[str, tuple[float, float]]
    """Between these lie half of the quotients."""

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and words."""
        return asdict(self)

    def heading(self) -> str:
        return str(self.machine)

    def by_round(self, name: str, digits: int = 2) -> str:
        """The range of a ratio, as the end of a sentence."""
        least, largest = self.ratio_ranges[name]
        return f"; {least:.{digits}f} to {largest:.{digits}f} by round"


@dataclass(frozen=True, kw_only=True)
class WatchRow(Row):
    """A training step (forward, backward, optimizer) of a Transformer of 2 layers, 4 heads, width 256.

    ``ms`` is a step without a watch. ``ratios`` are of a step of which ``WATCHED_ROWS`` rows are ``sampled``, and of a
    watched step ``between`` two that are sampled.
    """

    batch: int
    tokens: int

    def __str__(self) -> str:
        return (
            f"A training step of {self.batch} x {self.tokens} tokens, 2 layers of 4 heads, width 256, takes "
            f"{self.ms:.1f} ms (median of {self.pairs}).\n  Sampled by a watch, {WATCHED_ROWS} rows of each sequence: "
            f"{self.ratios['sampled']:.3f} times that{self.by_round('sampled', 3)}. Watched and not sampled: "
            f"{self.ratios['between']:.3f} times{self.by_round('between', 3)}."
        )


def rounds(
    ways: Mapping[str, Way],
    pairs: int,
    seconds: float = SECONDS,
    peaks: list[float] | None = None,
    clock: Clock = time.perf_counter,
) -> Times:
    """Times every way once a round, in an order in which each follows every other equally often: what one leaves in the
    caches helps or hinders the next. Memory that one frees stays for the next (``kept_memory``).

    Args:
        pairs: rounds; fewer where they would take longer than ``seconds``, as a first round that warms up says; never
            under 3.
        peaks: a list that receives the peak operations per second of each round; None not to measure them.
    """
    names, times = list(ways), {name: list[float]() for name in ways}
    with kept_memory():
        first = sum(_time(ways[name], clock) for name in names)
        for turn in range(max(3, min(pairs, int(seconds / max(first, 1e-9))))):
            for place in _order(turn, len(names)):
                times[names[place]].append(_time(ways[names[place]], clock))
            peak = None if peaks is None else peak_flops(torch.get_num_threads(), clock=clock)
            if peaks is not None and peak is not None:
                peaks.append(peak)
    return times


def _order(turn: int, ways: int) -> list[int]:
    """The order of a round: to and fro from a place that moves on by one (a square of Williams). Where the number of
    ways is odd, every second pass through its rounds runs backwards.
    """
    order = [(turn + (step + 1) // 2 * (1 if step % 2 else -1)) % ways for step in range(ways)]
    return order[::-1] if ways % 2 and turn // ways % 2 else order


def _time(way: Way, clock: Clock) -> float:
    start = clock()
    way()
    return clock() - start


def quotients(times: Sequence[float], others: Sequence[float]) -> list[float]:
    """One time divided by the other, round by round."""
    return [one / other for one, other in zip(times, others, strict=True)]


def row_fields(times: list[float], by_round: Mapping[str, list[float]]) -> dict[str, Any]:
    """The fields of a ``Row``, from the seconds of what it is about and the quotients of each comparison."""
    return {
        "machine": machine(),
        "pairs": len(times),
        "ms": 1e3 * median(times),
        "ratios": {name: median(found) for name, found in by_round.items()},
        "ratio_ranges": {name: (min(found), max(found)) for name, found in by_round.items()},
        "ratio_quartiles": {name: quartiles(found) for name, found in by_round.items()},
    }


def quartiles(found: list[float]) -> tuple[float, float]:
    """The first and the third quartile; of a single number, that number twice."""
    first, _, third = quantiles(found, n=4, method="inclusive") if len(found) > 1 else found * 3
    return first, third


def measure_watch(pairs: int = 15) -> WatchRow:
    """Times training steps of three copies of one model in turns: not watched, sampled, watched but not sampled."""
    with ExitStack() as watches:
        every = {"plain": 0, "sampled": 1, "between": 1 << 30}
        times = rounds({name: _training_step(steps, watches) for name, steps in every.items()}, pairs)
    by_round = {name: quotients(times[name], times["plain"]) for name in ("sampled", "between")}
    return WatchRow(batch=BATCH, tokens=TOKENS, **row_fields(times["plain"], by_round))


def _training_step(every: int, watches: ExitStack) -> Way:
    """A training step of a small Transformer, with a watch that samples one in ``every``; none for 0."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(BATCH, TOKENS, 256)
    watched = watches.enter_context(watch(model, every=every, rows=WATCHED_ROWS)) if every else None

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if watched is not None:
            watched.step()

    return step
