"""What a watch costs a training step of a model that ``torch.compile`` has compiled: shadow passes on the CPU.

    python benchmarks/shadow.py [--model bytes minilm] [--pairs 25] [--backend inductor] [--cpu-time] [--json FILE]

``bytes``: a byte-level model (width 128, 4 layers, dropout 0.1) at 8 x 256 bytes. ``minilm``: BERT of the size of
all-MiniLM-L6-v2 (6 layers, width 384, 12 heads) with random weights, at 2 x 256 tokens. A step is forward, backward and
AdamW, with rows=128. First a check: losses and weights after some steps are bit-identical with and without a watch, no
graph is made anew, every layer is read, and each head's entropy is that of the same weights in an uncompiled model.

One compiled model trains in turns in one process: a step without a watch, a sampled one, and one between two samples.
Ratios are medians over the rounds of times of one round. At every=N, N - 1 steps in N are between two samples: that
ratio follows from the two.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from statistics import median, quantiles
from typing import Any

import paired
import torch
import torch._dynamo
from torch import nn

import attemper
from attemper.bench.hardware import machine
from attemper.lab.model import ByteConfig, ByteModel

ROWS, STEPS, WARM = 128, 6, 2
NEVER = 1 << 30
BOUND = 1.02
"""Of a step at every=50."""


class Bytes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = ByteModel(ByteConfig(dropout=0.1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.net.loss(ids)


class MiniLM(nn.Module):
    def __init__(self) -> None:
        from transformers import BertConfig, BertModel

        super().__init__()
        sizes: dict[str, Any] = {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536}
        self.net = BertModel(BertConfig(num_attention_heads=12, **sizes))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.net(input_ids=ids).last_hidden_state.square().mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int], int]] = {
    "bytes": (Bytes, (8, 257), 4),
    "minilm": (MiniLM, (2, 256), 6),
}
"""The model, the shape of its batch, and its layers."""


def training(model: nn.Module, called: Callable[..., Any], ids: torch.Tensor) -> Callable[[], torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = called(ids)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def check(model: nn.Module, compiled: Any, ids: torch.Tensor, layers: int) -> dict[str, float]:
    """What is equal, or an AssertionError. Largest difference from the uncompiled model, in nats."""
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    left, graphs = [], 0
    for watched in (False, True):
        model.load_state_dict(kept)
        torch.manual_seed(1)
        step = training(model, compiled, ids)
        watch = attemper.watch(compiled) if watched else None
        losses = []
        for _ in range(STEPS):
            losses.append(step())
            if watch is not None:
                watch.step()
        left.append([*losses, *(value.clone() for value in model.state_dict().values()), torch.get_rng_state()])
        if watch is not None:
            assert (watch.sampled, watch.failures, len(watch.table().sites)) == (STEPS, 0, layers)
            watch.close()
        else:
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert all(map(torch.equal, *left)), "the training differs: no timing of a wrong result"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs, "a graph was made anew"
    entropies = []
    for called in (compiled, model):
        torch.manual_seed(2)
        with attemper.watch(called) as watch:
            called(ids)
        entropies.append([head.entropy_nats for site in watch.table().sites for head in site.heads])
    worst = max(abs(one - two) for one, two in zip(*entropies, strict=True))
    assert worst < 1e-6
    model.load_state_dict(kept)
    return {"largest_difference_nats": worst}


def measure(kind: str, backend: str, pairs: int, clock: paired.Clock) -> dict[str, Any]:
    build, shape, layers = MODELS[kind]
    torch.manual_seed(0)
    model = build()
    ids = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0))
    compiled: Any = torch.compile(model, backend=backend)
    step = training(model, compiled, ids)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with two, inductor's embedding adds gradients in any order: no two trainings are equal
    step()
    found = check(model, compiled, ids, layers)
    torch.set_num_threads(threads)
    times: dict[str, list[float]] = {"plain": [], "sampled": [], "between": []}

    def timed(name: str, run: Callable[[], object]) -> None:
        start = clock()
        run()
        times[name].append(clock() - start)

    def plain() -> None:
        timed("plain", step)

    def watched() -> None:
        with attemper.watch(compiled, every=NEVER, rows=ROWS) as watch:
            for name in ("sampled", "between"):
                timed(name, lambda: (step(), watch.step()))

    for number in range(pairs + WARM):
        for run in (plain, watched) if number % 2 else (watched, plain):
            run()
    times = {name: values[WARM:] for name, values in times.items()}
    sampled, between = ([a / b for a, b in zip(times[n], times["plain"], strict=True)] for n in ("sampled", "between"))
    one, other = median(sampled), median(between)
    return {
        "step_ms": 1e3 * median(times["plain"]),
        **{f"every={every}": (one + (every - 1) * other) / every for every in (1, 10, 50)},
        "every=50, as if the other steps cost nothing": 1 + (one - 1) / 50,
        "between two samples": other,
        "quartiles of a sampled step": quantiles(sampled)[::2],
        "quartiles between two samples": quantiles(between)[::2],
        **found,
    }


def main() -> None:
    parser = paired.parser_of(__doc__, MODELS)
    parser.add_argument("--backend", default="inductor")
    options = parser.parse_args()
    clock, its_name = paired.clock_of(options)
    row: dict[str, Any] = {
        "machine": asdict(machine()),
        "clock": its_name,
        "backend": options.backend,
        "rows": ROWS,
        "pairs": options.pairs,
        "bound at every=50": BOUND,
    }
    for kind in options.model:
        row[kind] = measure(kind, options.backend, options.pairs, clock)
        print(json.dumps({kind: row[kind]}, indent=2), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(row, indent=2) + "\n")


if __name__ == "__main__":
    main()
