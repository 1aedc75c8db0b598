"""What tests of shadow passes share: a small language model, the ways to compile it, and its training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import attemper

torch_warns = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
"""Dynamo asks inputs of a compiled block for their gradients."""

TOKENS, WIDTH, HEADS, BLOCKS = 65, 32, 4, 2
SITES = tuple(f"blocks.{number}.attention" for number in range(BLOCKS))
Compile = Callable[[Any, str], Any]
"""Compiles a model for a backend, in place or not."""


class Attention(nn.Module):
    tap: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if self.tap is not None:
            attemper.tap(parts[0], parts[1], is_causal=True, name=self.tap)
        found = F.scaled_dot_product_attention(*parts, is_causal=True)
        return F.dropout(self.out(found.transpose(1, 2).contiguous().view(x.shape)), 0.1, self.training)


class Block(nn.Module):
    """With running statistics, which a second forward would move."""

    def __init__(self, batch_norm: bool = True) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.batch_norm: nn.Module = nn.BatchNorm1d(WIDTH) if batch_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.batch_norm(x.reshape(-1, WIDTH)).view(x.shape)


class GPT(nn.Module):
    def __init__(self, checkpointed: bool = False, batch_norm: bool = True) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.blocks = nn.ModuleList([Block(batch_norm) for _ in range(BLOCKS)])
        self.checkpointed = checkpointed

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        logits = self.head(x)
        return logits if targets is None else F.cross_entropy(logits.view(-1, TOKENS), targets.reshape(-1))


def whole(model: Any, backend: str, **options: Any) -> Any:
    return torch.compile(model, backend=backend, **options)


def whole_graph(model: Any, backend: str) -> Any:
    return whole(model, backend, fullgraph=True)


def any_size(model: Any, backend: str) -> Any:
    return whole(model, backend, dynamic=True)


def in_mode(mode: str) -> Compile:
    """Modes are inductor's alone: other backends leave them out."""

    def way(model: Any, backend: str) -> Any:
        return whole(model, backend, **({"mode": mode} if backend == "inductor" else {}))

    return way


def in_place(model: Any, backend: str) -> Any:
    model.compile(backend=backend)
    return model


def each_block(model: Any, backend: str) -> Any:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend=backend)
    return model


def blocks_in_place(model: Any, backend: str) -> Any:
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    return model


TORCHTITANS: dict[str, Any] = {"early_stop": False} if "early_stop" in signature(checkpoint).parameters else {}
"""What a release of torch from 2.9 on knows."""


def as_torchtitan_does(model: Any, backend: str) -> Any:
    """Each block stands in a wrapper that runs it again for its gradients; that is compiled in place, as one graph."""
    for name, block in list(model.blocks.named_children()):
        model.blocks.register_module(name, checkpoint_wrapper(block, preserve_rng_state=True, **TORCHTITANS))
    return blocks_in_place(model, backend)


def some(model: Any, backend: str) -> Any:
    model.blocks[1].attention.compile(backend=backend)
    return model


def forward_alone(model: Any, backend: str) -> Any:
    model.forward = torch.compile(model.forward, backend=backend)
    return model


def not_compiled(model: Any, _: str) -> Any:
    return model


Loss = Callable[[Any, Tensor, Tensor], Tensor]


def plain(model: Any, ids: Tensor, targets: Tensor) -> Tensor:
    return model(ids, targets)


def functional(model: Any, ids: Tensor, targets: Tensor) -> Tensor:
    """With other weights in the place of the model's own, as ``torch.func`` has it."""
    return functional_call(model, {name: 1 * p for name, p in model.named_parameters()}, (ids, targets))


class Item(NamedTuple):
    """A way to compile a model and to train it."""

    way: Compile
    first: bool = False
    """Whether the watch is opened before the model is compiled."""
    loss: Loss = plain
    passes: int = 1
    """In one step."""
    autocast: bool = False
    checkpointed: bool = False
    batch_norm: bool = True
    """torch's autograd refuses its counter where a graph holds a checkpoint."""
    sizes: bool = False
    """Whether batches differ in their length."""
    settings: tuple[str, ...] = ()
    """Of dynamo, that are on."""
    more_frames: int = 0
    """How many frames more dynamo looks at with a watch; it makes no graph of them."""


ITEMS: dict[str, Item] = {
    "torch.compile(model)": Item(whole),
    "the same, watched before": Item(whole, first=True),
    "model.compile()": Item(in_place),
    # The first pass runs with our hooks: torch then calls its own inner function, which is a frame.
    "the same, watched before: model.compile()": Item(in_place, first=True, more_frames=1),
    "each block by torch.compile": Item(each_block),
    "each block by .compile()": Item(blocks_in_place),
    "one attention by .compile()": Item(some),
    "model.forward = torch.compile(model.forward)": Item(forward_alone),
    "mode reduce-overhead": Item(in_mode("reduce-overhead")),
    "mode max-autotune": Item(in_mode("max-autotune")),
    "fullgraph": Item(whole_graph),
    "dynamic": Item(any_size, sizes=True),
    "autocast": Item(whole, autocast=True),
    "autocast, each block by .compile()": Item(blocks_in_place, autocast=True),
    "two batches a step": Item(whole, passes=2),
    "two batches a step, each block by .compile()": Item(blocks_in_place, passes=2),
    "checkpointing": Item(whole, checkpointed=True, batch_norm=False),
    "checkpointing, each block by .compile()": Item(blocks_in_place, checkpointed=True),
    "as torchtitan compiles": Item(
        as_torchtitan_does,
        batch_norm=False,
        settings=("capture_scalar_outputs", "skip_fwd_side_effects_in_bwd_under_checkpoint"),
    ),
    "torch.func.functional_call": Item(whole, loss=functional),
}
"""What of compiled training runs in one process on the CPU."""


def fresh_compiler() -> None:
    torch._dynamo.reset()
    counters.clear()


def compilations() -> dict[str, dict[str, int]]:
    return {name: dict(counters[name]) for name in ("stats", "frames", "graph_break")}


def batches(steps: int, sizes: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        ids = torch.randint(TOKENS, (3, 12 - (step % 5 if sizes else 0)), generator=generator)
        yield ids, ids.roll(-1, 1)


class Trained(NamedTuple):
    """Everything that a training leaves behind."""

    losses: list[float]
    left: list[Any]
    """Weights, buffers, and a random number that is drawn in the end."""
    compilations: dict[str, dict[str, int]]


def train(
    compile_model: Compile | Item, *, backend: str = "eager", watched: bool, steps: int = 4, **options: Any
) -> tuple[Trained, Any]:
    """A training, and the closed watch of it."""
    item = compile_model if isinstance(compile_model, Item) else Item(compile_model)
    fresh_compiler()
    known = {name: True for name in item.settings if hasattr(torch._dynamo.config, name)}
    with torch._dynamo.config.patch(known):
        return _train(item, backend, watched, steps, partial(attemper.watch, every=2, **options))


def _train(item: Item, backend: str, watched: bool, steps: int, open_watch: Callable[[Any], Any]) -> Any:
    torch.manual_seed(0)
    inner = GPT(item.checkpointed, item.batch_norm)
    watch = open_watch(inner) if watched and item.first else None
    model = item.way(inner, backend)
    if watched and watch is None:
        watch = open_watch(model)
    optimizer = torch.optim.SGD(inner.parameters(), 0.1)
    losses = []
    for number, (ids, targets) in enumerate(batches(steps * item.passes, item.sizes), 1):
        with torch.autocast("cpu", torch.bfloat16) if item.autocast else nullcontext():
            loss = item.loss(model, ids, targets)
        loss.backward()
        losses.append(loss.item())
        if number % item.passes:
            continue
        optimizer.step()
        optimizer.zero_grad()
        if watch is not None:
            watch.step()
    left = [*inner.parameters(), *inner.buffers(), torch.rand(1)]
    found = Trained(losses, [tensor.tolist() for tensor in left], compilations())
    if watch is not None:
        watch.close()
    return found, watch


def entropies(watch: Any, statistic: str = "normalized_entropy") -> dict[str, Tensor]:
    return {site.name: torch.tensor([getattr(head, statistic) for head in site.heads]) for site in watch.table().sites}


def compared(item: Item, backend: str, steps: int) -> dict[str, Any]:
    """What is equal in a training with a watch and in the same without, and what the watch has seen. It is right if the
    training is the same but for ``item.more_frames``, and every head was seen.
    """
    alone, _ = train(item, backend=backend, watched=False, steps=steps)
    beside, watch = train(item, backend=backend, watched=True, steps=steps)
    frames, graphs = (
        [one.compilations[kind].get(name, 0) for one in (alone, beside)]
        for kind, name in (("frames", "total"), ("stats", "unique_graphs"))
    )
    row = {
        "steps": len(alone.losses) // item.passes,
        "losses equal": beside.losses == alone.losses,
        "weights equal": beside.left == alone.left,
        "compilations equal": beside.compilations == alone.compilations,
        "graphs": graphs[0],
        "more graphs": graphs[1] - graphs[0],
        "more frames": frames[1] - frames[0],
        "sampled": watch.sampled,
        "heads": {site: len(values) for site, values in entropies(watch).items()},
        "failures": watch.failures,
    }
    for kind in beside.compilations["frames"]:
        beside.compilations["frames"][kind] -= item.more_frames
    seen = row["heads"] == dict.fromkeys(SITES, HEADS) and row["sampled"] == row["steps"] // 2
    return {"right": beside == alone and seen and not watch.failures, **row}
