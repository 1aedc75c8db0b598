"""One row: both sides are checked against float64, then timed in turns in one process; ratios are medians of pairs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from attemper.backends.table import Given, resolve
from attemper.bench.hardware import Clock, Machine, machine, peak_flops
from attemper.bench.shape import Shape
from attemper.bench.ways import Way, others, ours
from attemper.errors import BackendError, InputError
from attemper.functional import attention

LARGEST_ERROR = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}
"""Of an output against float64, beyond which nothing is timed; that of an entropy is of float32 for all types."""
CHECKED_ROWS = 16
"""Query rows, evenly strided, that are computed in float64."""


@dataclass(frozen=True)
class Row:
    """What one shape took. Ratios are our time with every statistic divided by the other's."""

    shape: Shape
    backend: str
    machine: Machine
    clock: str
    """"wall", or "cpu": the time that the one thread was given, on a machine that is busy with something else."""
    pairs: int
    ms: float
    """Median of ours, every statistic of one pass included (backward: entropy and its gradient)."""
    other_ms: dict[str, float]
    least_ms: dict[str, float]
    """The shortest of every way, ``ours`` among them: what a busy machine disturbs least."""
    ratios: dict[str, float]
    """Medians of the quotients of a round. ``without_statistics``: the same call that asks for none. ``sdpa``:
    PyTorch's attention. ``sdpa_packed_heads``: the same for decoding, heads packed. ``two_sdpa_calls``,
    ``eager_entropy``: entropy without this package.
    """
    ratio_ranges: dict[str, tuple[float, float]]
    """Least and largest of those quotients. That of the two medians lies between them: a ratio that is far from it was
    measured on a machine that did something else meanwhile."""
    gflops: float
    peak_gflops: float | None
    """The multiply-adds that the threads were measured to do; None where the native library is not built."""
    output_error: float
    entropy_error_nats: float

    @property
    def peak_share(self) -> float | None:
        return None if self.peak_gflops is None else self.gflops / self.peak_gflops

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and words."""
        return asdict(self) | {"peak_share": self.peak_share}


def measure(
    shape: Shape, *, backend: str = "auto", pairs: int = 15, seconds: float = 20.0, cpu_time: bool = False,
    seed: int = 0,
) -> Row:  # fmt: skip
    """Times ``shape`` on as many threads as torch has, after checking that it is right.

    Args:
        shape: what to compute.
        backend: of ours.
        pairs: rounds in which every way runs once; fewer where they would take longer than ``seconds``, never under 3.
        seconds: about how long the rounds may take.
        cpu_time: count only the time that the thread was given; torch must have one thread.
        seed: of the inputs.

    Raises:
        InputError: ``cpu_time`` with several threads.
        BackendError: the backend cannot do it, or its output or entropy is further from float64 than the type allows.
    """
    if cpu_time and torch.get_num_threads() != 1:
        raise InputError(
            f"measure(cpu_time=True) counts the time of one thread, and torch has {torch.get_num_threads()}: "
            "torch.set_num_threads(1) first, or leave it out."
        )
    clock = time.thread_time if cpu_time else time.perf_counter
    named = resolve(backend, frozenset(), Given(shape.dtype, "cpu", shape.size)).name
    tensors = shape.tensors(seed)
    output_error, entropy_error = checked(shape, tensors, named)
    stats = ("entropy",) if shape.backward else "all"
    ways = {"ours": ours(shape, tensors, stats, named), "without_statistics": ours(shape, tensors, (), named)}
    ways |= others(shape, tensors)
    peaks: list[float] = []
    times = rounds(ways, pairs, seconds, peaks, clock)
    middle = {name: median(found) for name, found in times.items()}
    gflops = shape.flops / middle["ours"] / 1e9
    return Row(
        shape=shape, backend=named, machine=machine(), clock="cpu" if cpu_time else "wall", pairs=len(times["ours"]),
        ms=1e3 * middle["ours"],
        other_ms={name: 1e3 * value for name, value in middle.items() if name != "ours"},
        least_ms={name: 1e3 * min(found) for name, found in times.items()},
        ratios={name: median(quotients(times["ours"], times[name])) for name in middle if name != "ours"},
        ratio_ranges={name: span(quotients(times["ours"], times[name])) for name in middle if name != "ours"},
        gflops=gflops, peak_gflops=max(peaks) / 1e9 if peaks else None,
        output_error=output_error, entropy_error_nats=entropy_error,
    )  # fmt: skip


def quotients(times: list[float], others: list[float]) -> list[float]:
    """One time divided by the other, round by round."""
    return [one / other for one, other in zip(times, others, strict=True)]


def span(values: list[float]) -> tuple[float, float]:
    """The least and the largest."""
    return min(values), max(values)


def checked(shape: Shape, tensors: tuple[torch.Tensor, ...], backend: str) -> tuple[float, float]:
    """Largest errors of the output and of the entropy against float64, over some rows.

    Raises:
        BackendError: they are larger than the type allows.
    """
    query, key, value = tensors
    options: dict[str, Any] = {"enable_gqa": shape.groups != shape.heads}
    with torch.no_grad():
        got = attention(query, key, value, is_causal=shape.causal, stats="all", backend=backend, **options)
        picked = torch.linspace(0, shape.queries - 1, min(CHECKED_ROWS, shape.queries)).long()
        mask = (torch.arange(shape.keys) <= picked[:, None]) if shape.causal else None
        want = attention(
            query[:, :, picked].double(), key.double(), value.double(), mask,
            stats=("entropy",), backend="reference", **options,
        )  # fmt: skip
    assert got.stats is not None
    assert want.stats is not None
    output = float((got.output[:, :, picked].double() - want.output).abs().max())
    entropy = float((got.stats.entropy[:, :, picked].double() - want.stats.entropy).abs().max())
    allowed = LARGEST_ERROR[shape.dtype]
    if not (output <= allowed and entropy <= LARGEST_ERROR["float32"]):
        raise BackendError(
            f"bench: {shape} ({shape.dtype}) on backend {backend!r} is off by {output:.1e} in its output and "
            f"{entropy:.1e} nats in its entropy, where {allowed:.0e} and {LARGEST_ERROR['float32']:.0e} are allowed: "
            f"nothing is timed. Use another backend, and report this one."
        )
    return output, entropy


def rounds(
    ways: Mapping[str, Way], pairs: int, seconds: float, peaks: list[float], clock: Clock = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of every way in every round. The first way of a round moves on by one each time; ``peaks`` is added to.

    A first round warms up and tells how many rounds fit.
    """
    names, threads = list(ways), torch.get_num_threads()
    times: dict[str, list[float]] = {name: [] for name in names}
    first = sum(_timed(ways[name], clock) for name in names)
    count = max(3, min(pairs, int(seconds / max(first, 1e-9))))
    for turn in range(count):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            times[name].append(_timed(ways[name], clock))
        peak = peak_flops(threads, clock=clock)
        if peak is not None:
            peaks.append(peak)
    return times


def _timed(way: Way, clock: Clock) -> float:
    start = clock()
    way()
    return clock() - start
