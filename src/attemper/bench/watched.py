"""What a watch costs a training step of a small Transformer on this machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from attemper.bench.hardware import Machine, machine
from attemper.bench.timing import quotients, rounds, span
from attemper.bench.ways import Way
from attemper.monitor.watch import watch

ROWS = 128
"""Query rows of each sequence that a sampled step measures."""


@dataclass(frozen=True)
class WatchRow:
    """A training step (forward, backward, optimizer) of a Transformer of 2 layers, 4 heads, width 256."""

    batch: int
    tokens: int
    machine: Machine
    pairs: int
    ms: float
    """Of a step that nobody watches."""
    ratios: dict[str, float]
    """``sampled``: a step of which ``ROWS`` rows are measured. ``between``: a watched step that is not sampled."""
    ratio_ranges: dict[str, tuple[float, float]]
    """Least and largest of the quotients of a round, whose median a ratio is."""

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and words."""
        return asdict(self)


def measure_watch(*, batch: int = 4, tokens: int = 512, pairs: int = 15, seconds: float = 20.0) -> WatchRow:
    """Times steps of three copies of one model in turns."""
    ways, held = {}, []
    for name, every in (("plain", 0), ("sampled", 1), ("between", 1 << 30)):
        way, watching = _step(batch, tokens, every)
        ways[name] = way
        held.append(watching)
    try:
        times = rounds(ways, pairs, seconds, [])
    finally:
        for watching in held:
            if watching is not None:
                watching.close()
    found = {name: quotients(times[name], times["plain"]) for name in ("sampled", "between")}
    return WatchRow(
        batch, tokens, machine(), len(times["plain"]), 1e3 * median(times["plain"]),
        ratios={name: median(values) for name, values in found.items()},
        ratio_ranges={name: span(values) for name, values in found.items()},
    )  # fmt: skip


def _step(batch: int, tokens: int, every: int) -> tuple[Way, Any]:
    """A step, and what watches it: nothing for ``every`` 0."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(batch, tokens, 256)
    watching = watch(model, every=every, rows=ROWS) if every else None

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if watching is not None:
            watching.step()

    return step, watching
