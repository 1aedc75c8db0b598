"""Whether a CUDA graph that was captured once replays our kernels: the same numbers as eager calls, on new inputs.

Three calls: attention with statistics, statistics of sampled rows, and a tap under a raised and a lowered flag. What is
compared is what the replay leaves, on inputs that were not there at the capture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import attemper
from attemper.backends.contract import Problem
from attemper.backends.sums import clear, empty_sums
from attemper.call.call_sums import add
from attemper.sites import tap_buffers

Capture = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]
"""From a function to the tensors that its graph writes, and what replays the graph."""


def captured(function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """A CUDA graph of ``function``, after two calls that compile and load what it launches."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return results, graph.replay


class Inputs:
    """Queries, keys and values of fixed addresses, and new numbers in them."""

    def __init__(self, device: torch.device, dtype: torch.dtype, tokens: int, size: int) -> None:
        self.query, self.key, self.value = (
            torch.randn(2, heads, tokens, size, device=device).to(dtype) for heads in (4, 2, 2)
        )
        self.options: dict[str, Any] = {"is_causal": True, "enable_gqa": True, "backend": "triton"}

    def change(self) -> None:
        for tensor in (self.query, self.key, self.value):
            tensor.copy_(torch.randn_like(tensor))


def attention(inputs: Inputs, capture: Capture) -> bool:
    """Output and entropies of a replay have the bits of an eager call."""

    def call() -> tuple[Tensor, Tensor]:
        output, stats = attemper.attention(inputs.query, inputs.key, inputs.value, stats="all", **inputs.options)
        assert stats is not None
        return output, stats.entropy

    results, replay = capture(call)
    inputs.change()
    replay()
    return all(torch.equal(one, two) for one, two in zip(results, call(), strict=True))


def sampled_rows(inputs: Inputs, capture: Capture) -> bool:
    """The rows that a replay says it measured have the entropies that all rows have there, and they rise."""
    count = max(inputs.query.shape[2] // 4, 2)

    def call() -> tuple[Tensor, Tensor]:
        stats = attemper.attention_statistics(inputs.query, inputs.key, rows=count, **inputs.options)
        assert stats.rows is not None
        return stats.entropy, stats.rows

    (entropy, rows), replay = capture(call)
    inputs.change()
    replay()
    every = attemper.attention_statistics(inputs.query, inputs.key, **inputs.options).entropy
    return bool((rows.diff() > 0).all()) and torch.allclose(entropy, every[..., rows.long()], rtol=1e-5, atol=1e-5)


class Tapped(nn.Module):
    """Nothing but a tap."""

    def forward(self, inputs: Inputs) -> Tensor:
        attemper.tap(inputs.query, inputs.key, is_causal=True, enable_gqa=True, name="benchmarks.gpu_graphs")
        return inputs.query + 0


def tap(inputs: Inputs, capture: Capture) -> bool:
    """With the flag up a replay adds what the operator adds in an eager call, to the bit; with the flag down, nothing."""
    model, query = Tapped(), inputs.query
    heads, device = query.shape[1], query.device
    with attemper.watch(model) as watch:
        model(inputs)
        watch.step()
        _, replay = capture(lambda: model(inputs))
        buffer = next(b for b in tap_buffers._buffers.values() if b.name == "benchmarks.gpu_graphs")
        inputs.change()
        buffer.flag.fill_(1)
        clear(buffer.sums)
        replay()
        added = buffer.sums.clone()
        buffer.flag.fill_(0)
        replay()
        unchanged = torch.equal(buffer.sums, added)
        buffer.flag.fill_(1)
        multiplier = torch.full((1, 1, 1), query.shape[3] ** -0.5, device=device)
        sums = empty_sums(heads, device)
        add(Problem(query, inputs.key, None, None, multiplier, right=0, backend="triton"), sums, buffer.flag)
        if not unchanged:
            raise RuntimeError("with the flag down a replay changed the sums")
        counted, rows = int(added[:, 0].sum()), query[..., 0].numel()
        if counted != rows:
            raise RuntimeError(f"a replay counted {counted} rows, and there are {rows}")
        if not torch.equal(added, sums):
            apart = ((added - sums).abs() / sums.abs().clamp_min(1e-30)).max(0).values.tolist()
            raise RuntimeError(
                f"sums of a replay differ from those of an eager call, by column as parts of them: {apart}"
            )
        return True


CHECKS: dict[str, Callable[[Inputs, Capture], bool]] = {
    "graph: attention with statistics": attention,
    "graph: statistics of sampled rows": sampled_rows,
    "graph: tap, flag up and down": tap,
}
