"""Which ranks hold the same part of a model and read other examples, or hold other parts of its weights: told by
wrappers around it and by its meshes.
"""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from attemper.errors import InputError
from attemper.sites.names import class_name, unwrap
from attemper.sites.sharded import is_dtensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

MEET_SECONDS = 60.0
"""So long a rank waits for the others, which may just be building their model."""
POLL_SECONDS = 0.02
_meetings = Counter[str]()
"""The last meeting of this rank with the others, by topic."""
_OTHER = re.compile(r"^(tp|tensor|pp|pipe.*|stage|cp|context|sp|seq.*|ep|expert.*)\d*$")
"""Parts of names of mesh dimensions along which ranks hold other heads, layers, tokens or experts."""
_DATA = re.compile(r"^(dp|ddp|data|fsdp|hsdp|replicate|shard|batch)\d*$")
"""Parts of names of those along which they hold other examples."""
NAME_THE_GROUP = (
    "Name the ranks that hold the same part of the model and read different examples: reduce=group, a process group "
    "of torch.distributed or a DeviceMesh of them; reduce=None reads this rank alone."
)


def is_distributed() -> bool:
    """Whether this process is one of several that torch.distributed knows."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def words_of_ranks(topic: str, word: str = "") -> dict[str, list[int]] | None:
    """The ranks that gave each word; None where not all of them call this within ``MEET_SECONDS``, for one topic. No
    collective, so no rank waits for one that never comes: all get one answer, through the store in which they have
    found each other. A rank that comes later waits for the next meeting.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    world = dist.get_world_size()
    while True:
        _meetings[topic] += 1
        said, here, decided = (f"attemper/{name}/{topic}/{_meetings[topic]}" for name in ("said", "here", "decided"))
        if not store.check([decided]):  # as those are that others have held without this rank
            break
    store.set(f"{said}/{dist.get_rank()}", f"'{word}'")
    if store.add(here, 1) == world:
        store.compare_set(decided, "", "all")
    until = time.monotonic() + MEET_SECONDS
    while not store.check([decided]):
        if time.monotonic() > until:
            store.compare_set(decided, "", "some")
        time.sleep(POLL_SECONDS)
    if store.get(decided) != b"all":
        return None
    words: dict[str, list[int]] = {}
    for rank in range(world):
        words.setdefault(store.get(f"{said}/{rank}").decode()[1:-1], []).append(rank)
    return words


def is_sharded(model: nn.Module) -> bool:
    """Whether a forward of this model on one rank waits for other ranks, as far as its modules tell."""
    if not is_distributed():
        return False
    fsdp = sys.modules.get("torch.distributed.fsdp")
    waits = (nn.SyncBatchNorm,) if fsdp is None else (nn.SyncBatchNorm, fsdp.FSDPModule)
    return any(isinstance(module, waits) for module in model.modules()) or any(map(is_dtensor, model.parameters()))


def data_parallel_group(model: nn.Module) -> ProcessGroup | None:
    """The ranks that hold what this one holds of ``model`` and read other examples; None where there are no others.

    It is told by DistributedDataParallel or FullyShardedDataParallel around or inside the model, or by the mesh of its
    DTensor parameters: dimensions of which the name says data parallel (dp, replicate, shard, fsdp), never tensor,
    pipeline, context or expert parallel. Under ``fully_shard`` alone a mesh without names is data parallel. A model
    of plain tensors that no wrapper marks is taken for the same on all ranks: see :func:`is_assumed`. A collective
    where a mesh has several data-parallel dimensions: all ranks must call it.
    """
    if not is_distributed():
        return None
    groups = _wrapper_groups(model)
    meshes = _meshes(model)
    if not groups and not meshes:
        return dist.group.WORLD
    for mesh in meshes if not groups else ():
        groups += [group for group in [_data_group(model, mesh)] if group is not None]
    found = {tuple(dist.get_process_group_ranks(group)): group for group in groups}
    if len(found) > 1:
        raise _unknown(model, f"its parameters are spread over different ranks: {' and '.join(map(_ranks, found))}")
    group = next(iter(found.values()), None)
    return None if group is None or dist.get_world_size(group) == 1 else group


def is_assumed(model: nn.Module) -> bool:
    """Whether nothing marks the data-parallel ranks of ``model``, so that all ranks are taken to hold the same."""
    return not _wrapper_groups(model) and not _meshes(model)


def group_of_mesh(mesh: DeviceMesh) -> ProcessGroup:
    """All ranks of a mesh, along all of its dimensions. A collective where there are several."""
    if mesh.size() == dist.get_world_size() and dist.group.WORLD is not None:
        return dist.group.WORLD
    return (mesh if mesh.ndim == 1 else mesh._flatten()).get_group()


def weight_ranks(model: nn.Module, modules: Iterable[nn.Module], reduce: Any) -> list[ProcessGroup]:
    """Groups of ranks that hold copies or parts of the weights of ``modules``. A number that is brought together over
    one group after the other is brought together over all ranks that it depends on.

    These are the data-parallel ranks, and the ranks of the meshes of weights that are DTensors: one group where a mesh
    has both. A collective where a mesh has several dimensions: all ranks must call it.

    Args:
        model: for the data-parallel ranks.
        modules: attention modules of it.
        reduce: "data", or the data-parallel ranks as a process group or a DeviceMesh; None for no groups at all.
    """
    if reduce is None or not is_distributed():
        return []
    data = data_parallel_group(model) if reduce == "data" else reduce
    weights: list[Any] = [weight for module in modules for weight in module.parameters()]
    meshes = dict.fromkeys(weight.device_mesh for weight in weights if is_dtensor(weight))
    found = [data if isinstance(data, dist.ProcessGroup) else group_of_mesh(data)] if data is not None else []
    found += [group_of_mesh(mesh) for mesh in meshes]
    groups = {frozenset(dist.get_process_group_ranks(group)): group for group in found}
    return [group for ranks, group in groups.items() if len(ranks) > 1 and not any(ranks < others for others in groups)]


def _wrapper_groups(model: nn.Module) -> list[ProcessGroup]:
    """The groups of DistributedDataParallel and of FSDP's first version."""
    package: Any = sys.modules.get("torch.distributed.fsdp")
    sharded = () if package is None else (package.FullyShardedDataParallel,)
    found = [part for part in model.modules() if isinstance(part, (DistributedDataParallel, *sharded))]
    if any(getattr(part, "_inter_node_pg", None) is not None for part in found):  # shards on a node, copies on others
        raise _unknown(model, "its FullyShardedDataParallel shards on some ranks and copies to others")
    groups: list[Any] = [part.process_group for part in found]
    return groups


def _meshes(model: nn.Module) -> list[DeviceMesh]:
    parameters: list[Any] = [parameter for parameter in model.parameters() if is_dtensor(parameter)]
    return list(dict.fromkeys(parameter.device_mesh for parameter in parameters))


def _data_group(model: nn.Module, mesh: DeviceMesh) -> ProcessGroup | None:
    """The data-parallel ranks of a mesh; None where it has none of them."""
    names = mesh.mesh_dim_names
    if names is None:
        package: Any = sys.modules.get("torch.distributed.fsdp")
        if package is not None and any(isinstance(part, package.FSDPModule) for part in model.modules()):
            if mesh.ndim > 1 and mesh.size() != dist.get_world_size():
                raise _unknown(model, f"its mesh {tuple(mesh.shape)} has no names for its dimensions")
            return group_of_mesh(mesh)
        names = ("tp",) * mesh.ndim
    kinds = {name: _kind_in(mesh, name) for place, name in enumerate(names) if mesh.size(place) > 1}
    if unknown := [name for name, kind in kinds.items() if kind is None]:
        raise _unknown(model, f"the name of mesh dimension {unknown[0]!r} does not say whether it is data parallel")
    data = tuple(name for name, kind in kinds.items() if kind == "data")
    if data:
        return group_of_mesh(mesh[data])
    whole = mesh._get_root_mesh()
    others = [name for name in whole.mesh_dim_names or () if name not in names and whole[name].size() > 1]
    if data := tuple(name for name in others if _kind(name) == "data"):
        return group_of_mesh(whole[data])
    if whole.size() < dist.get_world_size():
        raise _unknown(model, f"its mesh of {whole.size()} ranks says nothing of the others")
    return None


def _kind(name: str) -> str | None:
    """What ranks along a mesh dimension of this name differ in: "data" or "other"; None where it does not say."""
    parts = name.lower().split("_")
    data, other = (any(map(pattern.match, parts)) for pattern in (_DATA, _OTHER))
    return None if data == other else "data" if data else "other"


def _kind_in(mesh: DeviceMesh, name: str) -> str | None:
    """The same of a dimension that may be several of the mesh's root as one: ``dp_shard_cp`` is data parallel where
    nothing is context parallel.
    """
    kind, whole = _kind(name), mesh._get_root_mesh()
    own = whole.mesh_dim_names or ()
    if kind is not None or name in own or whole.size() < dist.get_world_size():
        return kind
    others = {one for one in own if _kind(one) == "other" and whole[one].size() > 1}
    parts = name.lower().split("_")
    return "data" if any(map(_DATA.match, parts)) and others.isdisjoint(parts) else None


def _ranks(ranks: tuple[int, ...]) -> str:
    return str(list(ranks)) if len(ranks) <= 8 else f"[{ranks[0]}, {ranks[1]}, ... {ranks[-1]}]"


def _unknown(model: nn.Module, why: str) -> InputError:
    return InputError(f"The data-parallel ranks of {class_name(unwrap(model))} are unknown: {why}. {NAME_THE_GROUP}")


def check_reduce(reduce: Any, where: str = "watch") -> None:
    """Raises InputError for what ``reduce=`` does not take."""
    package: Any = sys.modules.get("torch.distributed.device_mesh")
    groups = (dist.ProcessGroup,) if dist.is_available() else ()
    if package is not None:
        groups += (package.DeviceMesh,)
    if reduce is None or reduce == "data" or isinstance(reduce, groups):
        return
    outside = " That is the group of another rank: each rank names its own." if reduce == -100 else ""
    raise InputError(
        f'{where}(reduce=...) must be "data", a process group of torch.distributed, a DeviceMesh or None, got '
        f"{reduce!r:.60}.{outside}"
    )


def device_of_group(group: ProcessGroup, device: torch.device) -> torch.device:
    """Where a group takes its tensors: on the model's device if it can."""
    kinds = [kind.type for kind in group._device_types]
    if device.type in kinds or not kinds:
        return device
    return torch.device("cuda", torch.cuda.current_device()) if kinds[0] == "cuda" else torch.device(kinds[0])


@dataclass(frozen=True)
class Coordinate:
    """Where a data-parallel group stands among those that hold the other parts of the model."""

    pipeline: int
    tensor: int
    number: int
    """Of its fragment of a run: pipeline * ranks of tensor parallelism + tensor."""

    @classmethod
    def of(cls, ranks: Sequence[int]) -> Coordinate:
        """Of a group of these ranks. With ranks first + i stride the others lie between and beyond: the stride is the
        ranks of tensor parallelism, and so many times the group's size is a stage of the pipeline.

        Example:
            >>> Coordinate.of([5, 7])  # of 8 ranks: two stages of two data-parallel groups
            Coordinate(pipeline=1, tensor=1, number=3)
        """
        first, stride = ranks[0], ranks[1] - ranks[0] if len(ranks) > 1 else 1
        pipeline, tensor = divmod(first, stride * len(ranks))
        if tensor >= stride or list(ranks) != list(range(first, ranks[-1] + 1, stride)):
            return cls(0, first, first)  # no regular layout: the first rank is of no other group
        return cls(pipeline, tensor, pipeline * stride + tensor)
