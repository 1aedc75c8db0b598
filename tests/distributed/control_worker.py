"""One of several processes: trains a model that is spread over them under ``QKClip`` or ``Thermostat``.

Run by ``test_control.py``. Each does the same with the whole model on all examples, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import attemper
from attemper.control.query_key_weights import HeadRows
from tests.distributed.models import Attention, Parallel
from tests.support.ranks import run_cases

HEADS, KEY_HEADS, SIZE, STEPS = 4, 2, 8, 3


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(32, HEADS, KEY_HEADS) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def model(named: bool = True) -> Model:
    """``named``: whether its attention says how many heads it has."""
    torch.manual_seed(0)
    built = Model()
    for layer in built.layers if named else ():
        layer.num_heads = HEADS  # type: ignore[assignment]
    with torch.no_grad():
        for layer in built.layers:
            layer.q_proj.weight.mul_(torch.linspace(2.0, 12.0, HEADS).repeat_interleave(SIZE)[:, None])  # type: ignore[union-attr, operator]
    return built


def batch(step: int) -> Tensor:
    return torch.randn(4, 24, 32, generator=torch.Generator().manual_seed(step))


def split_heads(built: Model, mesh: Any) -> Model:
    plan: Any = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")} | {"o_proj": RowwiseParallel()}
    for layer in built.layers:
        parallelize_module(layer, mesh, plan)
    return built


def sharded(built: Model, mesh: Any) -> Model:
    for layer in built.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(built, mesh=mesh)
    return built


class Spread(NamedTuple):
    """A model as this rank has it."""

    model: nn.Module
    place: int = 0
    """Which of the ``places`` parts of a batch is this rank's."""
    places: int = 1
    reduce: Any = "data"
    averaged_over: Any = None
    """A group over which gradients are averaged by hand."""


def ddp(built: Model) -> Spread:
    return Spread(DistributedDataParallel(built), dist.get_rank(), dist.get_world_size())


def fsdp(built: Model) -> Spread:
    return Spread(
        sharded(built, init_device_mesh("cpu", (dist.get_world_size(),))), dist.get_rank(), dist.get_world_size()
    )


def tensor_parallel(built: Model) -> Spread:
    return Spread(split_heads(built, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))))


def fsdp_of_split_heads(built: Model) -> Spread:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return Spread(sharded(split_heads(built, mesh["tp"]), mesh["dp"]), mesh.get_local_rank("dp"), 2)


def fsdp_with_copies(built: Model) -> Spread:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    return Spread(sharded(built, mesh), dist.get_rank(), dist.get_world_size())


def copies_of_split_heads(built: Model) -> Spread:
    """Nothing but ``reduce`` says which ranks have copies."""
    heads, copies = (init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))[name] for name in "ba")
    return Spread(split_heads(built, heads), copies.get_local_rank(), 2, copies, copies.get_group())


SPREAD: dict[str, Callable[[Model], Spread]] = {
    "ddp": ddp,
    "fsdp": fsdp,
    "tp": tensor_parallel,
    "fsdp x tp": fsdp_of_split_heads,
    "copies x tp": copies_of_split_heads,
    "fsdp with copies": fsdp_with_copies,
}


def alone(built: Model) -> Spread:
    """The whole model with all examples."""
    return Spread(built, reduce=None)


def trained(spread: Spread, act: Callable[[], Any]) -> None:
    optimizer = torch.optim.SGD(spread.model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        spread.model(batch(step)[spread.place :: spread.places]).square().mean().backward()
        for weight in spread.model.parameters() if spread.averaged_over is not None else ():
            gradient: Any = weight.grad
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            dist.all_reduce(local, dist.ReduceOp.SUM, spread.averaged_over)
            local.div_(spread.places)
        optimizer.step()
        act()


def whole_of(weight: Any) -> list[float]:
    full = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return full.detach().flatten().tolist()


def weights(built: nn.Module) -> dict[str, list[float]]:
    return {name.removeprefix("module."): whole_of(weight) for name, weight in built.named_parameters()}


def clipped(name: str, named: bool = True) -> Any:
    """Weights and factors after some clipped steps, on all ranks together and on one with all examples."""
    found = []
    for build in (SPREAD[name], alone):
        spread, factors = build(model(named or build is alone)), []
        with attemper.QKClip(spread.model, 2.0, reduce=spread.reduce) as clip:
            trained(spread, lambda: factors.append(clip.step()))  # noqa: B023
        steps = [{site: gamma.tolist() for site, gamma in step.items()} for step in factors]
        found.append({"weights": weights(spread.model), "factors": steps, "clipped": clip.clipped})
    return dict(zip(("found", "expected"), found, strict=True))


def held(name: str, per: str) -> Any:
    """Temperatures of the heads of this rank, and of all heads in one process."""
    found = []
    for build in (SPREAD[name], alone):
        spread = build(model())
        thermostat = attemper.Thermostat(spread.model, 1.0, per=per, rows=None, max_step=1.0, reduce=spread.reduce)
        with thermostat:
            trained(spread, thermostat.step)
            found.append({site: value.tolist() for site, value in thermostat.temperatures.items()})
    return dict(zip(("found", "expected"), found, strict=True))


def scaled_rows() -> Any:
    """Rows of weights whose parts are uneven, or along the other dimension, or empty on some ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    index, factors, found = torch.arange(10).view(5, 2), torch.arange(1.0, 6.0), []
    for dim, shape in ((0, (10, 3)), (0, (10,)), (1, (3, 10)), (1, (10, 10)), (0, (2, 3))):
        for placement in (Shard(0), Shard(len(shape) - 1), Replicate()):
            holder = nn.Module()
            whole = torch.arange(1.0, 1.0 + math.prod(shape)).view(shape)
            holder.weight = nn.Parameter(distribute_tensor(whole.clone(), mesh, [placement]))
            places = index[: shape[min(dim, len(shape) - 1)] // 2]
            HeadRows(holder, "weight", None, dim if len(shape) > 1 else 0, places).scale_(factors[: len(places)])
            each = factors[: len(places)].repeat_interleave(2)
            expected = whole * (each[:, None] if dim == 0 and len(shape) == 2 else each)
            found.append(torch.equal(holder.weight.full_tensor(), expected))  # type: ignore[operator]
    return found


def held_dtensors() -> Any:
    """Temperatures where queries themselves are DTensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(3)
    whole = [torch.randn(2, HEADS, 24, SIZE) for _ in range(3)]
    parts = [distribute_tensor(tensor, mesh, [Shard(1)]) for tensor in whole]
    found = []
    for tensors in (parts, whole):
        layer = Parallel()
        with attemper.Thermostat(layer, 1.0, rows=None, max_step=1.0, reduce=None) as thermostat:
            outputs = []
            for _ in range(2):
                outputs.append(layer(*tensors))
                thermostat.step()
            (temperatures,) = thermostat.temperatures.values()
        found.append({"temperatures": temperatures.tolist(), "output": whole_of(outputs[-1])})
    return dict(zip(("found", "expected"), found, strict=True))


def lone_failure() -> Any:
    """Rank 1 fails: nobody waits, and nobody's weights move."""
    spread = ddp(model())
    before, errors = weights(spread.model), []
    with attemper.QKClip(spread.model, 2.0) as clip:
        spread.model(batch(0))
        failing = mock.patch.object(clip, "_largest", side_effect=attemper.InputError("no layout"))
        with failing if dist.get_rank() == 1 else nullcontext():
            try:
                clip.step()
            except attemper.InputError as error:
                errors.append(str(error))
    return {"errors": errors, "moved": weights(spread.model) != before}


def without_a_batch(named: bool = True) -> Any:
    """Nobody has a batch in the first step, rank 0 alone in the second, and nobody in the third."""
    found, errors = [], []
    for build in (ddp, alone):
        spread = build(model(named or build is alone))
        with attemper.QKClip(spread.model, 2.0, reduce=spread.reduce) as clip:
            try:
                clip.step()
            except attemper.InputError as error:
                errors.append(str(error))
            if dist.get_rank() == 0 or build is alone:
                spread.model(batch(0))
            clip.step()
            clip.step()
        found.append({"weights": weights(spread.model), "clipped": clip.clipped})
    return {**dict(zip(("found", "expected"), found, strict=True)), "errors": errors}


def flat() -> Any:
    """FSDP's first version keeps flat pieces."""
    built = FullyShardedDataParallel(model(), use_orig_params=True, device_id=torch.device("cpu"))
    with attemper.QKClip(built, 2.0) as clip:
        built(batch(0))
        try:
            clip.step()
        except attemper.InputError as error:
            return str(error)
    return None


CASES: dict[str, Callable[[], Any]] = {
    **{f"clip {name}": lambda name=name: clipped(name) for name in SPREAD},
    **{f"clip unnamed {name}": lambda name=name: clipped(name, named=False) for name in SPREAD},
    **{
        f"held {name} {per}": lambda name=name, per=per: held(name, per) for name in SPREAD for per in ("head", "layer")
    },
    "held DTensors": held_dtensors,
    "scaled rows": scaled_rows,
    "lone failure": lone_failure,
    "without a batch": without_a_batch,
    "without a batch, unnamed": lambda: without_a_batch(named=False),
    "flat": flat,
}


if __name__ == "__main__":
    run_cases(CASES)
