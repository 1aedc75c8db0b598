r"""What attention costs over length: operations and bytes counted, time and memory measured beside them.

One head, n queries and keys of size d. Scores :math:`q k^T` and the mixture :math:`p v` take :math:`n^2 d`
multiply-adds each, the softmax some operations a score. What differs is where the :math:`n \times n` scores live: eager
code writes them to memory and reads them again, blocked code works on a tile of them at a time.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from attemper.bench.hardware import peak_bytes, printed_apart
from attemper.functional import attention
from attemper.lab.experiment import Axis, Cell, Chart, Experiment, Series, Table, headings

LENGTHS = (128, 256, 512, 1024, 2048)
SIZE = 64
"""Of a head."""
HEADS = 4
"""Measured at once."""
BYTES = 4
"""Of a number: float32, in which attention is mostly computed on a CPU."""
TOLD = (512, 64)
"""Tokens and head size of the usual example."""
ROWS = 256
"""Queries that share one reading of keys and values in the blocked backend."""
TILE, TILES_HELD = 1 << 19, 5
"""Scores that the blocked backend works on at once, all heads together, and how many such tensors it holds."""
PER_SCORE = ("scale", "maximum", "subtract", "exp", "sum", "divide")
"""What a stable softmax of scaled scores does with each score."""
REPEATS = {512: 8, 1024: 4}
"""Runs up to a length, of which the shortest counts; two beyond: the whole shall end within seconds."""


@dataclass(frozen=True)
class Operations:
    """Of one head's forward pass; a multiply-add is two."""

    scores: int
    softmax: int
    mixture: int

    @property
    def total(self) -> int:
        return self.scores + self.softmax + self.mixture


def complexity(*, seed: int = 0) -> Experiment:
    """Counted operations and bytes beside measured time and peak memory, for eager, blocked and PyTorch's own code."""
    times = {n: best_ms(n, seed) for n in LENGTHS}
    errors = {way: largest_error(run, seed) for way, run in WAYS.items()}
    peaks = peak_mib()
    return Experiment(
        name="complexity",
        question="what does attention cost as the text grows, and which part of the cost can be avoided?",
        seed=seed,
        tables=(_usual_count(), _operations(), _bytes(), _times(times), _speeds(times, errors), _peaks(peaks)),
        charts=(*_counted_charts(), *_measured_charts(times, peaks)),
    )


def operations(tokens: int, size: int) -> Operations:
    """Every arithmetic operation of one head on ``tokens`` queries and keys of ``size`` numbers."""
    product = 2 * tokens * tokens * size
    return Operations(product, len(PER_SCORE) * tokens * tokens, product)


def usual_operations(tokens: int, size: int) -> int:
    """n n d + n n + n n d: a multiply-add as one operation, and one for all that the softmax does with a score."""
    return tokens * tokens * size + tokens * tokens + tokens * tokens * size


def bytes_eager(tokens: int, size: int) -> int:
    """To and from memory when each step reads and writes whole tensors.

    q, k, v in and the output out, and six times n^2: the scores written, read and written by the division, read and
    written by the softmax, read by the mixture.
    """
    return BYTES * (4 * tokens * size + 6 * tokens * tokens)


def blocked_bytes(tokens: int, size: int) -> int:
    """The same for code that keeps its scores in cache: q in, the output out once, k and v once for ``ROWS`` each."""
    return BYTES * (2 * tokens * size + 2 * tokens * size * math.ceil(tokens / ROWS))


def eager(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As it is written in most introductions."""
    scores = torch.matmul(query, key.transpose(-2, -1))
    scores = scores / math.sqrt(query.size(-1))
    weights = F.softmax(scores, dim=-1)
    return torch.matmul(weights, value)


def blocked_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """By attemper's blocked backend, in plain PyTorch."""
    return attention(query, key, value, backend="blocked").output


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "eager": eager,
    "blocked": blocked_attention,
    "SDPA": F.scaled_dot_product_attention,
}


def inputs(tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, key and value [1, HEADS, tokens, SIZE]."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, HEADS, tokens, SIZE, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)]


def largest_error(run: Callable[[Tensor, Tensor, Tensor], Tensor], seed: int) -> float:
    """Of the float32 output of the shortest length, against float64."""
    exact = eager(*inputs(LENGTHS[0], seed, torch.float64))
    return float((run(*inputs(LENGTHS[0], seed)) - exact).abs().max())


def repeats(tokens: int) -> int:
    """Runs of each way at a length."""
    return next((count for length, count in REPEATS.items() if tokens <= length), 2)


def best_ms(tokens: int, seed: int) -> dict[str, float]:
    """Shortest of several runs of each way, in turns, so that other work on the machine disturbs all alike."""
    tensors = inputs(tokens, seed)
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    with torch.no_grad():
        for _ in range(repeats(tokens)):
            for way, run in WAYS.items():
                start = time.perf_counter()
                run(*tensors)
                taken[way].append(1e3 * (time.perf_counter() - start))
    return {way: min(times) for way, times in taken.items()}


def eager_memory(tokens: int) -> int:
    """Bytes beyond inputs and output at the peak of eager code: two n x n tensors, of which one becomes the other."""
    return 2 * HEADS * BYTES * tokens * tokens


def blocked_memory(tokens: int) -> int:
    """The same in blocks: a few tiles, whatever the length."""
    return TILES_HELD * BYTES * min(TILE, HEADS * tokens * tokens)


def peak_mib() -> dict[int, dict[str, float]] | None:
    """Peak memory beyond inputs and output, in MiB by length and way; None where the system does not tell."""
    code = "from attemper.lab.complexity import print_peaks; print_peaks()"
    printed = printed_apart("lab complexity", code, timeout=300)
    return None if printed is None else {int(tokens): peaks for tokens, peaks in json.loads(printed).items()}


def print_peaks() -> None:
    """The peaks of this process as JSON on stdout: the whole program of the process that measures them."""
    torch.set_num_threads(1)
    with torch.no_grad():
        for run in WAYS.values():
            run(*inputs(LENGTHS[0], 0))
        found = {n: {way: _peak_mib(run, n) for way, run in WAYS.items()} for n in LENGTHS}
    print(json.dumps(found))


def _peak_mib(run: Callable[[Tensor, Tensor, Tensor], Tensor], tokens: int) -> float:
    tensors = inputs(tokens, 0)
    return peak_bytes(lambda: [run(*tensors)]) / 2**20


def _usual_count() -> Table:
    tokens, size = TOLD
    parts = operations(tokens, size)
    told = usual_operations(tokens, size)
    square = tokens * tokens
    return Table(
        title=f"operations of one head, {tokens} tokens, d = {size}",
        see=(
            f"The usual count, n n d + n n + n n d, is {told:,}. A multiply-add is two operations and a softmax does "
            f"{len(PER_SCORE)} things with each score ({', '.join(PER_SCORE)}), which makes {parts.total:,}: "
            f"{parts.total / told:.2f} times as many."
        ),
        columns=headings("part", "usual count [operations]", "counted [operations]"),
        rows=(
            ("scores q k^T", square * size, parts.scores),
            ("softmax", square, parts.softmax),
            ("mixture p v", square * size, parts.mixture),
            ("total", told, parts.total),
        ),
    )


def _operations() -> Table:
    first, last = (operations(n, SIZE) for n in (LENGTHS[0], LENGTHS[-1]))
    return Table(
        title=f"operations of one head, d = {SIZE}",
        see=(
            f"{LENGTHS[-1] // LENGTHS[0]} times the length, {last.total / first.total:.0f} times the operations, of "
            f"which the softmax is {last.softmax / last.total:.1%}. Every exact way does all of them."
        ),
        columns=headings("n [tokens]", *(f"{name} [millions]" for name in ("scores", "softmax", "mixture", "total"))),
        rows=tuple(
            (n, *(part / 1e6 for part in (one.scores, one.softmax, one.mixture, one.total)))
            for n in LENGTHS
            for one in (operations(n, SIZE),)
        ),
    )


def _bytes() -> Table:
    rows = []
    for n in LENGTHS:
        eagerly, in_blocks, total = bytes_eager(n, SIZE), blocked_bytes(n, SIZE), operations(n, SIZE).total
        rows.append((n, eagerly / 2**20, in_blocks / 2**20, total / eagerly, total / in_blocks))
    return Table(
        title=f"bytes to and from memory, one head, d = {SIZE}, float32",
        see=(
            f"Eager code moves {rows[-1][1] / rows[-1][2]:.1f} times as many bytes at n = {rows[-1][0]}, and its "
            f"operations for each byte hardly grow with n. Blocked: code that reads keys and values once for {ROWS} "
            "queries and keeps their scores in cache, as a fused kernel does."
        ),
        columns=headings(
            "n [tokens]", "eager [MiB]", "blocked [MiB]", "eager [operations/byte]", "blocked [operations/byte]"
        ),
        rows=tuple(rows),
    )


def _times(times: dict[int, dict[str, float]]) -> Table:
    longest = LENGTHS[-1]
    growth = ", ".join(f"{times[longest][way] / times[LENGTHS[-2]][way]:.1f} ({way})" for way in WAYS)
    ordered = sorted(WAYS, key=lambda way: times[longest][way])
    threads = torch.get_num_threads()
    return Table(
        title=f"time of a forward pass, {HEADS} heads, d = {SIZE}, float32, {threads} thread{'s' * (threads > 1)}",
        see=(
            f"From {LENGTHS[-2]} to {longest} tokens the operations grow 4 times, the time {growth} times. At n = "
            f"{longest}, from the fastest: {', '.join(ordered)}. The shortest of several runs is shown. Blocked "
            "saves memory, not time: plain PyTorch passes over each tile some fifteen times, SDPA once."
        ),
        columns=headings("n [tokens]", *(f"{way} [ms]" for way in WAYS), "runs"),
        rows=tuple((n, *(times[n][way] for way in WAYS), repeats(n)) for n in LENGTHS),
        measured=True,
    )


def _speeds(times: dict[int, dict[str, float]], errors: dict[str, float]) -> Table:
    longest = LENGTHS[-1]
    done = HEADS * operations(longest, SIZE).total
    return Table(
        title="speed and error of each way",
        see="All three compute the same output, up to rounding. The error is that against float64.",
        columns=headings("way", f"speed, n = {longest} [10^9 operations/s]", f"largest error, n = {LENGTHS[0]}"),
        rows=tuple((way, done / times[longest][way] / 1e6, errors[way]) for way in WAYS),
        measured=True,
    )


def _peaks(peaks: dict[int, dict[str, float]] | None) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for n in LENGTHS:
        measured = [None if peaks is None else peaks[n][way] for way in WAYS]
        rows.append((n, *measured, eager_memory(n) / 2**20, blocked_memory(n) / 2**20))
    if peaks is None:
        see = "Not measured: this system has no /proc/self/clear_refs, by which Linux tells the peak of a process."
    else:
        last, before = peaks[LENGTHS[-1]], peaks[LENGTHS[-2]]
        grown = ", ".join(f"{before[way]:.1f} to {last[way]:.1f} MiB ({way})" for way in WAYS)
        counted = "Counted: two n x n tensors (eager), five tiles (blocked)."
        see = f"From {LENGTHS[-2]} to {LENGTHS[-1]} tokens: {grown}. {counted}"
    return Table(
        title=f"peak memory beyond inputs and output, {HEADS} heads, d = {SIZE}, float32, one thread",
        see=see,
        columns=headings(
            "n [tokens]", *(f"{way} [MiB]" for way in WAYS), "eager, counted [MiB]", "blocked, counted [MiB]"
        ),
        rows=tuple(rows),
        measured=True,
    )


def _over_lengths(title: str, y: Axis, curves: Mapping[str, Callable[[int], float]], *, measured: bool) -> Chart:
    at = tuple(map(float, LENGTHS))
    series = tuple(Series(name, at, tuple(float(curve(n)) for n in LENGTHS)) for name, curve in curves.items())
    return Chart(title, Axis("length n (tokens)", "log"), y, series, measured=measured)


def _counted_charts() -> Iterator[Chart]:
    done: dict[str, Callable[[int], float]] = {
        "each of the products": lambda n: operations(n, SIZE).scores,
        "softmax": lambda n: operations(n, SIZE).softmax,
    }
    moved: dict[str, Callable[[int], float]] = {
        "eager": lambda n: bytes_eager(n, SIZE),
        "blocked": lambda n: blocked_bytes(n, SIZE),
    }
    for title, y, curves in (
        ("operations, counted", Axis("operations (number)", "log"), done),
        ("bytes moved, counted", Axis("to and from memory (bytes)", "log"), moved),
    ):
        yield _over_lengths(f"{title}, one head, d = {SIZE}", y, curves, measured=False)


def _measured_charts(times: dict[int, dict[str, float]], peaks: dict[int, dict[str, float]] | None) -> Iterator[Chart]:
    for title, y, found in (
        ("time", Axis("forward pass (ms)", "log"), times),
        ("memory", Axis("peak beyond inputs and output (MiB)"), peaks),
    ):
        if found is not None:
            curves = {way: (lambda n, way=way, found=found: found[n][way]) for way in WAYS}
            yield _over_lengths(f"{title}, {HEADS} heads", y, curves, measured=True)
