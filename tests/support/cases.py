"""The table of features: one row per thing a call can ask for, with its own tensors. Every backend runs all of it."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attemper.statistics import NAMES, ONE_PASS
from tests.support import budgets, oracle

DIFFERENTIABLE = ("query", "key", "value", "attn_mask", "temperature", "sink_logits")
MERGED = ONE_PASS + ("entropy_with_sink", "mean_distance", "support_size", "self_weight", "span_mass")
"""Statistics that a kernel sums over blocks of keys. The rest, gini and key_mass, make it hold whole rows."""

MIN = torch.finfo(torch.float32).min
BOTTOM_RIGHT = {"is_causal": True, "causal_alignment": "bottom-right"}
RIGHT_WINDOW = {"window_size": (-1, 3), "causal_alignment": "bottom-right"}


def tells_own_key(options: dict[str, Any], rows: int, keys: int) -> bool:
    """Whether a call says which key is each query's own."""
    diagonal = options.get("is_causal") or options.get("causal_alignment") == "bottom-right"
    return bool(diagonal) or options.get("window_size", (-1, -1)) != (-1, -1) or rows == keys


@dataclass(frozen=True)
class Case:
    """Shapes and options of one call; ``make`` adds tensors (masks, temperatures, sinks) drawn with its seed."""

    name: str
    batch: int = 2
    heads: int = 4
    groups: int = 4
    rows: int = 7
    keys: int = 13
    size: int = 8
    width: int = 8
    dtype: torch.dtype = torch.float32
    ascending: bool = False
    spread: float = 2.0
    """Standard deviation of the scores."""
    make: Callable[[Case], dict[str, Any]] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] = NAMES

    def __post_init__(self) -> None:
        if not tells_own_key(self.options, self.rows, self.keys):
            object.__setattr__(self, "names", tuple(name for name in self.names if name != "self_weight"))

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def empty_rows(self) -> bool:
        return bool(~oracle_call(self).visible.any(-1).all())


def tensors(case: Case) -> dict[str, Any]:
    """Keyword arguments of ``attemper.attention``, without stats and backend. The same ones at every call."""
    generator = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query = normal(case.batch, case.heads, case.rows, case.size) * case.spread
    key = normal(case.batch, case.groups, case.keys, case.size)
    if case.ascending:
        # Scores rise along the keys in every row, so that the running maximum moves in every block.
        direction = normal(1, 1, 1, case.size)
        direction = direction / direction.norm() * case.size**0.5
        query = direction * case.spread * (0.5 + torch.rand(query.shape[:3], generator=generator).double()[..., None])
        key = direction * torch.linspace(-1, 1, case.keys, dtype=torch.float64)[:, None] + 0.01 * key / case.keys
    value = normal(case.batch, case.groups, case.keys, case.width)
    call = {"query": query.to(case.dtype), "key": key.to(case.dtype), "value": value.to(case.dtype), **case.options}
    if case.make is not None:
        torch.manual_seed(zlib.crc32(case.name.encode()))
        call |= case.make(case)
    call["spans"] = torch.rand((case.batch, case.keys), generator=generator) < 0.4
    if case.groups != case.heads:
        call["enable_gqa"] = True
    return call


def leaves(call: dict[str, Any]) -> dict[str, Any]:
    """A copy of the call whose floating tensors are leaves that ask for a gradient."""
    return {
        name: value.detach().clone().requires_grad_() if name in DIFFERENTIABLE and _floating(value) else value
        for name, value in call.items()
    }


def _floating(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype.is_floating_point


def oracle_call(case: Case) -> oracle.Inputs:
    return oracle.inputs(**{name: value for name, value in tensors(case).items() if name != "enable_gqa"})


class Answer(NamedTuple):
    """The oracle's results and gradients for one case, and what the counted roundings may add to the error of each."""

    call: oracle.Inputs
    results: dict[str, oracle.Array]
    grads: dict[str, oracle.Array]
    slacks: dict[str, oracle.Array]
    grad_slacks: dict[str, oracle.Array]
    upstream: dict[str, Tensor]


@cache
def answer(case: Case) -> Answer:
    call = oracle_call(case)
    results = oracle.forward(call)
    generator = torch.Generator().manual_seed(1)
    upstream = {
        name: torch.randn(results[name].shape, generator=generator, dtype=torch.float32)
        for name in ("output", *case.names)
        if name not in oracle.INTEGERS
    }
    upstream["output"] = upstream["output"].to(case.dtype)
    above = {name: oracle.numbers(g) for name, g in upstream.items()}
    grads, grad_slacks = budgets.gradient_slacks(call, above, case.dtype)
    return Answer(call, results, grads, budgets.result_slacks(call, results, case.dtype), grad_slacks, upstream)


def _bias(case: Case) -> Tensor:
    """Additive, finite but for some keys at -inf, at finfo.min (hidden) and at -1e4 (visible)."""
    bias = torch.randn(1, case.heads, case.rows, case.keys)
    bias[..., 3::5] = -torch.inf
    bias[:, 0, :, 4] = MIN
    bias[:, 1, :, 4] = -1e4
    return bias


def _some_rows_empty(case: Case) -> Tensor:
    mask = torch.rand(case.batch, 1, case.rows, case.keys) < 0.6
    mask[:, :, 2] = False
    return mask


def _padding(case: Case, left: bool) -> Tensor:
    lengths = torch.tensor([case.keys - 5, case.keys])[: case.batch]
    places = torch.arange(case.keys)
    return (places.flip(0) if left else places)[None, None, None] < lengths[:, None, None, None]


def _alibi(case: Case) -> Tensor:
    slopes = 2.0 ** -torch.arange(1, case.heads + 1)
    distance = torch.arange(case.rows)[:, None] - torch.arange(case.keys)
    return -slopes[:, None, None] * distance.abs()


CASES = (
    Case("plain"),
    Case("narrow value", width=3, size=11),
    Case("one key", keys=1),
    Case("one row", rows=1, keys=29),
    # A window to the right: the own key stands before higher scores.
    Case("ascending scores", ascending=True, spread=8.0, options=RIGHT_WINDOW),
    Case("ascending causal", ascending=True, options={"is_causal": True, "causal_alignment": "bottom-right"}),
    Case("sharp", spread=30.0),
    Case("causal", options={"is_causal": True}),
    Case("causal bottom-right", options={"is_causal": True, "causal_alignment": "bottom-right"}),
    Case("causal, more rows than keys", rows=13, keys=7, options={"is_causal": True}),
    Case("bottom-right, more rows than keys", rows=13, keys=7, options=BOTTOM_RIGHT),
    Case("window", options={"window_size": (2, 3)}),
    Case("window without left limit", options={"window_size": (-1, 1)}),
    Case("causal window bottom-right", options={"window_size": (3, 9), **BOTTOM_RIGHT}),
    Case("window past the keys", rows=13, keys=7, options={"window_size": (2, 0)}),
    Case("mask with empty rows", make=lambda case: {"attn_mask": _some_rows_empty(case)}),
    Case("mask per head", make=lambda case: {"attn_mask": torch.rand(2, 4, case.rows, case.keys) < 0.5}),
    Case("mask one row high", make=lambda case: {"attn_mask": torch.rand(case.heads, 1, case.keys) < 0.5}),
    Case("mask one key wide", make=lambda case: {"attn_mask": torch.arange(case.rows)[:, None] > 1}),
    Case("left padding", make=lambda case: {"attn_mask": _padding(case, left=True), "first_tokens": 2}),
    Case("right padding, causal", make=lambda case: {"attn_mask": _padding(case, left=False), "is_causal": True}),
    Case("bias", make=lambda case: {"attn_mask": _bias(case)}),
    Case("bias one key wide", make=lambda case: {"attn_mask": torch.randn(case.batch, 1, case.rows, 1)}),
    Case("half precision bias", make=lambda case: {"attn_mask": torch.randn(case.rows, case.keys).to(torch.float16)}),
    Case("alibi, causal", make=lambda case: {"attn_mask": _alibi(case), "is_causal": True}),
    Case("grouped heads", heads=6, groups=2),
    Case("one key head", heads=6, groups=1, options={"is_causal": True}),
    Case("grouped heads, mask per head", heads=4, groups=2, make=lambda case: {"attn_mask": _bias(case)}),
    Case("softcap", spread=8.0, options={"softcap": 5.0}),
    Case("softcap, bias", spread=8.0, options={"softcap": 15.0}, make=lambda case: {"attn_mask": _bias(case)}),
    Case("sink", make=lambda case: {"sink_logits": torch.randn(case.heads) * 2}),
    Case(
        "sink, empty rows",
        make=lambda case: {"sink_logits": torch.randn(case.heads), "attn_mask": _some_rows_empty(case)},
    ),
    Case("temperature", options={"temperature": 0.4}),
    Case("temperature inf", options={"temperature": float("inf")}),
    Case("temperature per head", make=lambda case: {"temperature": torch.rand(case.heads, 1) + 0.5}),
    Case("temperature per row", make=lambda case: {"temperature": torch.rand(1, 1, case.rows) + 0.5}),
    Case("temperature everywhere", make=lambda case: {"temperature": torch.rand(2, 4, case.rows) + 0.5}),
    Case(
        "temperature with bias",
        make=lambda case: {"temperature": torch.rand(2, 1, 1) + 0.5, "attn_mask": _bias(case)},
    ),
    Case("negative scale", options={"scale": -0.3}),
    Case("three first tokens", options={"first_tokens": 3, "is_causal": True}),
    Case(
        "all at once", heads=6, groups=2, size=5, width=3, spread=6.0,
        options={"softcap": 10.0, "window_size": (4, 4), "is_causal": True, "causal_alignment": "bottom-right"},
        make=lambda case: {
            "attn_mask": _bias(case), "sink_logits": torch.randn(6), "temperature": torch.rand(6, 1) + 0.5,
        },
    ),
    Case("float64", dtype=torch.float64, make=lambda case: {"attn_mask": _bias(case), "sink_logits": torch.randn(4)}),
    Case("bfloat16", dtype=torch.bfloat16, options={"is_causal": True}),
    Case("float16", dtype=torch.float16, heads=4, groups=2, make=lambda case: {"attn_mask": _bias(case)}),
)  # fmt: skip

RAGGED = tuple(
    Case(
        f"K={keys}, D={size}, E={width}{', ascending' if ascending else ''}",
        batch=1, heads=2, groups=1, rows=3, keys=keys, size=size, width=width, ascending=ascending, names=MERGED,
        options={"is_causal": True, "causal_alignment": "bottom-right"},
    )
    for keys, size, width, ascending in (
        (97, 1, 1, False), (97, 3, 5, True), (97, 59, 80, False), (1023, 80, 3, True), (1023, 111, 111, False),
        (1025, 257, 1, False), (1025, 3, 257, True), (1025, 1, 59, False), (96, 96, 256, False), (97, 256, 96, False),
    )
)  # fmt: skip
"""Sizes that divide nothing."""

by_name = {"argnames": "case", "argvalues": CASES, "ids": [case.name for case in CASES]}
ragged_by_name = {"argnames": "case", "argvalues": RAGGED, "ids": [case.name for case in RAGGED]}
