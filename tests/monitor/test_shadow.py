"""Shadow passes: a watch sees into compiled models, and the training does not notice."""

from __future__ import annotations

import copy
import inspect
import random
import textwrap
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
@pytest.mark.quick("whole-", "in_place-watched first")
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
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, by the compiler
def test_a_hundred_steps_of_a_model_in_a_traced_graph_are_the_same(way: Compile, backend: str) -> None:
    alone, _ = train(way, backend=backend, watched=False, steps=100)
    beside, watch = train(way, backend=backend, watched=True, steps=100)
    assert beside == alone
    assert watch.sampled == 50


@torch_warns
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune", "fullgraph", "dynamic"])
@pytest.mark.slow("compiles for half a minute")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch")
def test_every_mode_of_inductor_trains_the_same(mode: str) -> None:
    options: dict[str, Any] = {mode: True} if mode in ("fullgraph", "dynamic") else {"mode": mode}

    def way(model: Any, _: str) -> Any:
        return torch.compile(model, **options)

    alone, _ = train(way, watched=False)
    beside, watch = train(way, watched=True)
    assert beside == alone
    assert (watch.sampled, watch.failures, len(watch.table().sites)) == (2, 0, 2)


def tapped(*names: str | None) -> GPT:
    torch.manual_seed(0)
    model = GPT().eval()
    for block, name in zip(model.blocks, names, strict=True):
        block.attention.tap = name  # type: ignore[union-attr]
    return model


def read(model: Any, **options: Any) -> dict[str, Tensor]:
    ids, _ = next(batches(1))
    with attemper.watch(model, **options) as watch, torch.no_grad():
        for _ in range(2):
            model(ids)
            watch.step()
        assert {site.heads[0].rows for site in watch.table().sites} == {3 * 12}
        return entropies(watch)


def test_a_tap_sees_its_attention_and_the_shadow_the_rest() -> None:
    found = read(torch.compile(tapped("mine", None), backend="eager"))
    assert found.keys() == {"mine", "blocks.1.attention"}


def test_where_taps_see_all_nothing_runs_beside() -> None:
    runs: list[int] = []
    model = tapped("one", "two")
    model.embedding.register_forward_hook(lambda *_: runs.append(1))
    found = read(torch.compile(model, backend="eager"))
    assert found.keys() == {"one", "two"}
    assert len(runs) <= 3  # two passes, perhaps traced, and one beside the first


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow("compiles"))])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_shadow_pass_reads_what_taps_read(backend: str) -> None:
    taps = read(torch.compile(tapped("one", "two"), backend=backend), observe="beside")
    shadow = read(torch.compile(tapped(None, None), backend=backend))
    for one, two in zip(taps.values(), shadow.values(), strict=True):
        assert float((one - two).abs().max()) < 1e-6


def characters() -> Tensor:
    """The source of this Python's library as numbers of characters, as nanoGPT's ``prepare.py`` makes them."""
    text = "".join(inspect.getsource(module) for module in (inspect, random, textwrap))
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([numbers[character] % TOKENS for character in text])


def nano(compiling: bool, *, watched: bool) -> tuple[list[float], Any]:
    """The order of nanoGPT's ``train.py``: the model, an optimizer, the watch, ``torch.compile``, then a loop that
    estimates losses in eval mode, accumulates over micro-batches under autocast, clips and steps.
    """
    torch._dynamo.reset()
    torch.manual_seed(1337)
    text = characters()

    def batch() -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(text) - 12, (3,)).tolist()
        rows = torch.stack([text[start : start + 13] for start in starts])
        return rows[:, :-1], rows[:, 1:]

    model: Any = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.95))
    watch = attemper.watch(model, every=2) if watched else None
    if compiling:
        model = torch.compile(model, backend="eager")
    losses, loss = [], torch.zeros(())
    for iteration in range(4):
        if iteration % 2 == 0:
            model.eval()
            with torch.no_grad():
                losses += [model(*batch()).item() for _ in range(2)]
            model.train()
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(*batch()) / 2
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if watch is not None:
            watch.step()
    return losses, watch


def test_the_order_of_nanogpts_train_script_sees_all_heads_and_trains_the_same() -> None:
    alone, _ = nano(True, watched=False)
    beside, watch = nano(True, watched=True)
    assert beside == alone
    assert (watch.sampled, watch.failures) == (2, 0)
    found = {(site.name, site.mode): len(site.heads) for site in watch.table().sites}
    assert found == {(f"blocks.{n}.attention", mode): HEADS for n in range(2) for mode in ("train", "eval")}
    assert watch.table().sites[0].heads[0].rows == 2 * 3 * 12
    watch.close()


def test_nothing_is_left_on_the_model() -> None:
    model = GPT()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    watch = attemper.watch(model)
    compiled: Any = torch.compile(model, backend="eager")
    wrapper = {name for name in vars(compiled) if name != "_forward"}
    compiled(next(batches(1))[0])
    watch.close()
    del model._is_torch_compile  # torch's own
    vars(model).pop("_compile_kwargs", None)  # Lightning's, where it has been imported
    for name, module in model.named_modules():
        assert vars(module) == before[name]
    assert {name for name in vars(compiled) if name != "_forward"} == wrapper
    assert not compiled._forward_hooks
    model.compile(backend="eager")
    call = model._compiled_call_impl
    attemper.watch(model).close()
    assert model._compiled_call_impl is call


def test_a_copy_of_a_watched_model_is_a_model_like_any_other() -> None:
    model = GPT()
    with attemper.watch(model) as watch:
        copied = copy.deepcopy(model)
        torch.compile(copied, backend="eager")(next(batches(1))[0])
        assert watch.passes == 0
