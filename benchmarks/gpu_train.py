"""What statistics cost a training step on a GPU: a GPT-2-shaped model of 124M parameters, compiled, in bfloat16.

Run: ``python benchmarks/gpu_train.py [--minutes 4] [--mode reduce-overhead] [--json gpu_train.json]``. In torch's own mode
Python launches every kernel of a step; ``reduce-overhead`` makes CUDA graphs of them. Each way has a model of its own, equal at the
start; first their losses on the same batch are compared. Then rounds of ``--steps`` training steps of every way run in turns
(the wall clock, the device waited for at both ends), and each ratio is the median of those of the rounds:

- plain: ``F.scaled_dot_product_attention``, no statistics;
- a tap beside it, 128 rows of every sequence on every step; a tap, all rows on every 50th step;
- the exact largest score of each head on every step;
- our kernel as the attention, without statistics and with all of them on every step.

All ways are compiled at once beforehand, each by a process of its own, into the caches of torch and Triton. Results are
written after every round; nothing new is begun after ``--minutes``. ``--dry-run`` goes through all of it on the CPU with a
tiny model that is traced and runs eagerly; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu import compiled_in_parts
from torch import Tensor, nn

import attemper


@dataclass(frozen=True)
class Shape:
    """Of the model and its batches."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    vocabulary: int = 50304
    tokens: int = 1024
    batch: int = 8


TINY = Shape(layers=1, heads=2, width=16, vocabulary=32, tokens=8, batch=2)


@dataclass(frozen=True)
class Way:
    """How the model attends, and what a watch samples."""

    attention: str
    every: int | None = None
    rows: int | None = None


WAYS = {
    "plain": Way("plain"),
    "tap, 128 rows, every step": Way("tap", every=1, rows=128),
    "tap, all rows, every 50th step": Way("tap", every=50),
    "largest score, every step": Way("largest"),
    "ours": Way("ours"),
    "ours with statistics, every step": Way("statistics"),
}
TARGETS = (
    ("tap, 128 rows, every step", "plain", 1.01),
    ("tap, all rows, every 50th step", "plain", 1.005),
    ("largest score, every step", "plain", 1.05),
    ("ours with statistics, every step", "ours", 1.03),
)
"""(this, by that, at most)."""


class Attention(nn.Module):
    """Causal attention in one of the ways; what it measures by itself is left in ``measured`` [H]."""

    measured: Tensor

    def __init__(self, shape: Shape, way: str, name: str) -> None:
        super().__init__()
        self.heads, self.way, self.name = shape.heads, way, name
        self.inward, self.outward = nn.Linear(shape.width, 3 * shape.width), nn.Linear(shape.width, shape.width)
        self.register_buffer("measured", torch.zeros(shape.heads))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.inward(x).chunk(3, -1)
        )
        return self.outward(self.attended(query, key, value).transpose(1, 2).flatten(2))

    def attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.way == "ours":
            return attemper.attention(query, key, value, is_causal=True).output
        if self.way == "statistics":
            output, stats = attemper.attention(query, key, value, is_causal=True, stats="all")
            assert stats is not None
            self.measured.copy_(stats.entropy.detach().mean((0, 2)))
            return output
        if self.way == "tap":
            attemper.tap(query, key, is_causal=True, name=self.name)
        elif self.way == "largest":
            stats = attemper.attention_statistics(query.detach(), key.detach(), is_causal=True, stats=("max_logit",))
            self.measured.copy_(stats.max_logit.amax((0, 2)))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Block(nn.Module):
    def __init__(self, shape: Shape, way: str, name: str) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention = Attention(shape, way, name)
        self.wide, self.narrow = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.narrow(F.gelu(self.wide(self.second(x)), approximate="tanh"))


class Model(nn.Module):
    """The shape of GPT-2: learned positions, blocks, embeddings that are also the last layer. It returns the loss."""

    def __init__(self, shape: Shape, way: str, name: str) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.tokens, shape.width)
        self.blocks = nn.ModuleList(Block(shape, way, f"{name}: blocks.{number}") for number in range(shape.layers))
        self.last = nn.LayerNorm(shape.width)
        for embedding in (self.embeddings, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embeddings(tokens[:, :-1]) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.last(x), self.embeddings.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class Training:
    """A model of one way, and its steps. The models of all ways start equal."""

    def __init__(self, shape: Shape, way: Way, device: torch.device, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.way, self.device = way, device
        # Taps of two models that are watched at once need names of their own.
        model = Model(shape, way.attention, next(name for name, one in WAYS.items() if one is way)).to(device)
        how: dict[str, Any] = {"backend": "eager"} if options.dry_run else {"mode": options.mode}
        self.model: Any = torch.compile(model, fullgraph=True, **how)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
        self.stack = ExitStack()
        self.watch = None
        if way.every is not None:
            watch = attemper.watch(self.model, every=way.every, rows=way.rows)
            self.watch = self.stack.enter_context(watch)

    def step(self, tokens: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.model(tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.watch is not None:
            self.watch.step()
        return loss.detach()

    def milliseconds(self, tokens: Tensor, steps: int) -> float:
        """Of one of ``steps`` steps."""
        wait(self.device)
        start = time.perf_counter()
        for _ in range(steps):
            self.step(tokens)
        wait(self.device)
        return 1e3 * (time.perf_counter() - start) / steps

    def seen(self) -> int:
        """Sites that the watch has readings of: a tap that measures nothing would cost nothing."""
        return 0 if self.watch is None else len(self.watch.table().reading.sites)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("gpu_train.json"), help="where the results go")
    parser.add_argument("--minutes", type=float, default=4.0, help="nothing new is begun after so many")
    parser.add_argument("--steps", type=int, default=50, help="training steps of a way in a round; 50 hold one sample")
    parser.add_argument("--rounds", type=int, default=20, help="at most")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step")
    parser.add_argument("--mode", default="default", choices=("default", "reduce-overhead"), help="of torch.compile")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, tiny")
    parser.add_argument("--compile-part", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    options.end = time.monotonic() + 60 * options.minutes
    if not options.dry_run and not torch.cuda.is_available():
        sys.exit(
            "benchmarks/gpu_train.py times training steps on a GPU, and torch.cuda.is_available() is False here. Run it on "
            "a machine with an NVIDIA or AMD GPU, or see that it works with: python benchmarks/gpu_train.py --dry-run"
        )
    device = torch.device("cpu" if options.dry_run else "cuda")
    shape = TINY if options.dry_run else replace(Shape(), batch=options.batch)
    torch.manual_seed(1)
    tokens = torch.randint(shape.vocabulary, (shape.batch, shape.tokens + 1), device=device)
    if options.compile_part is not None:
        way = list(WAYS.values())[options.compile_part]
        compile_way(Training(shape, way, device, options), tokens)
        return
    if not options.dry_run:
        command = [sys.executable, __file__, "--batch", str(options.batch), "--mode", options.mode, "--compile-part"]
        compiled_in_parts(command, len(WAYS), options.end)
    report: dict[str, Any] = {
        "environment": environment(device), "dry_run": options.dry_run, "shape": vars(shape), "steps": options.steps,
        "mode": options.mode,
        "losses": {}, "milliseconds": {name: [] for name in WAYS}, "missing": {},
    }  # fmt: skip
    with ExitStack() as stack:
        trainings = started(shape, device, tokens, options, report, stack)
        timed(trainings, tokens, options, report)
    print_table(report)
    if not report["agree"]:
        sys.exit("The losses of the ways differ on the same batch: see them above.")


def compile_way(training: Training, tokens: Tensor) -> None:
    """What is compiled stays in the caches."""
    with training.stack:
        for _ in range(3):
            training.step(tokens)


def environment(device: torch.device) -> dict[str, Any]:
    found = {"torch": torch.__version__, "attemper": attemper.__version__}
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def started(
    shape: Shape, device: torch.device, tokens: Tensor, options: argparse.Namespace, report: dict[str, Any],
    stack: ExitStack,
) -> dict[str, Training]:  # fmt: skip
    """The ways that could be compiled in time, each after three steps; their first losses are in the report."""
    trainings = {}
    for name, way in WAYS.items():
        if time.monotonic() > options.end:
            report["missing"][name] = "not reached in time"
            continue
        training = Training(shape, way, device, options)
        stack.callback(training.stack.close)
        report["losses"][name] = training.step(tokens).item()
        for _ in range(2):
            training.step(tokens)
        trainings[name] = training
        print(f"{name}: first loss {report['losses'][name]:.5f}", flush=True)
    losses = report["losses"].values()
    # bfloat16 keeps 8 bits; a way that computed something else would differ in the first digits.
    report["agree"] = max(losses) - min(losses) < 0.01 * max(losses)
    return trainings


def timed(trainings: dict[str, Training], tokens: Tensor, options: argparse.Namespace, report: dict[str, Any]) -> None:
    """Rounds of every way in turns; a round that was cut off does not count."""
    for _ in range(options.rounds if report["agree"] else 0):
        taken = {}
        for name, training in trainings.items():
            if time.monotonic() > options.end:
                break
            taken[name] = training.milliseconds(tokens, options.steps)
        if len(taken) < len(trainings):
            break
        for name, milliseconds in taken.items():
            report["milliseconds"][name].append(milliseconds)
        report["targets"] = targets(report["milliseconds"])
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    report["sites_seen"] = {name: training.seen() for name, training in trainings.items() if training.watch}
    report["targets"] = targets(report["milliseconds"])
    options.json.write_text(json.dumps(report, indent=1) + "\n")


def targets(milliseconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Median ratio of the rounds, and the lowest and highest."""
    rows = []
    for one, by, most in TARGETS:
        ratios = [a / b for a, b in zip(milliseconds[one], milliseconds[by], strict=False)]
        row: dict[str, Any] = {"what": f"{one} / {by}", "at_most": most, "rounds": len(ratios), "ratio": None}
        if ratios:
            row |= {"ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}
        rows.append(row)
    return rows


def print_table(report: dict[str, Any]) -> None:
    print()
    if report["dry_run"]:
        print("A dry run: the times mean nothing.")
    print(", ".join(f"{name} {value}" for name, value in report["environment"].items()))
    for name, taken in report["milliseconds"].items():
        print(f"{name:45} {f'{statistics.median(taken):.2f} ms a step' if taken else 'not measured'}")
    for row in report["targets"]:
        ratio = (
            "not measured"
            if row["ratio"] is None
            else f"{row['ratio']:.4f} ({row['lowest']:.4f} to {row['highest']:.4f})"
        )
        print(f"{row['what']:45} {ratio}   at most {row['at_most']}")


if __name__ == "__main__":
    main()
