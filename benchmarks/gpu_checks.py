"""The correctness half of ``benchmarks/gpu.py``: every feature against float64 on the device, and the same bits again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import attemper
from attemper.functional.names import ONE_PASS

NAMES = tuple(name for name in ONE_PASS if name not in ("visible_keys", "support_size"))
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def features(
    dtype: torch.dtype, device: torch.device, rows: int, keys: int, size: int
) -> dict[str, tuple[Any, dict[str, Any]]]:
    """``{name: (function, call)}``: one call for everything that a kernel can be asked for."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(device=device, dtype=kind)

    def call(heads: int = 4, groups: int = 2, width: int = size, queries: int = rows, **options: Any) -> dict[str, Any]:
        tensors = {
            "query": normal(2, heads, queries, size),
            "key": normal(2, groups, keys, size),
            "value": normal(2, groups, keys, width),
        }
        return tensors | {"enable_gqa": True} | options

    mask = torch.rand(2, 1, rows, keys, generator=generator) < 0.7
    mask[:, :, rows // 2] = False
    padding = (torch.arange(keys)[None] < torch.tensor([[keys], [keys - keys // 3]]))[:, None, None]
    bottom_right = {"is_causal": True, "causal_alignment": "bottom-right"}
    plain, alone = attemper.attention, attemper.attention_statistics
    calls = {
        "plain": (plain, call()),
        "causal": (plain, call(is_causal=True)),
        "causal bottom-right": (plain, call(**bottom_right)),
        "window": (plain, call(window_size=(keys // 4, 0), **bottom_right)),
        "no groups": (plain, call(groups=4)),
        "narrow value": (plain, call(width=size // 2 + 1)),
        "bool mask, empty rows": (plain, call(attn_mask=mask.to(device))),
        "key padding": (plain, call(attn_mask=padding.to(device), is_causal=True)),
        "bias": (plain, call(attn_mask=normal(1, 4, rows, keys))),
        "bias for all rows": (plain, call(attn_mask=normal(2, 1, 1, keys, kind=torch.float32))),
        "softcap": (plain, call(softcap=3.0, is_causal=True)),
        "sink": (plain, call(sink_logits=normal(4, kind=torch.float32), is_causal=True)),
        "temperature": (plain, call(temperature=torch.rand(4, 1, generator=generator).to(device) + 0.5)),
        "one query": (plain, call(queries=1)),
        "statistics alone": (alone, call(is_causal=True)),
        "statistics of sampled rows": (alone, call(rows=max(rows // 16, 2), is_causal=True)),
        "packed documents": (attemper.varlen_attention, _packed(normal, device, rows, size)),
    }
    for function, given in calls.values():
        if function is alone:
            del given["value"]
    return calls


def _packed(normal: Callable[..., Tensor], device: torch.device, total: int, size: int) -> dict[str, Any]:
    edges = torch.tensor([0, total // 5, total // 5, total // 2, total], dtype=torch.int32, device=device)
    tensors = {name: normal(total, heads, size) for name, heads in (("query", 4), ("key", 2), ("value", 2))}
    return tensors | {"cu_seqlens_q": edges, "cu_seqlens_k": edges, "is_causal": True, "enable_gqa": True}


def results(function: Any, call: dict[str, Any], backend: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Output, statistics and gradients of the sum of all of them; floating tensors in ``dtype`` if given."""
    call = {name: _leaf(value, dtype) for name, value in call.items()}
    if "rows" in call:
        call["generator"] = torch.Generator().manual_seed(0)
    names = tuple(name for name in NAMES if name != "mass" or "sink_logits" in call)
    got = function(**call, stats=names, backend=backend)
    stats = getattr(got, "stats", got)
    found = {name: stats[name] for name in names}
    if hasattr(got, "output"):
        found["output"] = got.output
    wanted = {name: value for name, value in call.items() if isinstance(value, Tensor) and value.requires_grad}
    losses = [part for part in found.values() if part.requires_grad]
    grads = torch.autograd.grad(losses, list(wanted.values()), [torch.ones_like(part) for part in losses])
    found |= {f"d{name}": grad for name, grad in zip(wanted, grads, strict=True)}
    return {name: value.detach() for name, value in found.items()}


def _leaf(value: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(value, Tensor) or not value.dtype.is_floating_point:
        return value
    return value.detach().to(dtype or value.dtype).requires_grad_()


def budget(name: str, truth: Tensor, plain: float, dtype: torch.dtype) -> float:
    """Twice the error of plain PyTorch kernels (blocked), and 8 roundings of the largest entry.

    To the inputs' type, where weights meet values and slopes meet queries and keys; statistics are float32 throughout.
    """
    unit = UNIT[dtype] if name == "output" or name.startswith("d") else UNIT[torch.float32]
    finite = truth[torch.isfinite(truth)].abs()
    return 2 * plain + 8 * unit * float(finite.max() if finite.numel() else 0.0)


def largest_error(got: Tensor, truth: Tensor) -> float:
    """inf where ``got`` is not finite and the truth is, or the other way round (a row that sees no key has lse -inf)."""
    got, truth = got.double(), truth.double()
    if not torch.equal(torch.isfinite(got), torch.isfinite(truth)):
        return float("inf")
    return float((got - truth)[torch.isfinite(truth)].abs().max().nan_to_num())


def checked(function: Any, call: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The worst of a call's results: ``{"worst", "error", "budget", "holds"}``."""
    truth = results(function, call, "reference", torch.float64)
    plain, got = (results(function, call, backend) for backend in ("blocked", "triton"))
    rows = []
    for name, want in truth.items():
        error = largest_error(got[name], want)
        allowed = budget(name, want, largest_error(plain[name], want), dtype)
        rows.append({"worst": name, "error": error, "budget": allowed, "holds": error <= allowed})
    return max(rows, key=lambda row: (not row["holds"], row["error"] / (row["budget"] or 1.0)))


def different_repeats(function: Any, call: dict[str, Any], repeats: int) -> int:
    """How many of so many repeats differ from the first in a bit of any statistic, output or gradient."""
    first, different = results(function, call, "triton"), 0
    for _ in range(repeats - 1):
        again = results(function, call, "triton")
        different += not all(torch.equal(first[name], again[name]) for name in first)
    return different
