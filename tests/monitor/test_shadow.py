"""Shadow passes: a watch sees into compiled models, and the training does not notice."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import attemper
from tests.support.shadow_models import (
    GPT,
    ITEMS,
    Block,
    batches,
    compared,
    entropies,
    torch_warns,
)

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@torch_warns
@pytest.mark.parametrize("name", ITEMS)
@pytest.mark.quick("torch.compile(model)", "watched before", "as torchtitan", "checkpointing, each block by .compile()")
def test_a_hundred_steps_of_every_kind_of_training_are_the_same_with_all(name: str, full_size: bool) -> None:
    row = compared(ITEMS[name], "aot_eager" if full_size else "eager", 100 if full_size else 4)
    assert row["right"], row


INDUCTORS = (
    "torch.compile(model)", "model.compile()", "each block by .compile()", "mode reduce-overhead", "mode max-autotune",
    "fullgraph", "dynamic", "as torchtitan compiles",
)  # fmt: skip


@torch_warns
@pytest.mark.parametrize("name", INDUCTORS)
@pytest.mark.long("compiles for half a minute")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch")
def test_a_hundred_steps_of_inductors_code_are_the_same(name: str) -> None:
    row = compared(ITEMS[name], "inductor", 100)
    assert row["right"], row


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


@pytest.mark.slow("compiles for seconds")
def test_where_taps_see_all_nothing_runs_beside() -> None:
    runs: list[int] = []
    model = tapped("one", "two")
    model.embedding.register_forward_hook(lambda *_: runs.append(1))
    found = read(torch.compile(model, backend="eager"))
    assert found.keys() == {"one", "two"}
    assert len(runs) <= 3  # two passes, perhaps traced, and one beside the first


def samples(watch: Any, model: nn.Module, steps: int) -> list[set[str]]:
    """The sites of each step, which the first shows only once it has ended."""
    found = []
    for _ in range(steps):
        model(next(batches(1))[0])
        found.append({site.name for site in watch.current})
        watch.step()
    return found


@pytest.mark.parametrize("left", [None, "two"])
@pytest.mark.quick("two")
def test_where_a_tap_no_longer_runs_the_next_sample_is_read_beside(left: str | None) -> None:
    model: Any = torch.compile(tapped("one", "two"), backend="eager")
    with attemper.watch(model) as watch, torch.no_grad():
        assert samples(watch, model, 3)[1:] == [{"one", "two"}] * 2
        model.blocks[0].attention.tap, model.blocks[1].attention.tap = None, left
        first, second = samples(watch, model, 2)
    assert first == ({left} if left else set())
    assert second == {"blocks.0.attention", left or "blocks.1.attention"}


def test_where_taps_see_all_a_module_that_is_added_or_compiled_since_is_looked_at() -> None:
    model = tapped("one", "two")
    model.blocks[0].compile(backend="eager")
    with attemper.watch(model) as watch, torch.no_grad():
        assert samples(watch, model, 3)[1:] == [{"one", "two"}] * 2
        model.blocks.append(Block().eval())
        (sites,) = samples(watch, model, 1)
        assert sites > {"one", "two"}


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow("compiles"))])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_shadow_pass_reads_what_taps_read(backend: str) -> None:
    taps = read(torch.compile(tapped("one", "two"), backend=backend), observe="beside")
    shadow = read(torch.compile(tapped(None, None), backend=backend))
    for one, two in zip(taps.values(), shadow.values(), strict=True):
        assert float((one - two).abs().max()) < 1e-6


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
