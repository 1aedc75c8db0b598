"""Shadow passes: a watch sees into compiled models, and the training does not notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

import attemper
from tests.support.shadow_models import torch_warns

TOKENS, WIDTH, HEADS = 65, 32, 4
Compile = Callable[[Any, str], Any]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(*parts, is_causal=True)
        return F.dropout(self.out(found.transpose(1, 2).contiguous().view(x.shape)), 0.1, self.training)


class Block(nn.Module):
    """With running statistics, which a second forward would move."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.batch_norm = nn.LayerNorm(WIDTH), Attention(), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.batch_norm(x.reshape(-1, WIDTH)).view(x.shape)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits if targets is None else F.cross_entropy(logits.view(-1, TOKENS), targets.reshape(-1))


def whole(model: Any, backend: str) -> Any:
    return torch.compile(model, backend=backend)


def whole_graph(model: Any, backend: str) -> Any:
    return torch.compile(model, backend=backend, fullgraph=True)


def any_size(model: Any, backend: str) -> Any:
    return torch.compile(model, backend=backend, dynamic=True)


def in_place(model: Any, backend: str) -> Any:
    model.compile(backend=backend)
    return model


def each_block(model: Any, backend: str) -> Any:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend=backend)
    return model


def blocks_in_place(model: Any, backend: str) -> Any:
    """As torchtitan does."""
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    return model


def some(model: Any, backend: str) -> Any:
    model.blocks[1].attention.compile(backend=backend)
    return model


def forward_alone(model: Any, backend: str) -> Any:
    model.forward = torch.compile(model.forward, backend=backend)
    return model


def not_compiled(model: Any, _: str) -> Any:
    return model


WAYS = [whole, whole_graph, any_size, in_place, each_block, blocks_in_place, some, forward_alone]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        ids = torch.randint(TOKENS, (3, 12), generator=generator)
        yield ids, ids.roll(-1, 1)


def train(
    compile_model: Compile,
    *,
    backend: str = "eager",
    watched: bool,
    steps: int = 4,
    before: bool = False,
    **options: Any,
) -> tuple[Any, Any]:
    """Everything that a training leaves behind, and the watch of it, which was opened before or after compiling."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    inner = GPT()
    watch = attemper.watch(inner, every=2, **options) if watched and before else None
    model = compile_model(inner, backend)
    if watched and watch is None:
        watch = attemper.watch(model, every=2, **options)
    optimizer = torch.optim.SGD(inner.parameters(), 0.1)
    losses = []
    for ids, targets in batches(steps):
        loss = model(ids, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if watch is not None:
            watch.step()
    left = [*inner.parameters(), *inner.buffers(), torch.rand(1)]
    compilations = {**counters["stats"], **counters["frames"], **counters["graph_break"]}
    if watch is not None:
        watch.close()
    return (losses, [tensor.tolist() for tensor in left], compilations), watch


def entropies(watch: Any) -> dict[str, Tensor]:
    return {site.name: torch.tensor([head.normalized_entropy for head in site.heads]) for site in watch.table().sites}


@pytest.fixture(scope="module")
def eager() -> dict[str, Tensor]:
    return entropies(train(not_compiled, watched=True)[1])


@torch_warns
@pytest.mark.parametrize("before", [False, True], ids=["", "watched first"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.quick("whole-", "whole-watched first", "in_place-", "blocks_in_place-")
def test_a_compiled_training_is_the_same_to_the_last_bit_and_every_head_is_read(
    way: Compile, before: bool, eager: dict[str, Tensor]
) -> None:
    alone, _ = train(way, watched=False)
    beside, watch = train(way, watched=True, before=before)
    if way is in_place and before:  # the first pass is compiled with our hook in it, which does nothing there
        beside[2]["total"] -= 1
        beside[2]["ok"] -= 1
    assert beside == alone
    assert (watch.sampled, watch.failures) == (2, 0)
    found = entropies(watch)
    assert found.keys() == eager.keys() == {"blocks.0.attention", "blocks.1.attention"}
    for name, values in eager.items():
        assert float((found[name] - values).abs().max()) < 1e-6


@torch_warns
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("way", [whole, in_place, blocks_in_place])
@pytest.mark.slow("compiles for half a minute")
def test_a_hundred_steps_of_a_model_in_a_traced_graph_are_the_same(way: Compile, backend: str) -> None:
    alone, _ = train(way, backend=backend, watched=False, steps=100)
    beside, watch = train(way, backend=backend, watched=True, steps=100)
    assert beside == alone
    assert watch.sampled == 50
