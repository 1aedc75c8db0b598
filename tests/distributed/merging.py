"""One of several processes: samples of all ranks merged, beside those of one process on the joined batch.

Run by ``test_merging.py``, with the variables of torchrun: ``-m tests.distributed.merging FOLDER [CASE ...]``.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import attemper
from attemper.distributed.data_parallel import data_parallel_group
from attemper.distributed.merged_sample import Slots
from attemper.integrations import training
from attemper.monitor.collector import Collector
from tests.distributed.models import Attention
from tests.distributed.worker import HEADS, SIZE, TOKENS
from tests.support.ranks import folder_of_cases, run_cases

STEPS, EVERY = 6, 2
EXAMPLES = 2
"""Of each data-parallel rank."""
WIDTH = HEADS * SIZE
Data = Callable[[int], Tensor]


class Model(nn.Module):
    """Some of four layers, by their names: a stage of a pipeline has a part of them."""

    def __init__(self, first: int = 0, last: int = 4, heads: int = HEADS) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(place): Attention(WIDTH, heads, heads) for place in range(first, last)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = x + layer(x)
        return x


def model(first: int = 0, last: int = 4, heads: int = HEADS, seed: int = 0) -> Any:
    """In float64, so that a batch and its parts give the same numbers."""
    torch.manual_seed(seed)
    whole = Model(heads=heads).double()
    for place in range(4):
        if not first <= place < last:
            del whole.layers[str(place)]
    return whole


def batch(step: int, parts: int) -> Tensor:
    """The examples of all data-parallel ranks at a step, each part with a size of logits of its own."""
    drawn = torch.randn(parts * EXAMPLES, TOKENS, WIDTH, generator=torch.Generator().manual_seed(step)).double()
    return drawn * torch.linspace(1.0, 3.0, parts).repeat_interleave(EXAMPLES)[:, None, None]


def part(step: int, parts: int, number: int) -> Tensor:
    return batch(step, parts)[EXAMPLES * number : EXAMPLES * (number + 1)]


@contextmanager
def counted(calls: list[tuple[str, int]]) -> Iterator[None]:
    """Notes every collective that torch.distributed is asked for, and its bytes."""

    def noting(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            size = args[0].numel() * args[0].element_size() if isinstance(args[0], Tensor) else 0
            calls.append((name, size))
            return function(*args, **kwargs)

        return call

    names = [
        name for name in dir(dist) if name.startswith(("all_", "broadcast", "reduce", "gather", "scatter", "barrier"))
    ]
    functions = {name: noting(name, getattr(dist, name)) for name in names if callable(getattr(dist, name))}
    with mock.patch.multiple(dist, **functions):
        yield


def trained(wrapped: nn.Module, data: Data, *, steps: int = STEPS, **options: Any) -> dict[str, Any]:
    """Trains, and gives what a watch had read after each step, what its steps sent, and what it is."""
    watched = {"every": EVERY, **options}
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    calls: list[tuple[str, int]] = []
    tables, sent = [], []
    with attemper.watch(wrapped, **watched) as watch:
        for step in range(steps):
            optimizer.zero_grad()
            loss = wrapped(data(step)).square().mean()
            loss.backward()
            optimizer.step()
            calls.clear()
            with counted(calls):
                watch.step(step, loss=loss)
            sent.append([*calls])
            tables.append([site.to_dict() for site in watch.table().sites])
        tokens, skipped = watch.table().tokens, [*map(_entry, watch.table().skipped)]
    return {
        "tables": tables, "sent": sent, "tokens": tokens, "failures": watch.failures, "skipped": skipped,
        "text": repr(watch),
    }  # fmt: skip


def _entry(skip: Any) -> tuple[str, str]:
    return skip.name, skip.reason


def alone(parts: int, **options: Any) -> dict[str, Any]:
    """The same training in one process on the whole batch."""
    return trained(model(), partial(batch, parts=parts), **{"reduce": None, **options})


def apart(one: Any, other: Any) -> float:
    """The largest difference of two readings, relative to numbers above 1; what is no float must be equal."""
    if isinstance(one, dict):
        assert list(one) == list(other)
        return max((apart(one[name], other[name]) for name in one), default=0.0)
    if isinstance(one, list | tuple):
        assert len(one) == len(other)
        return max(map(apart, one, other), default=0.0)
    if isinstance(one, float):
        return abs(one - other) / max(1.0, abs(other))
    assert one == other, f"{one} is not {other}"
    return 0.0


def compared(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    return {
        "apart": apart(found["tables"], expected["tables"]), "tokens": [found["tokens"], expected["tokens"]],
        "sent": found["sent"], "failures": found["failures"], "text": found["text"],
    }  # fmt: skip


def store(name: str) -> Any:
    return attemper.Store(folder_of_cases() / name, bits=None)


def data_parallel(name: str, wrap: Callable[[Any], nn.Module]) -> Any:
    ranks = dist.get_world_size()
    data = partial(part, parts=ranks, number=dist.get_rank())
    found = trained(wrap(model()), data, reduce="data", store=store(name))
    return compared(found, alone(ranks, store=store(f"{name} alone") if dist.get_rank() == 0 else None))


def sharded(module: Any, mesh: DeviceMesh) -> nn.Module:
    for layer in module.layers.values():
        fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def fsdp2(module: Any) -> nn.Module:
    return sharded(module, DeviceMesh("cpu", list(range(dist.get_world_size()))))


def hsdp(module: Any) -> nn.Module:
    return sharded(module, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")))


def tensor_parallel(name: str, ranks: int) -> Any:
    """So many data-parallel ranks, each spread over two that have half of the heads."""
    mesh = init_device_mesh("cpu", (ranks, 2), mesh_dim_names=("dp", "tp"))
    spread = model()
    colwise, rowwise = ColwiseParallel(), RowwiseParallel()
    plan: dict[str, Any] = {f"{name}_proj": rowwise if name == "o" else colwise for name in "qkvo"}
    for layer in spread.layers.values():
        parallelize_module(layer, mesh["tp"], plan)
    data = partial(part, parts=ranks, number=mesh.get_local_rank("dp"))
    wrapped = sharded(spread, mesh["dp"]) if ranks > 1 else spread
    found = trained(wrapped, data, reduce="data", store=store(name))
    expected = alone(ranks, store=store(f"{name} alone") if dist.get_rank() == 0 else None)
    first = mesh.get_local_rank("tp") * HEADS // 2
    for table in expected["tables"]:
        for site in table:
            site["heads"] = site["heads"][first : first + HEADS // 2]
    return compared(found, expected)


def pipeline(ranks: int) -> Any:
    """Two stages, each on ``ranks`` data-parallel ranks; forward passes that are handed over by hand."""
    stage, number = divmod(dist.get_rank(), ranks)
    groups = [dist.new_group([first * ranks + place for place in range(ranks)]) for first in range(2)]
    own, name = model(2 * stage, 2 * stage + 2), f"pipeline {ranks}"
    wrapped = DistributedDataParallel(own, process_group=groups[stage]) if ranks > 1 else own
    reduce: Any = "data" if ranks > 1 else groups[stage]
    calls: list[tuple[str, int]] = []
    with attemper.watch(wrapped, every=EVERY, reduce=reduce, store=store(name)) as watch:
        for step in range(STEPS):
            hidden = part(step, ranks, number)
            if stage:
                dist.recv(hidden, number)
            out = wrapped(hidden).detach()
            if not stage:
                dist.send(out, ranks + number)
            with counted(calls):
                watch.step()
        tables = [site.to_dict() for site in watch.table().sites]
    with attemper.watch(model(), every=EVERY, store=store(f"{name} alone") if dist.get_rank() == 0 else None) as whole:
        for step in range(STEPS):
            whole.model(batch(step, ranks))
            whole.step()
        expected = [site.to_dict() for site in whole.table().sites]
    return {"apart": apart(tables, expected[2 * stage : 2 * stage + 2]), "sent": len(calls), "failures": watch.failures}


def a_failure_on_one_rank() -> Any:
    """Rank 1 fails at the second sampled step, in packing, and at the third, in one site."""
    number, ranks = dist.get_rank(), dist.get_world_size()
    packed, added = iter(range(10)), iter(range(100))
    pack, add = Slots.pack, Collector._add

    def failing_pack(self: Slots, *args: Any) -> Any:
        if next(packed) == 1 and number == 1:
            raise RuntimeError("no memory")
        return pack(self, *args)

    def failing_add(self: Collector, call: Any) -> None:
        if next(added) == 2 * 4 + 1 and number == 1:
            raise RuntimeError("no site")
        add(self, call)

    wrapped, data = DistributedDataParallel(model()), partial(part, parts=ranks, number=number)
    with (
        mock.patch.object(Slots, "pack", failing_pack),
        mock.patch.object(Collector, "_add", failing_add),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        found = trained(wrapped, data, reduce="data")
    rows = [[site["heads"][0]["rows"] for site in table] for table in found["tables"][::EVERY]]
    kept = {name: found[name] for name in ("failures", "skipped")}
    return {"rows": rows, "told": [str(one.message) for one in told], **kept}


def a_rank_without_a_batch() -> Any:
    """Rank 1 reads nothing in the first two steps."""
    number, ranks = dist.get_rank(), dist.get_world_size()
    whole, rows = model(), []
    with attemper.watch(whole, reduce="data") as watch:
        for step in range(3):
            if number == 0 or step == 2:
                whole(part(step, ranks, number))
            watch.step()
            rows.append([site.heads[0].rows for site in watch.table().sites])
    return {"rows": rows, "failures": watch.failures}


def refused(build: Callable[[], nn.Module], **options: Any) -> Any:
    """What a watch says of ranks that differ."""
    calls: list[tuple[str, int]] = []
    try:
        with counted(calls), attemper.watch(build(), **{"reduce": "data", **options}) as watch:
            for step in range(2):
                watch.model(batch(step, 1))
                watch.step()
    except attemper.InputError as error:
        return str(error)
    return "nothing"


def ranks_that_differ() -> Any:
    rank = dist.get_rank()
    world: Any = dist.group.WORLD
    return {
        "heads": refused(lambda: model(heads=HEADS if rank else HEADS // 2), reduce=world),
        "layers": refused(lambda: model(last=4 if rank else 3), reduce=world),
        "parameters": refused(lambda: model(seed=rank)),
        "every": refused(model, every=1 + rank),
        "reduce": refused(model, reduce="tensor"),
    }


class Looped(Model):
    """Runs its layers another number of times in each pass."""

    times = 1

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = super().forward(x)
        return x


def loops_of_another_length() -> Any:
    """Ranks differ in the first step; or are alike in it, and differ later."""
    ranks, number, found = dist.get_world_size(), dist.get_rank(), {}
    for name, lengths in (("differ", (1 + number, 2)), ("differ later", (2, 1 + number))):
        torch.manual_seed(0)
        whole, rows = Looped(0, 1).double(), []
        with attemper.watch(whole, reduce="data") as watch:
            for step, length in enumerate(lengths):
                whole.times = length
                whole(part(step, ranks, number))
                watch.step()
                rows.append({site.name: site.heads[0].rows for site in watch.table().sites})
        found[name] = {"rows": rows, "told": [_entry(one) for one in watch.table().skipped], "failures": watch.failures}
    return found


def resumed() -> Any:
    """A run that goes on: all ranks sample what it would have sampled, though only the first knows where it was."""
    ranks, number = dist.get_world_size(), dist.get_rank()
    for first, last in ((10, 17), (17, 23)):
        whole = model()
        with attemper.watch(whole, every=5, reduce="data", store=store("resumed")) as watch:
            for step in range(first, last):
                whole(part(step, ranks, number))
                watch.step(step)
    return {"sampled": watch.sampled, "failures": watch.failures}


def groups() -> Any:
    """The data-parallel ranks of models that are spread in every way."""

    def found(build: Callable[[Any], Any]) -> Any:
        try:
            group = data_parallel_group(build(model()))
        except attemper.InputError as error:
            return str(error)
        return None if group is None else dist.get_process_group_ranks(group)

    def mesh(*names: str, shape: tuple[int, ...] = (2, 2)) -> DeviceMesh:
        return init_device_mesh("cpu", shape, mesh_dim_names=names)

    def flat(whole: DeviceMesh, name: str) -> DeviceMesh:
        return whole._flatten(name)

    def tensor_parallel(module: Any, own: DeviceMesh) -> Any:
        parallelize_module(module.layers["0"], own, {"q_proj": ColwiseParallel()})
        return module

    both = mesh("dp", "tp")
    return {
        "plain": found(lambda one: one),
        "ddp": found(DistributedDataParallel),
        "inside": found(lambda one: nn.Sequential(DistributedDataParallel(one))),
        "fsdp2 without names": found(fsdp2),
        "hsdp": found(hsdp),
        "hsdp x tp of 1": found(
            lambda one: sharded(
                one, mesh("dp_replicate", "dp_shard", "tp", shape=(2, 2, 1))["dp_replicate", "dp_shard"]
            )
        ),
        "tp of dp x tp": found(lambda one: tensor_parallel(one, both["tp"])),
        "fsdp x tp": found(lambda one: sharded(tensor_parallel(one, both["tp"]), both["dp"])),
        "tp of all": found(lambda one: tensor_parallel(one, DeviceMesh("cpu", list(range(4))))),
        "pp x fsdp": found(lambda one: sharded(one, mesh("pp", "dp_shard")["dp_shard"])),
        "flat with cp": found(lambda one: sharded(one, flat(mesh("dp_shard", "cp"), "dp_cp"))),
        "flat without cp": found(lambda one: sharded(one, flat(mesh("dp_replicate", "dp_shard"), "dp_shard_cp"))),
        "no name for it": found(lambda one: sharded(one, mesh("x", "y")["y"])),
    }


def a_bad_device() -> Any:
    """Rank 2 reads what the others read, but its queries come out too large."""
    whole = model()
    if dist.get_rank() == 2:
        whole.layers["1"].q_proj.register_forward_hook(lambda module, args, out: 30 * out)
    with attemper.watch(whole, reduce=dist.group.WORLD, store=store("bad device")) as watch:
        for step in range(4):
            whole(part(step, 1, 0))
            watch.step()
        found = watch.table()
    return [(alarm.site, alarm.head, alarm.message) for alarm in found.alarms if alarm.kind == "rank_differs"]


class Callback(training.Monitor):
    """The base of all callbacks, without a framework."""


def callbacks(every_rank: bool) -> Any:
    """With one rank without a callback, the other watches alone, and nobody waits for long."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    wrapped, rows, found = DistributedDataParallel(model()), [], {}
    callback = Callback(every=EVERY, rows=None) if every_rank or rank == 0 else None
    if callback is not None:
        with mock.patch("attemper.distributed.data_parallel.MEET_SECONDS", 2.0):
            callback.begin(wrapped.module, main=rank == 0)
    for step in range(4):
        wrapped(part(step, ranks, rank)).square().mean().backward()
        if callback is not None:
            found = callback.step(step)
            rows.append(None if callback.last is None else callback.last.sites[0].heads[0].rows)
    if callback is not None:
        callback.close()
    return {"rows": rows, "scalars": len(found)}


def callback_of_other_models() -> Any:
    """By default ranks that hold other parameters are told, and the main process goes on alone."""
    rank, callback = dist.get_rank(), Callback(every=1, rows=None)
    whole = model(seed=rank)
    callback.begin(whole, main=rank == 0)
    for step in range(2):
        whole(batch(step, 1))
        callback.step(step)
    callback.close()
    return {"watches": callback.watch is not None, "tokens": None if callback.last is None else callback.last.tokens}


def a_rank_that_dies() -> Any:
    """Rank 1 is killed after the third sampled step."""
    ranks, number = dist.get_world_size(), dist.get_rank()
    wrapped = DistributedDataParallel(model())
    with attemper.watch(wrapped, every=EVERY, reduce="data", store=store("died")) as watch:
        for step in range(100):
            wrapped(part(step, ranks, number)).square().mean().backward()
            watch.step()
            if step == 2 * EVERY and number == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    return None


OF_TWO: dict[str, Callable[[], Any]] = {
    "ddp": lambda: data_parallel("ddp", DistributedDataParallel),
    "fails": a_failure_on_one_rank,
    "differ": ranks_that_differ,
    "loops": loops_of_another_length,
    "fsdp2": lambda: data_parallel("fsdp2", fsdp2),
    "tp": lambda: tensor_parallel("tp", 1),
    "pipeline": lambda: pipeline(1),
    "no batch": a_rank_without_a_batch,
    "resumed": resumed,
    "callbacks": lambda: callbacks(True),
    "one callback": lambda: callbacks(False),
    "other models": callback_of_other_models,
}
OF_FOUR: dict[str, Callable[[], Any]] = {
    "ddp of four": lambda: data_parallel("ddp of four", DistributedDataParallel),
    "hsdp": lambda: data_parallel("hsdp", hsdp),
    "dp x tp": lambda: tensor_parallel("dp x tp", 2),
    "pipeline of ddp": lambda: pipeline(2),
    "bad device": a_bad_device,
    "groups": groups,
}
CASES = OF_TWO | OF_FOUR | {"dies": a_rank_that_dies}

if __name__ == "__main__":
    run_cases(CASES)
