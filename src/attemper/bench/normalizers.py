"""Attention by other maps than softmax, beside our own softmax and beside weights in memory."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from torch import Tensor

from attemper.backends.table import Given, resolve
from attemper.bench.hardware import Machine, machine
from attemper.bench.shape import Shape
from attemper.bench.timing import CHECKED_ROWS, LARGEST_ERROR, quotients, rounds, span
from attemper.bench.ways import Way
from attemper.call import normalizer as normalization
from attemper.errors import BackendError
from attemper.functional import attention

NORMALIZERS: dict[str, Any] = {
    "softmax_plus_one": "softmax_plus_one",
    "sigmoid": "sigmoid",
    "top-64": normalization.topk(64),
    "entmax(1.25)": normalization.entmax(1.25),
    "entmax15": "entmax15",
    "sparsemax": "sparsemax",
}
"""What is measured, by the names that rows show."""
_PACKAGE = {"entmax(1.25)": "entmax_bisect", "entmax15": "entmax15", "sparsemax": "sparsemax"}
"""Functions of the entmax package."""


@dataclass(frozen=True)
class NormalizerRow:
    """What one map took on one shape. Ratios are its time, with every statistic, divided by the other's."""

    shape: Shape
    normalizer: str
    backend: str
    machine: Machine
    pairs: int
    ms: float
    other_ms: dict[str, float]
    ratios: dict[str, float]
    """``softmax``: our softmax attention with every statistic. ``entmax_package``: weights in memory by that package,
    where it is installed and has the map. Medians of the quotients of a round.
    """
    ratio_ranges: dict[str, tuple[float, float]]
    """Least and largest of those quotients."""
    support: float
    """Mean share of the visible keys that have weight."""
    output_error: float

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and words."""
        return asdict(self)


def measure_normalizer(
    shape: Shape, name: str, *, backend: str = "auto", pairs: int = 15, seconds: float = 20.0
) -> NormalizerRow:
    """Times one map of ``NORMALIZERS`` in turns with the others' ways, after checking it against float64.

    Raises:
        BackendError: the backend has it not, or its output is further from float64 than the type allows.
    """
    needed = frozenset({"normalizer"}) if name != "softmax_plus_one" else frozenset[str]()
    named = resolve(backend, needed, Given(shape.dtype, "cpu", shape.size)).name
    tensors = shape.tensors()
    error, support = _checked(shape, tensors, name, named)
    ways = {
        "ours": _ours(shape, tensors, NORMALIZERS[name], named),
        "softmax": _ours(shape, tensors, "softmax", backend),
    }
    if name in _PACKAGE and find_spec("entmax") is not None and shape.groups == shape.heads:
        ways["entmax_package"] = _by_package(shape, tensors, name)
    times = rounds(ways, pairs, seconds, [])
    middle = {way: median(found) for way, found in times.items()}
    return NormalizerRow(
        shape=shape, normalizer=name, backend=named, machine=machine(), pairs=len(times["ours"]),
        ms=1e3 * middle["ours"],
        other_ms={way: 1e3 * value for way, value in middle.items() if way != "ours"},
        ratios={way: median(quotients(times["ours"], times[way])) for way in middle if way != "ours"},
        ratio_ranges={way: span(quotients(times["ours"], times[way])) for way in middle if way != "ours"},
        support=support, output_error=error,
    )  # fmt: skip


def _ours(shape: Shape, tensors: tuple[Tensor, ...], normalizer: Any, backend: str) -> Way:
    query, key, value = (tensor.detach().requires_grad_(shape.backward) for tensor in tensors)
    grouped, above = shape.groups != shape.heads, torch.ones_like(query)

    def call() -> object:
        result = attention(
            query, key, value, is_causal=shape.causal, enable_gqa=grouped, normalizer=normalizer, stats="all",
            backend=backend,
        )  # fmt: skip
        if shape.backward:
            return torch.autograd.grad(result.output, (query, key, value), above)
        assert result.stats is not None
        return result.output, [result.stats[statistic] for statistic in result.stats]

    return call


def _by_package(shape: Shape, tensors: tuple[Tensor, ...], name: str) -> Way:
    query, key, value = (tensor.detach().requires_grad_(shape.backward) for tensor in tensors)
    function = getattr(import_module("entmax"), _PACKAGE[name])
    options = {"alpha": 1.25} if name == "entmax(1.25)" else {}
    mask = query.new_full((shape.queries, shape.keys), -math.inf).triu(1) if shape.causal else None
    above = torch.ones_like(query)

    def call() -> object:
        scores = torch.matmul(query / math.sqrt(shape.size), key.transpose(-2, -1))
        weights = function(scores if mask is None else scores + mask, dim=-1, **options)
        output = torch.matmul(weights, value)
        return torch.autograd.grad(output, (query, key, value), above) if shape.backward else output

    return call


def _checked(shape: Shape, tensors: tuple[Tensor, ...], name: str, backend: str) -> tuple[float, float]:
    """The largest error of the output against float64 over some rows, and the share of keys that have weight."""
    query, key, value = tensors
    options: dict[str, Any] = {"enable_gqa": shape.groups != shape.heads, "normalizer": NORMALIZERS[name]}
    with torch.no_grad():
        got = attention(
            query,
            key,
            value,
            is_causal=shape.causal,
            stats=("support_size", "visible_keys"),
            backend=backend,
            **options,
        )
        picked = torch.linspace(0, shape.queries - 1, min(CHECKED_ROWS, shape.queries)).long()
        mask = (torch.arange(shape.keys) <= picked[:, None]) if shape.causal else None
        want = attention(
            query[:, :, picked].double(), key.double(), value.double(), mask, backend="reference", **options
        )
    assert got.stats is not None
    error = float((got.output[:, :, picked].double() - want.output).abs().max())
    # A weight that is a square or a difference of scores keeps fewer digits than an exponential.
    allowed = 4 * LARGEST_ERROR[shape.dtype]
    if not error <= allowed:
        raise BackendError(
            f"bench: {name} on {shape} ({shape.dtype}), backend {backend!r}, is off by {error:.1e} where {allowed:.0e} "
            "is allowed: nothing is timed. Use another backend, and report this one."
        )
    return error, float((got.stats.support_size / got.stats.visible_keys.clamp(min=1)).mean())
