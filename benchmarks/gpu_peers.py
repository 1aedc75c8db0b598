"""What ``benchmarks/gpu.py`` times: our kernels, everybody else's, and what the machine could do at best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attemper

EAGER_LARGEST = 4096
"""Weights of n x n beyond so many tokens are not made."""


@dataclass(frozen=True)
class Shape:
    """A causal call: batch, query heads, key heads, tokens, head size."""

    batch: int
    heads: int
    groups: int
    tokens: int
    size: int

    def tensors(self, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        return [
            torch.randn(self.batch, heads, self.tokens, self.size, dtype=dtype, device=device, requires_grad=True)
            for heads in (self.heads, self.groups, self.groups)
        ]

    @property
    def product_flops(self) -> float:
        """Of one causal product of n x n with the head size: QK^T, or PV."""
        return self.batch * self.heads * self.tokens**2 * self.size

    @property
    def query_key_bytes(self) -> float:
        """What statistics alone must read, in two-byte numbers."""
        return 2 * self.batch * (self.heads + self.groups) * self.tokens * self.size


class Clock:
    """Median milliseconds of a call; the cache of the device is filled with other things before each."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats
        size = 1 << 28 if device.type == "cuda" else 1
        self.other = torch.empty(size, dtype=torch.uint8, device=device)

    def milliseconds(self, function: Callable[[], object]) -> float:
        for _ in range(min(3, self.repeats)):
            function()
        times = []
        for _ in range(self.repeats):
            self.other.zero_()
            times.append(self._once(function))
        return statistics.median(times)

    def _once(self, function: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            start = time.perf_counter()
            function()
            return 1e3 * (time.perf_counter() - start)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)


def with_backward(forward: Callable[[], Tensor], leaves: list[Tensor], above: Tensor) -> Callable[[], object]:
    """Forward, then the gradients of queries, keys and values."""
    return lambda: torch.autograd.grad(forward(), leaves, above)


def ours(shape: Shape, leaves: list[Tensor], above: Tensor) -> dict[str, Callable[[], object]]:
    query, key, value = leaves
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": True, "backend": "triton"}
    attention = partial(attemper.attention, query, key, value, **options)
    alone = partial(attemper.attention_statistics, query.detach(), key.detach(), **options)

    def penalised() -> object:
        output, stats = attention(stats=("entropy",))
        assert stats is not None
        return torch.autograd.grad([output, stats.entropy.mean()], leaves, [above, torch.ones((), device=above.device)])

    return {
        "ours: forward": lambda: attention(),
        "ours: forward, entropy": lambda: attention(stats=("entropy",)),
        "ours: forward, every statistic": lambda: attention(stats="all"),
        "ours: forward and backward": with_backward(lambda: attention().output, leaves, above),
        "ours: forward and backward, entropy penalty": penalised,
        "ours: statistics alone": lambda: alone(),
        "ours: entropy alone": lambda: alone(stats=("entropy",)),
        "ours: statistics alone, rows / 16": lambda: alone(rows=max(shape.tokens // 16, 1)),
    }


def peers(shape: Shape, leaves: list[Tensor], above: Tensor, compiled: bool) -> dict[str, Callable[[], object]]:
    query, key, value = leaves
    calls: dict[str, Callable[[], object]] = {}
    for name, kind in (
        ("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION),
        ("efficient", SDPBackend.EFFICIENT_ATTENTION), ("math", SDPBackend.MATH),
    ):  # fmt: skip
        if name == "math" and shape.tokens > EAGER_LARGEST:
            continue
        forward = partial(_sdpa, kind, query, key, value)
        calls[f"sdpa {name}: forward"] = forward
        calls[f"sdpa {name}: forward and backward"] = with_backward(forward, leaves, above)
    calls["two sdpa calls: entropy"] = lambda: two_sdpa_calls(query, key, value)
    if shape.tokens <= EAGER_LARGEST:
        calls["eager with entropy: forward"] = lambda: eager(query, key, value)
        calls["eager with entropy: forward and backward"] = with_backward(
            lambda: eager(query, key, value)[0], leaves, above
        )
    flex = torch.compile(flex_attention, fullgraph=True) if compiled else flex_attention
    tokens = shape.tokens
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, tokens, tokens, device=str(query.device))
    plain = partial(flex, query, key, value, block_mask=mask, enable_gqa=True)
    request = AuxRequest(lse=True, max_scores=True)
    calls["flex: forward"] = plain
    calls["flex: forward, lse and max_scores"] = partial(plain, return_aux=request)
    calls["flex: forward and backward"] = with_backward(plain, leaves, above)
    return calls


def _sdpa(kind: SDPBackend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(kind):
        return sdpa(query, key, value, is_causal=True, enable_gqa=True)


def two_sdpa_calls(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Output, and the mean score of each row as q . attention(q, k, k): with the kernel's own lse, the entropy."""
    output = sdpa(query, key, value, is_causal=True, enable_gqa=True)
    mean_key = sdpa(query, key, key, is_causal=True, enable_gqa=True)
    return output, (query.float() * mean_key.float()).sum(-1) / query.shape[3] ** 0.5


def eager(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Output and entropy from the n x n weights."""
    repeats, tokens = query.shape[1] // key.shape[1], query.shape[2]
    key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
    scores = (query @ key.mT).float() / query.shape[3] ** 0.5
    seen = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return weights.to(value.dtype) @ value, torch.special.entr(weights).sum(-1)


def limits(clock: Clock, dtype: torch.dtype, side: int, copied: int) -> dict[str, float]:
    """Measured, not of a data sheet: TFLOP/s of a matrix product of this side, GB/s of a copy of so many bytes."""
    matrix = torch.randn(side, side, dtype=dtype, device=clock.device)
    source = torch.zeros(copied, dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    product_ms = clock.milliseconds(lambda: matrix @ matrix)
    copy_ms = clock.milliseconds(lambda: target.copy_(source))
    return {"matrix_tflops": 2e-9 * side**3 / product_ms, "copy_gb_per_s": 2e-6 * copied / copy_ms}


def theoretical(shape: Shape, limit: dict[str, float]) -> dict[str, float]:
    """The least milliseconds of a call: its products at the measured peak, or its bytes at the measured bandwidth."""
    product_ms = 1e-9 * shape.product_flops / limit["matrix_tflops"]
    bytes_ms = 1e-6 * shape.query_key_bytes / limit["copy_gb_per_s"]
    return {
        "limit: statistics alone": max(product_ms, bytes_ms),
        "limit: forward": 2 * product_ms,
        "limit: forward and backward": 7 * product_ms,
    }
