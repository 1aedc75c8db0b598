"""The correctness half of ``benchmarks/gpu.py``: every feature against float64 on the device, and the same bits again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import attemper
from attemper.statistics import ONE_PASS

NAMES = tuple(name for name in ONE_PASS if name not in ("visible_keys", "support_size"))
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def features(
    dtype: torch.dtype, device: torch.device, rows: int, keys: int, size: int, batch: int = 2, heads: int = 4
) -> dict[str, tuple[Any, dict[str, Any]]]:
    """``{name: (function, call)}``: one call for everything that a kernel can be asked for. Two heads share a key head."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(device=device, dtype=kind)

    def call(groups: int = heads // 2, width: int = size, queries: int = rows, **options: Any) -> dict[str, Any]:
        tensors = {
            "query": normal(batch, heads, queries, size),
            "key": normal(batch, groups, keys, size),
            "value": normal(batch, groups, keys, width),
        }
        return tensors | {"enable_gqa": True} | options

    mask = torch.rand(batch, 1, rows, keys, generator=generator) < 0.7
    mask[:, :, rows // 2] = False
    lengths = torch.tensor([keys] * (batch - 1) + [keys - keys // 3])
    padding = (torch.arange(keys)[None] < lengths[:, None])[:, None, None]
    mask, padding = mask.to(device), padding.to(device)
    bottom_right = {"is_causal": True, "causal_alignment": "bottom-right"}
    temperature = torch.rand(heads, 1, generator=generator).to(device) + 0.5
    together = {"softcap": 3.0, "sink_logits": normal(heads, kind=torch.float32), "temperature": temperature}
    plain, alone, packed = attemper.attention, attemper.attention_statistics, attemper.varlen_attention
    calls = {
        "plain": (plain, call()),
        "causal": (plain, call(is_causal=True)),
        "causal bottom-right": (plain, call(**bottom_right)),
        "window": (plain, call(window_size=(keys // 4, 0), **bottom_right)),
        "window to both sides": (plain, call(window_size=(keys // 4, keys // 8))),
        "no groups": (plain, call(groups=heads)),
        "narrow value": (plain, call(width=size // 2 + 1)),
        "bool mask, empty rows": (plain, call(attn_mask=mask)),
        "key padding": (plain, call(attn_mask=padding, is_causal=True)),
        "bias": (plain, call(attn_mask=normal(1, heads, rows, keys))),
        "bias for all rows": (plain, call(attn_mask=normal(batch, 1, 1, keys, kind=torch.float32))),
        "softcap": (plain, call(softcap=3.0, is_causal=True)),
        "sink": (plain, call(sink_logits=normal(heads, kind=torch.float32), is_causal=True)),
        "temperature": (plain, call(temperature=temperature)),
        "mean distance": (plain, call(is_causal=True, stats=(*NAMES, "mean_distance"))),
        "output without statistics": (plain, call(is_causal=True, stats=())),
        "everything at once": (plain, call(attn_mask=mask, first_tokens=3, **together, **bottom_right)),
        "one query": (plain, call(queries=1)),
        "few queries": (plain, call(queries=5, sink_logits=normal(heads, kind=torch.float32), **bottom_right)),
        "statistics alone": (alone, call(is_causal=True)),
        "statistics of sampled rows": (alone, call(rows=max(rows // 16, 2), is_causal=True)),
        "packed documents": (packed, _packed(normal, device, rows, size, heads)),
        "packed, last keys": (
            packed,
            _packed(normal, device, rows, size, heads) | {"causal_alignment": "bottom-right"},
        ),
        "heads beside tokens": (plain, _transposed(call(is_causal=True))),
    }
    if device.type == "cuda" and dtype.itemsize == 2:
        calls["keys far apart"] = (plain, call(is_causal=True, far_apart=True))
    for function, given in calls.values():
        if function is alone:
            del given["value"]
    return calls


BRIEF = ("plain", "statistics alone", "everything at once", "few queries", "packed documents")
"""Features that are checked for every type and head size; all of them are for one."""


def _packed(normal: Callable[..., Tensor], device: torch.device, total: int, size: int, heads: int) -> dict[str, Any]:
    edges = torch.tensor([0, total // 5, total // 5, total // 2, total], dtype=torch.int32, device=device)
    groups = heads // 2
    tensors = {
        name: normal(total, count, size) for name, count in (("query", heads), ("key", groups), ("value", groups))
    }
    return tensors | {"cu_seqlens_q": edges, "cu_seqlens_k": edges, "is_causal": True, "enable_gqa": True}


def _transposed(call: dict[str, Any]) -> dict[str, Any]:
    """The same call on views of [B, tokens, heads, size], as layers make them, and gradients without memory (stride 0)."""
    views = {name: call[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("query", "key", "value")}
    return call | views | {"expanded": True}


def _far_apart(key: Tensor) -> Tensor:
    """The same keys so far from one another that their places need 64 bits: 2^31 entries of mostly nothing."""
    key = key[:1, :1]
    stride = -(-(1 << 31) // (key.shape[2] - 1)) + 16 & -16
    room = key.new_empty(stride * (key.shape[2] - 1) + key.shape[3])
    return room.as_strided(key.shape, (room.numel(), room.numel(), stride, 1)).copy_(key)


def results(function: Any, call: dict[str, Any], backend: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Output, statistics and gradients of the sum of all of them; floating tensors in ``dtype`` if given."""
    if call.get("far_apart"):
        call = call | {"query": call["query"][:1, :2], "key": _far_apart(call["key"]), "value": call["value"][:1, :1]}
    call = {name: _leaf(value, dtype) for name, value in call.items() if name != "far_apart"}
    expanded, asked = call.pop("expanded", False), call.pop("stats", NAMES)
    if "rows" in call:
        call["generator"] = torch.Generator().manual_seed(0)
    names = tuple(name for name in asked if name != "mass" or "sink_logits" in call)
    got = function(**call, stats=names, backend=backend)
    stats = getattr(got, "stats", got)
    found = {name: stats[name] for name in names}
    if hasattr(got, "output"):
        found["output"] = got.output
    wanted = {name: value for name, value in call.items() if isinstance(value, Tensor) and value.requires_grad}
    losses = [part for part in found.values() if part.requires_grad]
    above = [torch.ones_like(part[..., :1]).expand_as(part) if expanded else torch.ones_like(part) for part in losses]
    grads = torch.autograd.grad(losses, list(wanted.values()), above)
    found |= {f"d{name}": grad for name, grad in zip(wanted, grads, strict=True)}
    return {name: value.detach() for name, value in found.items()}


def _leaf(value: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(value, Tensor) or not value.dtype.is_floating_point:
        return value
    return value.detach().to(dtype or value.dtype).requires_grad_()


def budget(name: str, truth: Tensor, plain: float, dtype: torch.dtype, terms: int) -> float:
    """Twice the error of plain PyTorch kernels (blocked), 8 roundings of the largest entry, and those of a long sum.

    Roundings are to the inputs' type, where weights meet values and gradients meet queries and keys; statistics are
    float32 throughout. A sum of n terms that are added one after another to one float32 number, as fused kernels and
    matrix units add, rounds n times at random: sqrt(n) roundings of the largest entry. Libraries of matrix products cut
    long sums into parts, and round less.
    """
    unit = UNIT[dtype] if name == "output" or name.startswith("d") else UNIT[torch.float32]
    finite = truth[torch.isfinite(truth)].abs()
    return 2 * plain + (8 * unit + terms**0.5 * UNIT[torch.float32]) * float(finite.max() if finite.numel() else 0.0)


def largest_error(got: Tensor, truth: Tensor) -> float:
    """inf where ``got`` is not finite and the truth is, or the other way round (a row that sees no key has lse -inf)."""
    got, truth = got.double(), truth.double()
    if not torch.equal(torch.isfinite(got), torch.isfinite(truth)):
        return float("inf")
    return float((got - truth)[torch.isfinite(truth)].abs().max().nan_to_num())


def checked(function: Any, call: dict[str, Any], dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """The worst of a call's results, and how many of so many runs have other bits than the first:
    ``{"worst", "error", "budget", "holds", "repeats", "different_repeats"}``."""
    got = results(function, call, "triton")
    truth = results(function, call, "reference", torch.float64)
    plain = results(function, call, "blocked")
    tokens, heads = (-3, -2) if "cu_seqlens_q" in call else (-2, -3)
    query, key = call["query"].shape, call["key"].shape
    terms = max(key[tokens], query[tokens] * (query[heads] // key[heads]))
    rows = []
    for name, want in truth.items():
        error = largest_error(got[name], want)
        allowed = budget(name, want, largest_error(plain[name], want), dtype, terms)
        rows.append({"worst": name, "error": error, "budget": allowed, "holds": error <= allowed})
    worst = max(rows, key=lambda row: (not row["holds"], row["error"] / (row["budget"] or 1.0)))
    return worst | {"repeats": repeats, "different_repeats": different_repeats(function, call, got, repeats)}


def different_repeats(function: Any, call: dict[str, Any], first: dict[str, Tensor], repeats: int) -> int:
    """How many of ``repeats`` runs, ``first`` among them, differ from it in a bit of any statistic, output or gradient."""
    different = 0
    for _ in range(repeats - 1):
        again = results(function, call, "triton")
        different += not all(torch.equal(first[name], again[name]) for name in first)
    return different
