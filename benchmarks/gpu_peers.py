"""What ``benchmarks/gpu.py`` times: our kernels, everybody else's, and what the machine could do at best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attemper
from attemper.backends.contract import UNBOUNDED, Problem
from attemper.backends.sums import empty_sums
from attemper.call.call_sums import add


@dataclass(frozen=True)
class Shape:
    """A call: batch, query heads, key heads, tokens, head size, whether causal."""

    batch: int
    heads: int
    groups: int
    tokens: int
    size: int
    causal: bool = True

    def tensors(self, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        return [
            torch.randn(self.batch, heads, self.tokens, self.size, dtype=dtype, device=device, requires_grad=True)
            for heads in (self.heads, self.groups, self.groups)
        ]

    @property
    def product_flops(self) -> float:
        """Of one product of n x n, or of its causal half, with the head size: QK^T, or PV."""
        return (1 if self.causal else 2) * self.batch * self.heads * self.tokens**2 * self.size

    @property
    def query_key_bytes(self) -> float:
        """What statistics alone must read, in two-byte numbers."""
        return 2 * self.batch * (self.heads + self.groups) * self.tokens * self.size


LONGEST_MS = 300.0
"""A call is repeated until it has run for about so long, or often enough."""


class Clock:
    """Median milliseconds of a call; the cache of the device is filled with other things before each.

    The device is kept asleep until the host has launched the call, so that ``ms`` is the device's time alone, as in a
    compiled step; ``host_ms`` is how long the launch kept the host.
    """

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats
        size = 1 << 28 if device.type == "cuda" else 1
        self.other = torch.empty(size, dtype=torch.uint8, device=device)

    def milliseconds(self, function: Callable[[], object]) -> float:
        return self.times(function)["ms"]

    def times(self, function: Callable[[], object]) -> dict[str, float]:
        """``{"ms", "host_ms", "runs"}``."""
        for _ in range(min(2, self.repeats - 1)):
            self._once(function)
        taken, spent = [], 0.0
        while len(taken) < self.repeats and (len(taken) < 5 or spent < LONGEST_MS):
            self.other.zero_()
            taken.append(self._once(function))
            spent += taken[-1][0]
        ms, host_ms = (statistics.median(column) for column in zip(*taken, strict=True))
        return {"ms": ms, "host_ms": host_ms, "runs": len(taken)}

    def _once(self, function: Callable[[], object]) -> tuple[float, float]:
        begin = end = None
        if self.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(4_000_000)
            begin.record()
        start = time.perf_counter()
        function()
        host_ms = 1e3 * (time.perf_counter() - start)
        if begin is None or end is None:
            return host_ms, host_ms
        end.record()
        end.synchronize()
        return begin.elapsed_time(end), host_ms


def with_backward(forward: Callable[[], Tensor], leaves: list[Tensor], above: Tensor) -> Callable[[], object]:
    """Forward, then the gradients of queries, keys and values."""
    return lambda: torch.autograd.grad(forward(), leaves, above)


def ours(shape: Shape, leaves: list[Tensor], above: Tensor) -> dict[str, Callable[[], object]]:
    query, key, value = leaves
    options: dict[str, Any] = {"is_causal": shape.causal, "enable_gqa": True, "backend": "triton"}
    attention = partial(attemper.attention, query, key, value, **options)
    alone = partial(attemper.attention_statistics, query.detach(), key.detach(), **options)
    every = partial(attention, stats="all")
    largest = partial(alone, stats=("max_logit",))

    def penalised() -> object:
        output, stats = attention(stats=("entropy",))
        assert stats is not None
        return torch.autograd.grad([output, stats.entropy.mean()], leaves, [above, torch.ones((), device=above.device)])

    return {
        "ours: forward": lambda: attention(),
        "ours: forward, entropy": lambda: attention(stats=("entropy",)),
        "ours: forward, every statistic": lambda: every(),
        "ours: forward and backward": with_backward(lambda: attention().output, leaves, above),
        "ours: forward and backward, every statistic": with_backward(lambda: every().output, leaves, above),
        "ours: forward and backward, entropy penalty": penalised,
        "ours: statistics into sums": into_sums(shape, leaves),
        "ours: statistics into sums, rows / 16": into_sums(shape, leaves, rows=max(shape.tokens // 16, 1)),
        "ours: statistics into sums, flag down": into_sums(shape, leaves, flag=0),
        "ours: statistics alone": lambda: alone(),
        "ours: statistics alone, rows / 16": lambda: alone(rows=max(shape.tokens // 16, 1)),
        "ours: entropy alone": lambda: alone(stats=("entropy",)),
        "ours: largest score alone": lambda: largest(),
    }


def into_sums(shape: Shape, leaves: list[Tensor], rows: int | None = None, flag: int = 1) -> Callable[[], object]:
    """What a watched layer pays: statistics added to its sums on the device; nothing is read back."""
    query, key = (leaf.detach() for leaf in leaves[:2])
    multiplier = torch.full((1, 1, 1), shape.size**-0.5, device=query.device)
    up = torch.full((1,), flag, dtype=torch.int32, device=query.device)
    sums = empty_sums(shape.heads, query.device)
    chosen = None
    if rows is not None:
        chosen = torch.arange(0, shape.tokens, shape.tokens // rows, dtype=torch.int32, device=query.device)
    right = 0 if shape.causal else UNBOUNDED
    problem = Problem(query, key, None, None, multiplier, rows=chosen, right=right, backend="triton")
    return lambda: add(problem, sums, up)


def peers(shape: Shape, leaves: list[Tensor], above: Tensor, compiled: bool) -> dict[str, Callable[[], object]]:
    """Everybody else. Whatever one of them needs is made by its own call, which may fail."""
    query, key, value = leaves
    calls: dict[str, Callable[[], object]] = {}
    for name, kind in (
        ("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION),
        ("efficient", SDPBackend.EFFICIENT_ATTENTION), ("math", SDPBackend.MATH),
    ):  # fmt: skip
        forward = partial(_sdpa, kind, shape.causal, query, key, value)
        calls[f"sdpa {name}: forward"] = forward
        calls[f"sdpa {name}: forward and backward"] = with_backward(forward, leaves, above)
    flex = _flex(shape, compiled)
    plain = partial(_flex_call, flex, query, key, value, None)
    calls["flex: forward"] = plain
    calls["flex: forward and backward"] = with_backward(plain, leaves, above)
    calls["flex: forward, lse and max_scores"] = partial(_flex_call, flex, query, key, value, ("lse", "max_scores"))
    calls["two sdpa calls: entropy"] = lambda: two_sdpa_calls(shape.causal, query, key, value)
    calls["eager with entropy: forward"] = lambda: eager(shape.causal, query, key, value)
    calls["eager with entropy: forward and backward"] = with_backward(
        lambda: eager(shape.causal, query, key, value)[0], leaves, above
    )
    return calls


def _flex(shape: Shape, compiled: bool) -> Callable[[str], tuple[Any, Any]]:
    """FlexAttention and its block mask on a device, made by the first call that wants them."""

    @cache
    def made(device: str) -> tuple[Any, Any]:
        function = torch.compile(flex_attention, fullgraph=True, dynamic=False) if compiled else flex_attention
        tokens, mask = shape.tokens, None
        if shape.causal:
            mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, tokens, tokens, device=device)
        return function, mask

    return made


def _flex_call(
    flex: Callable[[str], tuple[Any, Any]], query: Tensor, key: Tensor, value: Tensor, more: tuple[str, ...] | None
) -> Any:
    function, mask = flex(str(query.device))
    options = {} if more is None else {"return_aux": AuxRequest(**dict.fromkeys(more, True))}
    return function(query, key, value, block_mask=mask, enable_gqa=query.shape[1] != key.shape[1], **options)


def _sdpa(kind: SDPBackend, causal: bool, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(kind):
        return sdpa(query, key, value, is_causal=causal, enable_gqa=query.shape[1] != key.shape[1])


def two_sdpa_calls(causal: bool, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Output, and the mean score of each row as q . attention(q, k, k): with the kernel's own lse, the entropy."""
    options: dict[str, Any] = {"is_causal": causal, "enable_gqa": query.shape[1] != key.shape[1]}
    output = sdpa(query, key, value, **options)
    mean_key = sdpa(query, key, key, **options)
    return output, (query.float() * mean_key.float()).sum(-1) / query.shape[3] ** 0.5


def eager(causal: bool, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Output and entropy from the n x n weights."""
    repeats, tokens = query.shape[1] // key.shape[1], query.shape[2]
    key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
    scores = (query @ key.mT).float() / query.shape[3] ** 0.5
    if causal:
        seen = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    weights = scores.softmax(-1)
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
