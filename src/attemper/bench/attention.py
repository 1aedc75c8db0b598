"""One call of attention with statistics: checked against float64, then timed beside other ways to compute it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attemper.backends.table import Inputs, resolve
from attemper.bench.hardware import peak_bytes, printed_apart
from attemper.bench.shape import Shape, Tensors
from attemper.bench.timing import SECONDS, Row, Times, Way, quartiles, quotients, rounds, row_fields
from attemper.call import normalizer as normalization
from attemper.errors import BackendError, InputError
from attemper.functional import attention

SOFTMAX = "softmax"
NORMALIZERS: dict[str, Any] = {
    "softmax_plus_one": "softmax_plus_one",
    "sigmoid": "sigmoid",
    "top-64": normalization.topk(64),
    "entmax(1.25)": normalization.entmax(1.25),
    "entmax15": "entmax15",
    "sparsemax": "sparsemax",
}
"""Normalizers other than softmax that are measured, by the names that rows show."""
_PACKAGE = {"entmax(1.25)": "entmax_bisect", "entmax15": "entmax15", "sparsemax": "sparsemax"}
"""Functions of the entmax package."""
OTHERS = {
    "sdpa": "PyTorch's attention, without statistics",
    "sdpa_packed_heads": "PyTorch's attention, query heads of a key head packed",
    "two_sdpa_calls": "entropy out of two calls of PyTorch's attention",
    "eager_entropy": "attention and entropy written by hand",
    "without_statistics": "the same call that asks for no statistic",
}
"""What a ratio is against, in words, in the order of the sentences."""
LARGEST_ERROR = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}
"""Largest error of an output against float64, by input type. A shape with a larger error is not timed. Entropies are
float32 for every input type and share its bound.
"""
CHECKED_ROWS = 16
"""Query rows, evenly strided, that are computed in float64."""
LARGEST_EAGER = 1 << 31
"""Bytes of an n x n tensor beyond which eager attention is left out."""


@dataclass(frozen=True, kw_only=True)
class ShapeRow(Row):
    """What one shape took, beside other ways. A ratio is our time divided by the other's."""

    shape: Shape
    backend: str
    other_ms: dict[str, float]
    output_error: float

    def opening(self, call: str, more: str = "") -> str:
        """The time, as the beginning of the row's words."""
        return (
            f"{self.shape} {self.shape.dtype}, {self.shape.mode}: {call} takes {self.ms:.2f} ms on backend "
            f"{self.backend} ({more}median of {self.pairs})"
        )

    def beside(self, name: str, words: str) -> str:
        """The ratio to another way, as a line."""
        return f"  {self.ratios[name]:.2f} times {words} ({self.other_ms[name]:.2f} ms){self.by_round(name)}.\n"

    def ending(self) -> str:
        return f"  Against float64 the output was off by at most {self.output_error:.1e}"


@dataclass(frozen=True, kw_only=True)
class AttentionRow(ShapeRow):
    """Attention with every statistic (backward: entropy and its gradient), beside the ways of ``OTHERS``."""

    clock: str
    """"wall", or "cpu": the time that the one thread was given, on a machine that is busy with something else."""
    least_ms: dict[str, float]
    """The shortest time of every way, ``ours`` among them: what a busy machine disturbs least."""
    gflops: float
    peak_gflops: float | None
    """The most multiply-adds of registers alone that the threads did in a round; None without the native library."""
    peak_share: float | None
    """Our rate divided by that of the registers in the same round: the median of all rounds."""
    peak_share_quartiles: tuple[float, float] | None
    entropy_error_nats: float

    def heading(self) -> str:
        if self.peak_gflops is None:
            return f"{self.machine}\nThe native kernels are not built: their share of the machine's peak is not known."
        return f"{self.machine}\nIts registers alone were measured to do up to {self.peak_gflops:.0f} GFLOP/s."

    def share(self) -> str:
        """Our share of the peak with its quartiles; "-" where that was not measured."""
        if self.peak_share is None or self.peak_share_quartiles is None:
            return "-"
        first, third = self.peak_share_quartiles
        return f"{self.peak_share:.0%} ({100 * first:.0f} to {100 * third:.0f})"

    def __str__(self) -> str:
        which = "its entropies and their gradient" if self.shape.backward else "every statistic of one pass"
        share = f", {self.share()} of the peak of its round, quartiles" if self.peak_share is not None else ""
        opening = self.opening(f"attention with {which}", f"{self.gflops:.0f} GFLOP/s{share}; ")
        lines = "".join(self.beside(name, words) for name, words in OTHERS.items() if name in self.ratios)
        return f"{opening}.\n{lines}{self.ending()}, the entropy by {self.entropy_error_nats:.1e} nats."


@dataclass(frozen=True, kw_only=True)
class NormalizerRow(ShapeRow):
    """One normalizer with every statistic, beside our ``softmax`` with every statistic and, where it is installed and
    has the normalizer, the weights in memory of the ``entmax_package``.
    """

    normalizer: str
    support: float
    """Mean share of the visible keys that have weight."""

    def __str__(self) -> str:
        opening, package = self.opening(f"{self.normalizer} with every statistic"), ""
        if "entmax_package" in self.ratios:
            least, largest = (1 / bound for bound in reversed(self.ratio_ranges["entmax_package"]))
            package = (
                f"  {1 / self.ratios['entmax_package']:.1f} times as fast as the entmax package "
                f"({self.other_ms['entmax_package']:.2f} ms); {least:.1f} to {largest:.1f} by round.\n"
            )
        softmax = self.beside("softmax", "our softmax attention")
        return f"{opening}; {self.support:.1%} of the keys have weight.\n{softmax}{package}{self.ending()}."


def measure(
    shape: Shape, *, backend: str = "auto", pairs: int = 15, seconds: float = SECONDS, cpu_time: bool = False
) -> AttentionRow:
    """Times ``shape`` on as many threads as torch has, after checking that it is right.

    Args:
        pairs, seconds: of :func:`~attemper.bench.timing.rounds`.
        cpu_time: count only the time that the thread was given; torch must have one thread.

    Raises:
        InputError: ``cpu_time`` with several threads.
        BackendError: the backend cannot do it, or its output or entropy is further from float64 than the type allows.
    """
    if cpu_time and torch.get_num_threads() != 1:
        raise InputError(
            f"measure(cpu_time=True) counts the time of one thread, and torch has {torch.get_num_threads()}: "
            "torch.set_num_threads(1) first, or leave it out."
        )
    name, tensors = resolve(backend, frozenset(), Inputs(shape.dtype, "cpu", shape.size)).name, shape.tensors()
    output_error, entropy_error, _ = check(shape, tensors, name)
    stats = ("entropy",) if shape.backward else "all"
    ways = {"ours": ours(shape, tensors, stats, name), "without_statistics": ours(shape, tensors, (), name)}
    peaks: list[float] = []
    clock = time.thread_time if cpu_time else time.perf_counter
    times = rounds(ways | others(shape, tensors), pairs, seconds, peaks, clock)
    shares = quotients([shape.flops / taken for taken in times["ours"]], peaks) if peaks else None
    return AttentionRow(
        shape=shape,
        backend=name,
        clock="cpu" if cpu_time else "wall",
        least_ms={way: 1e3 * min(found) for way, found in times.items()},
        gflops=shape.flops / median(times["ours"]) / 1e9,
        peak_gflops=max(peaks) / 1e9 if peaks else None,
        peak_share=median(shares) if shares else None,
        peak_share_quartiles=quartiles(shares) if shares else None,
        output_error=output_error,
        entropy_error_nats=entropy_error,
        **_beside_others(times),
    )


def measure_normalizer(shape: Shape, name: str, *, backend: str = "auto", pairs: int = 15) -> NormalizerRow:
    """Times one of ``NORMALIZERS`` in turns with the other ways, after checking it against float64. ``BackendError``:
    the backend has it not, or its output is further from float64 than the type allows.
    """
    needed = frozenset({"normalizer"}) if name != "softmax_plus_one" else frozenset[str]()
    own, tensors = resolve(backend, needed, Inputs(shape.dtype, "cpu", shape.size)).name, shape.tensors()
    error, _, support = check(shape, tensors, own, name)
    ways = {"ours": ours(shape, tensors, "all", own, name), "softmax": ours(shape, tensors, "all", backend)}
    if name in _PACKAGE and find_spec("entmax") is not None and not shape.grouped:
        ways["entmax_package"] = entmax_package(shape, tensors, name)
    fields = _beside_others(rounds(ways, pairs))
    return NormalizerRow(shape=shape, normalizer=name, backend=own, support=support, output_error=error, **fields)


def _beside_others(times: Times) -> dict[str, Any]:
    """The fields of a row that compare ``ours`` with the other ways."""
    theirs = {way: found for way, found in times.items() if way != "ours"}
    by_round = {way: quotients(times["ours"], found) for way, found in theirs.items()}
    other_ms = {way: 1e3 * median(found) for way, found in theirs.items()}
    return {"other_ms": other_ms, **row_fields(times["ours"], by_round)}


def check(shape: Shape, tensors: Tensors, backend: str, name: str = SOFTMAX) -> tuple[float, float, float]:
    """Largest errors of the output and of the entropy against float64, over some rows; and the share of the visible
    keys that have weight.

    Raises:
        BackendError: an error is larger than the type allows.
    """
    query, key, value = tensors
    options: dict[str, Any] = {"enable_gqa": shape.grouped, "normalizer": NORMALIZERS.get(name, name)}
    with torch.no_grad():
        stats = ("all", "support_size")
        own = options | _window(shape)
        got = attention(query, key, value, is_causal=shape.causal, stats=stats, backend=backend, **own)
        picked = torch.linspace(0, shape.queries - 1, min(CHECKED_ROWS, shape.queries)).long()
        mask = shape.visible(picked) if shape.causal else None
        exact = (query[:, :, picked].double(), key.double(), value.double())
        want = attention(*exact, mask, stats=("entropy",), backend="reference", **options)
    assert got.stats is not None
    assert want.stats is not None
    output = float((got.output[:, :, picked].double() - want.output).abs().max())
    entropy = float((got.stats.entropy[:, :, picked].double() - want.stats.entropy).abs().max())
    errors = [("its output", output, LARGEST_ERROR[shape.dtype]), ("its entropy", entropy, LARGEST_ERROR["float32"])]
    if name != SOFTMAX:  # a weight that is a square or a difference of scores keeps fewer digits than an exponential
        errors = [("its output", output, 4 * LARGEST_ERROR[shape.dtype])]
    if not all(error <= allowed for _, error, allowed in errors):
        said = " and ".join(f"{error:.1e} in {what} ({allowed:.0e} is allowed)" for what, error, allowed in errors)
        raise BackendError(
            f"bench: {name} on {shape} ({shape.dtype}), backend {backend!r}, is off by {said}: nothing is timed. Use "
            "another backend, and report this one."
        )
    return output, entropy, float((got.stats.support_size / got.stats.visible_keys.clamp(min=1)).mean())


def ours(shape: Shape, tensors: Tensors, stats: tuple[str, ...] | str, backend: str, name: str = SOFTMAX) -> Way:
    """``attemper.attention``, and every statistic read; with ``shape.backward`` the gradients of the output's sum, and
    of the entropies' where ``stats`` asks for nothing else.
    """
    own = {"normalizer": NORMALIZERS.get(name, name), "stats": stats, "backend": backend}
    options = shape.options | _window(shape) | own

    def outputs(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        result = attention(query, key, value, **options)
        if result.stats is None:
            return [result.output]
        if shape.backward:
            return [result.output, result.stats.entropy] if stats == ("entropy",) else [result.output]
        return [result.output, *(result.stats[statistic] for statistic in result.stats)]  # computed as they are read

    return _way(shape, tensors, outputs)


def _window(shape: Shape) -> dict[str, Any]:
    """The window, as our attention takes it."""
    return {"window_size": (shape.window - 1, 0)} if shape.window else {}


def sdpa(shape: Shape, tensors: Tensors) -> Way:
    """``F.scaled_dot_product_attention``, with its gradients if wanted."""
    options = shape.options
    if shape.window:
        options |= {"is_causal": False, "attn_mask": shape.visible(torch.arange(shape.queries))}
    return _way(shape, tensors, lambda *parts: [F.scaled_dot_product_attention(*parts, **options)])


def entmax_package(shape: Shape, tensors: Tensors, name: str) -> Way:
    """Attention with weights in memory by the entmax package."""
    function = getattr(import_module("entmax"), _PACKAGE[name])
    options = {"alpha": 1.25} if name == "entmax(1.25)" else {}
    scores = _scores(shape, tensors[0])
    return _way(shape, tensors, lambda q, k, v: [torch.matmul(function(scores(q, k), dim=-1, **options), v)])


def _way(shape: Shape, tensors: Tensors, outputs: Callable[..., list[Tensor]]) -> Way:
    """A call of ``outputs``; with ``shape.backward`` the gradients of the sum of all that it returns."""
    leaves = [tensor.detach().requires_grad_(shape.backward) for tensor in tensors]
    if not shape.backward:
        return lambda: outputs(*leaves)
    above = (torch.ones_like(leaves[0]), torch.ones(leaves[0].shape[:3]))

    def call() -> object:
        found = outputs(*leaves)
        return torch.autograd.grad(found, leaves, above[: len(found)])

    return call


def _scores(shape: Shape, like: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Scaled scores of queries and keys, hidden ones -inf, in memory."""
    mask = None
    if shape.causal:
        visible = shape.visible(torch.arange(shape.queries))
        mask = like.new_zeros(visible.shape).masked_fill(~visible, -math.inf)

    def scores(query: Tensor, key: Tensor) -> Tensor:
        found = torch.matmul(query / math.sqrt(shape.size), key.transpose(-2, -1))
        return found if mask is None else found + mask

    return scores


def sdpa_packed_heads(shape: Shape, tensors: Tensors) -> Way:
    """SDPA for one query: the query heads that share a key head as more queries of it."""
    query, key, value = tensors
    packed = query.reshape(shape.batch, shape.groups, shape.heads // shape.groups, shape.size)
    return lambda: [F.scaled_dot_product_attention(packed, key, value).reshape(query.shape)]


def two_sdpa_calls(shape: Shape, tensors: Tensors) -> Way:
    """Entropy out of two stock calls, ``lse - scale q.(P k)``: output and lse of the first, P k of the second."""
    scale = 1 / math.sqrt(shape.size)

    def outputs(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, shape.causal)
        mean = F.scaled_dot_product_attention(query, key, key, is_causal=shape.causal)
        return [output, lse - scale * (query * mean).sum(-1)]

    return _way(shape, tensors, outputs)


def eager_entropy(shape: Shape, tensors: Tensors) -> Way:
    """Attention and entropy as they are written by hand, with the weights in memory."""
    scores = _scores(shape, tensors[0])

    def outputs(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        weights = torch.softmax(scores(query, key), -1)
        return [torch.matmul(weights, value), -(weights * torch.log(weights + 1e-9)).sum(-1)]

    return _way(shape, tensors, outputs)


def others(shape: Shape, tensors: Tensors) -> dict[str, Way]:
    """The ways that ours is compared with, by name, as far as they apply to the shape."""
    plain = not shape.grouped and not shape.backward
    decoding = shape.grouped and shape.queries == 1 and not shape.backward and not shape.causal
    small = 4 * shape.batch * shape.heads * shape.queries * shape.keys <= LARGEST_EAGER
    ways = {
        sdpa: True,
        sdpa_packed_heads: decoding,
        two_sdpa_calls: plain and not shape.window,
        eager_entropy: plain and small,
    }
    return {way.__name__: way(shape, tensors) for way, applies in ways.items() if applies}


def peak_extra_bytes(shape: Shape, *, backend: str = "auto") -> int | None:
    """Bytes that a forward call needs at most beyond inputs, output and every statistic; None where nothing tells."""
    forward = replace(shape, backward=False)
    imports = "import torch; from attemper.bench.attention import peak_here; from attemper.bench.shape import Shape"
    code = f"{imports}; torch.set_num_threads({torch.get_num_threads()}); print(peak_here({forward!r}, {backend!r}))"
    printed = printed_apart("bench", code)
    return None if printed is None else int(printed)


@torch.no_grad()
def peak_here(shape: Shape, backend: str) -> int:
    """The same in this process, where nothing else runs."""
    small = Shape(1, 1, 1, 16, 16, shape.size, shape.causal, shape.dtype)
    ours(small, small.tensors(), "all", backend)()
    call: Any = ours(shape, shape.tensors(), "all", backend)
    return peak_bytes(call)
