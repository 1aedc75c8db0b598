"""Softmax's alternatives in C++, against torch.softmax, our softmax attention and the entmax package.

    python benchmarks/normalizers.py [--quick] [--threads N] [--pairs N] [--seconds S] [--json FILE] [--only WORD]
                                     [--alphas A ...] [--cpu-time] [--no-package]

Weights of scores [8, 2048, 2048], then attention at 1, 8, 2048, 64, forward and forward + backward, and forward with
every statistic on both sides; for attention with random scores (standard deviation 1) and with sharp ones (8), where
entmax15 keeps less than 1% of the keys. Everything is checked first: weights against the entmax package in float64 or
a definition, attention and its entropies against dense float64. Then all ways run in turns in one process, and ratios
are medians of pairs. Below 1 is faster than what stands in the heading. ``softmax``: torch.softmax, or our attention
with softmax. ``package``: the entmax package (a development dependency; left out where it is not installed), for
attention on eager scores. --alphas adds rows of entmax. --cpu-time, on a machine that is busy with something else: one
thread, and the time that it was given. --no-package leaves the entmax package out: it takes from twenty to a hundred
times as long as all the rest.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from attemper.backends import native
from attemper.backends.contract import Problem, Upstream
from attemper.backends.native import rows as native_rows
from attemper.backends.reference import rowwise
from attemper.bench.hardware import machine
from attemper.bench.timing import quotients, rounds
from attemper.statistics import ONE_PASS, ROWWISE_BASE, ROWWISE_ONE_PASS, SOFTMAX_BASE, Column, state_columns

SCORES, QUICK_SCORES = (8, 2048, 2048), (8, 256, 1024)
ATTENTION, QUICK_ATTENTION = (1, 8, 2048, 64), (1, 8, 512, 64)
SHARP = 8.0
LARGEST_ERROR = 1e-6
"""Of a weight or an output against float64, beyond which nothing is timed."""
CHECKED_ROWS = 64
STATISTICS = state_columns(ROWWISE_ONE_PASS, rowwise=True)
"""State columns of every statistic of a normalizer that is not softmax."""

Way = Callable[[], object]
Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Candidate:
    """A normalizer: its name, k or the smallest weight, alpha or the bias, and its name in the entmax package."""

    normalizer: str
    number: float = 0.0
    given: float | None = None
    package: str | None = None

    def __str__(self) -> str:
        extra = self.given if self.given is not None else self.number
        return self.normalizer + (f" {extra:g}" if extra else "")


CANDIDATES = (
    Candidate("sparsemax", package="sparsemax"), Candidate("entmax15", package="entmax15"),
    Candidate("entmax", given=1.5, package="entmax_bisect"), Candidate("entmax", given=1.25, package="entmax_bisect"),
    Candidate("entmax", given=1.75, package="entmax_bisect"), Candidate("entmax", given=3.0, package="entmax_bisect"),
    Candidate("topk", 64.0), Candidate("threshold", 0.001), Candidate("sigmoid", given=-7.0),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """What one normalizer took. ``ratios``: ours divided by the other, medians of pairs."""

    what: str
    normalizer: str
    scores: str
    backward: bool
    support_share: float
    pairs: int
    ms: float
    other_ms: dict[str, float]
    ratios: dict[str, float]
    error: float


def package() -> object | None:
    """The entmax package, or None where it is not installed."""
    try:
        return importlib.import_module("entmax")
    except ImportError:
        return None


def their_function(one: Candidate) -> Function | None:
    """The package's function for it, as it is called on scores."""
    entmax = package()
    if entmax is None or one.package is None:
        return None
    function = getattr(entmax, one.package)
    if one.package != "entmax_bisect":
        return lambda scores: function(scores, dim=-1)
    return lambda scores: function(scores, alpha=one.given, dim=-1)


def wanted(scores: Tensor, one: Candidate) -> Tensor:
    """Weights of [rows, n] in float64 by the reference."""
    given = None if one.given is None else torch.tensor([one.given])
    dense = scores.double()[None, None]
    return rowwise.weights(dense, torch.ones_like(dense, dtype=torch.bool), one.normalizer, one.number, given)[0, 0]


def settled(scores: Tensor, one: Candidate) -> Tensor:
    """Rows whose support does not hang on the last digit of a float32 score."""
    scores = scores.double()
    if one.normalizer == "topk":
        top = scores.topk(int(one.number) + 1, -1).values
        return top[:, -2] - top[:, -1] > 1e-5
    if one.normalizer == "threshold":
        return ((scores.softmax(-1) / one.number - 1).abs() > 1e-4).all(-1)
    return torch.ones(len(scores), dtype=torch.bool)


def number_of(one: Candidate) -> float:
    return one.given if one.given is not None else one.number


def weight_ways(scores: Tensor, one: Candidate, theirs: Function | None, *, backward: bool) -> dict[str, Way]:
    """Ours and others on [rows, n]."""
    above, number = torch.randn_like(scores), number_of(one)

    def ours() -> object:
        weights = native_rows.weights(scores, one.normalizer, number)
        return native_rows.gradient(weights, above, one.normalizer, number) if backward else weights

    def by_autograd(function: Function) -> Way:
        leaf = scores.detach().requires_grad_(backward)
        if not backward:
            return lambda: function(leaf)
        return lambda: torch.autograd.grad(function(leaf), leaf, above)

    ways: dict[str, Way] = {"ours": ours, "softmax": by_autograd(lambda leaf: torch.softmax(leaf, -1))}
    if theirs:
        ways["package"] = by_autograd(theirs)
    return ways


def problem_of(tensors: tuple[Tensor, ...], one: Candidate | None, columns: tuple[Column, ...]) -> Problem:
    query, key, value = tensors
    multiplier = torch.full((1, 1, 1), query.shape[3] ** -0.5)
    if one is None:
        return Problem(query=query, key=key, value=value, mask=None, multiplier=multiplier, columns=columns)
    given = None if one.given is None else torch.full((query.shape[1],), one.given)
    return Problem(
        query=query, key=key, value=value, mask=None, multiplier=multiplier, per_head=given, columns=columns,
        normalizer=one.normalizer, number=one.number,
    )  # fmt: skip


def statistics_ways(tensors: tuple[Tensor, ...], one: Candidate) -> dict[str, Way]:
    """Ours and our softmax, each with the state of all its statistics."""
    ours, other = problem_of(tensors, one, STATISTICS), problem_of(tensors, None, state_columns(ONE_PASS))
    return {"ours": lambda: native.forward(ours), "softmax": lambda: native.forward(other)}


def attention_ways(
    tensors: tuple[Tensor, ...], one: Candidate, theirs: Function | None, *, backward: bool
) -> dict[str, Way]:
    """Ours, our softmax, and eager attention with the package's weights."""
    above = torch.randn_like(tensors[2])
    needs = (True, True, True, False, False, False, False)

    def by_kernel(problem: Problem) -> Way:
        def call() -> object:
            output, state, key_mass = native.forward(problem)
            if not backward:
                return output
            upstream = Upstream(above, torch.zeros_like(state), key_mass)
            return native.backward(problem, output, state, upstream, needs)

        return call

    ways = {
        "ours": by_kernel(problem_of(tensors, one, ROWWISE_BASE)),
        "softmax": by_kernel(problem_of(tensors, None, SOFTMAX_BASE)),
    }
    if theirs:
        leaves = [tensor.detach().requires_grad_(backward) for tensor in tensors]

        def eager() -> object:
            query, key, value = leaves
            output = theirs(query @ key.mT * query.shape[3] ** -0.5) @ value
            return torch.autograd.grad(output, leaves, above) if backward else output

        ways["package"] = eager
    return ways


def checked_weights(scores: Tensor, one: Candidate) -> tuple[float, float]:
    """Largest error of a weight, and the share of keys that have any. Stops where the error is too large."""
    picked = scores[:: max(1, len(scores) // CHECKED_ROWS)]
    picked = picked[settled(picked, one)]
    weights = native_rows.weights(picked, one.normalizer, number_of(one))
    want = wanted(picked, one)
    return _within(one, float((weights.double() - want).abs().max())), float((weights > 0).double().mean())


def exact_rows(tensors: tuple[Tensor, ...], one: Candidate) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Head by head: numbers of some rows that are ``settled``, and their weights in float64."""
    query, key, _ = tensors
    picked = torch.arange(0, query.shape[2], max(1, query.shape[2] // CHECKED_ROWS))
    for head in range(query.shape[1]):
        scores = query[0, head, picked].double() @ key[0, head].double().mT * query.shape[3] ** -0.5
        sure = settled(scores, one)
        yield head, picked[sure], wanted(scores[sure], one)


def allowed_of(one: Candidate) -> float:
    """Largest error of an output or an entropy. An error of a score of size 30, 2e-6, moves a weight by as much; above
    alpha = 2, where a weight near 0 is a root of its distance from the border, by the root of that.
    """
    return (2000 if one.given is not None and one.given > 2 else 50) * LARGEST_ERROR


def checked_attention(tensors: tuple[Tensor, ...], one: Candidate) -> tuple[float, float]:
    """``checked_weights`` of an output, relative to the largest (1 at least)."""
    value, columns = tensors[2], state_columns(("support_size",), rowwise=True)
    output, state, _ = native.forward(problem_of(tensors, one, columns))
    worst = 0.0
    for head, rows, weights in exact_rows(tensors, one):
        want = weights @ value[0, head].double()
        error = float((output[0, head, rows].double() - want).abs().max())
        worst = max(worst, error / max(1.0, float(want.abs().max())))
    share = float(state[columns.index(Column.SUPPORT)].mean()) / value.shape[2]
    return _within(one, worst, allowed_of(one)), share


def checked_statistics(tensors: tuple[Tensor, ...], one: Candidate) -> tuple[float, float]:
    """The same of an entropy, in nats."""
    state = native.forward(problem_of(tensors, one, STATISTICS))[1]
    entropy, worst = state[STATISTICS.index(Column.ENTROPY)], 0.0
    for head, rows, weights in exact_rows(tensors, one):
        shares = weights / weights.sum(-1, keepdim=True)
        error = entropy[0, head, rows].double() + torch.xlogy(shares, shares).sum(-1)
        worst = max(worst, float(error.abs().max()))
    share = float(state[STATISTICS.index(Column.SUPPORT)].mean()) / tensors[1].shape[2]
    return _within(one, worst, allowed_of(one)), share


def _within(one: Candidate, error: float, allowed: float = LARGEST_ERROR) -> float:
    if not error <= allowed:
        sys.exit(f"{one} is off by {error:.1e} where {allowed:.0e} is allowed: nothing is timed")
    return error


def timed(ways: Mapping[str, Way], options: argparse.Namespace) -> tuple[int, dict[str, float], dict[str, float]]:
    """Pairs, milliseconds of every way and ratios of ours to the others."""
    clock = time.thread_time if options.cpu_time else time.perf_counter
    times = rounds(ways, options.pairs, options.seconds, clock=clock)
    ratios = {name: median(quotients(times["ours"], found)) for name, found in times.items() if name != "ours"}
    return len(times["ours"]), {name: 1e3 * median(found) for name, found in times.items()}, ratios


def measured(options: argparse.Namespace) -> list[Row]:
    torch.manual_seed(0)
    shape = QUICK_SCORES if options.quick else SCORES
    scores = torch.randn(shape).flatten(0, 1)
    size = QUICK_ATTENTION if options.quick else ATTENTION
    rows: list[Row] = []

    def add(
        what: str, name: str, one: Candidate, backward: bool, check: tuple[float, float], ways: dict[str, Way]
    ) -> None:
        pairs, ms, ratios = timed(ways, options)
        own = ms.pop("ours")
        row = Row(what, str(one), name, backward, check[1], pairs, own, ms, ratios, check[0])
        rows.append(row)
        print(line(row), flush=True)

    def theirs(one: Candidate) -> Function | None:
        return their_function(one) if options.package else None

    def asked(what: str, one: Candidate) -> bool:
        return options.only in f"{what} {one}"

    candidates = (*CANDIDATES, *(Candidate("entmax", given=alpha) for alpha in options.alphas))
    for one in (one for one in candidates if asked("weights", one)):
        check = checked_weights(scores, one)
        for backward in (False, True):
            add("weights", "random", one, backward, check, weight_ways(scores, one, theirs(one), backward=backward))
    for name, spread in (("random", 1.0), ("sharp", SHARP)):
        query, key, value = (torch.randn(size) for _ in range(3))
        tensors = (query * spread, key, value)
        for one in (one for one in candidates if asked("statistics", one)):
            add("statistics", name, one, False, checked_statistics(tensors, one), statistics_ways(tensors, one))
        for one in (one for one in candidates if asked("attention", one)):
            check = checked_attention(tensors, one)
            for backward in (False, True):
                add(
                    "attention",
                    name,
                    one,
                    backward,
                    check,
                    attention_ways(tensors, one, theirs(one), backward=backward),
                )
    return rows


def line(row: Row) -> str:
    sides = "fwd + bwd" if row.backward else "fwd"
    others = "".join(f"{name:>9} {ratio:>6.2f} ({row.other_ms[name]:.0f} ms)" for name, ratio in row.ratios.items())
    return (
        f"{row.what:<11}{row.normalizer:<16}{row.scores:<8}{sides:<10}{row.support_share:>7.1%}{row.ms:>9.1f} ms"
        f"{row.pairs:>4}  {others}   error {row.error:.0e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=20.0, help="that one row may take")
    parser.add_argument("--only", default="", help="rows whose kind of measurement and normalizer contain this")
    parser.add_argument("--alphas", type=float, nargs="+", default=(), help="more alphas of entmax")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--no-package", dest="package", action="store_false")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1 if options.cpu_time else options.threads)
    here = machine()
    print(here)
    print("the entmax package is " + ("compared" if options.package and package() else "left out"))
    print(
        f"{'':<11}{'normalizer':<16}{'scores':<8}{'':<10}{'support':>7}{'ours':>12}{'pairs':>4}",
        "  ours / other (the other)",
    )
    rows = measured(options)
    if options.json:
        document = {"machine": asdict(here), "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(document, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
