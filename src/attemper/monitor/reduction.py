"""Training on many ranks: which of them hold the same part of a model, and one sample of all of them.

On a sampled step, after it, each rank joins two collectives: a SUM of the packed sums of all heads, and a MAX of their
largest logits. ``slots.py`` has the layout. No other step has any. A failure of ours never keeps a rank from joining.
"""

from __future__ import annotations

import hashlib
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from attemper.errors import InputError
from attemper.monitor.model import device_of, hash_of
from attemper.monitor.slots import MergedSample, Slots, identity
from attemper.monitor.snapshot import Snapshot
from attemper.readings.sample import SiteKey, SiteLabel
from attemper.sites.names import class_name, unwrap
from attemper.sites.sharded import is_dtensor
from attemper.text import clean_name

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from attemper.monitor.collector import Collector

Result = TypeVar("Result")
Fail = Callable[[str, Exception], None]
"""Takes note of a failure of ours: of what, and the error."""
POLL_SECONDS = 0.02
_meetings = [0]
"""How often the ranks have met."""
MOST_TOLD = 3
"""Differences between ranks that a message has."""
_NONE = -(1 << 62)
"""No step."""
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


def are_here(seconds: float) -> bool:
    """Whether all ranks call this within so many seconds. No collective, so no rank waits for one that never comes: all
    get the same answer, by a word in the store through which the ranks have found each other.
    """
    _meetings[0] += 1
    store: Any = dist.distributed_c10d._get_default_store()
    here, decided = (f"attemper/{word}/{_meetings[0]}" for word in ("here", "decided"))
    if store.add(here, 1) == dist.get_world_size():
        store.compare_set(decided, "", "yes")
    until = time.monotonic() + seconds
    while not store.check([decided]):
        if time.monotonic() > until:
            store.compare_set(decided, "", "no")
        time.sleep(POLL_SECONDS)
    return store.get(decided) == b"yes"


def data_parallel_group(model: nn.Module) -> ProcessGroup | None:
    """The ranks that hold what this one holds of ``model`` and read other examples; None where there are no others.

    It is told by DistributedDataParallel or FullyShardedDataParallel around or inside the model, or by the mesh of its
    DTensor parameters: dimensions of which the name says data parallel (dp, replicate, shard, fsdp), never tensor,
    pipeline, context or expert parallel. Under ``fully_shard`` alone a mesh without names is data parallel. A model
    of plain tensors that no wrapper marks is taken for the same on all ranks: see :func:`is_assumed`. A collective
    where a mesh has several data-parallel dimensions: all ranks must call it.

    Raises:
        InputError: the group cannot be told.
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
    """The meshes of the parameters that are DTensors."""
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
    kinds = {name: _kind(name) for place, name in enumerate(names) if mesh.size(place) > 1}
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


def _ranks(ranks: tuple[int, ...]) -> str:
    return str(list(ranks)) if len(ranks) <= 8 else f"[{ranks[0]}, {ranks[1]}, ... {ranks[-1]}]"


def _unknown(model: nn.Module, why: str) -> InputError:
    return InputError(f"The data-parallel ranks of {class_name(unwrap(model))} cannot be told: {why}. {NAME_THE_GROUP}")


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


@dataclass(frozen=True)
class _Table:
    """What one rank has seen by the end of its first sampled step."""

    sites: tuple[SiteLabel, ...]
    missing: frozenset[str]
    """Names of sites of which it knows why it has none of them."""
    failed: bool
    parameters: str
    """Digest of what data-parallel ranks share; empty where that is known otherwise."""


class Reduction:
    """Makes the samples of a group of ranks one. All of them call ``begin`` once and ``merge`` on the same steps.

    Attributes:
        ranks: numbers of the processes, ascending.
        collectives: how many this has called.
    """

    def __init__(self, group: ProcessGroup | None, model: nn.Module, fewest_keys: int, *, assumed: bool) -> None:
        """
        Args:
            group: None where this rank has no others.
            fewest_keys: of the watch.
            assumed: whether nothing says that the ranks of the group hold the same.
        """
        self._group, self._model, self._fewest_keys, self._assumed = group, model, fewest_keys, assumed
        device = device_of(model) or torch.device("cpu")
        self.rank = dist.get_rank()
        self.ranks = (self.rank,) if group is None else tuple(sorted(dist.get_process_group_ranks(group)))
        self.coordinate = Coordinate.of(self.ranks)
        self._device = device if group is None else device_of_group(group, device)
        self._slots: Slots | None = None
        self.collectives = self._failures = 0

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one of its group that writes and judges."""
        return self.rank == self.ranks[0]

    @property
    def bytes_per_sample(self) -> int | None:
        """What a rank gives to both collectives of a sampled step; None before the first."""
        return None if self._slots is None else 8 * (self._slots.added_size + self._slots.largest_size)

    @property
    def about(self) -> dict[str, Any]:
        """What the store says of it."""
        where = self.coordinate
        facts = {"ranks": len(self.ranks), "first_rank": self.ranks[0], "processes": dist.get_world_size()}
        sent = {} if self.bytes_per_sample is None else {"collectives": 2, "bytes": self.bytes_per_sample}
        return {"reduced": {**facts, "pipeline": where.pipeline, "tensor": where.tensor, **sent}}

    def __str__(self) -> str:
        if self._group is None:
            return "no other data-parallel ranks"
        sent = "" if self.bytes_per_sample is None else f", 2 collectives of {self.bytes_per_sample:,} bytes a sample"
        return f"merged over {len(self.ranks)} ranks{sent}"

    def begin(self, options: Mapping[str, Any], first: int | None, last: int | None) -> tuple[int | None, int | None]:
        """The first and the last step of the run that goes on, as the first rank knows them from its store: by them all
        ranks sample the same steps.

        Raises:
            InputError: the ranks were given other options.
        """
        if self._group is None:
            return first, last
        digest = _digest(sorted((name, repr(value)) for name, value in options.items()))
        known = [_NONE if step is None or not self.is_first else step for step in (first, last)]
        high, low, *steps = self._largest_of([digest, -digest, *known])
        if high != -low:
            found = self._gather({name: repr(value) for name, value in options.items()})
            one, other = found[0], next(one for one in found if one != found[0])
            names = [name for name in one if one[name] != other.get(name)]
            raise InputError(
                f"The ranks watch otherwise: {names[0]} is {one[names[0]]} on rank {self.ranks[0]} and "
                f"{other[names[0]]} on rank {self.ranks[found.index(other)]}. Give watch the same options on all ranks."
            )
        return tuple(None if step == _NONE else step for step in steps)  # type: ignore[return-value]

    @torch.no_grad()
    def merge(self, collector: Collector, period: int, failures: int, fail: Fail) -> MergedSample | None:
        """The sample of all ranks of the step that has ended, without waiting for a device; None if none has seen a
        site so far. Whatever goes wrong on one rank, it joins the others, with no rows.

        Args:
            collector: has the sample of this rank.
            period: which of its samples is of the step.
            failures: of ours on this rank so far.
            fail: called with what goes wrong.

        Raises:
            InputError: the ranks do not hold the same part of the model, so that their rows cannot be added. On all of
                them, after the first sampled step.
        """
        found = _attempt(collector.snapshot, fail)
        if self._slots is None:
            table = _attempt(lambda: self._table(found, period, failures, collector.skipped), fail)
            self._slots = self._agree(table or _Table((), frozenset(), failed=True, parameters=""))
        if self._slots is None:
            return None
        new, slots = failures - self._failures, self._slots
        packed = None if found is None else _attempt(lambda: slots.pack(found, period, new, self._device), fail)
        self._failures = failures + (packed is None)
        added, largest = packed or slots.nothing(new + 1, self._device)
        own = added.clone()
        self._all_reduce(added, dist.ReduceOp.SUM)
        slots.put_distances(largest, own, added, self.rank)
        self._all_reduce(largest, dist.ReduceOp.MAX)
        backends = () if found is None else found.backends
        return MergedSample(slots, period, backends, len(self.ranks), added, largest)

    # --- what the ranks agree on ---

    def _table(self, found: Snapshot | None, period: int, failures: int, missing: Mapping[str, str]) -> _Table:
        labels: dict[SiteKey, SiteLabel] = {}
        if found is not None:
            seen = found.sites if found.period == period else ()
            labels = {site.key: site.label for site in (*seen, *found.taps.of_step(period)[0])}
        parameters = hash_of(self._model, buffers=False) if self._assumed and self._group is not None else ""
        sites = tuple(labels[key] for key in sorted(labels))
        return _Table(sites, frozenset(missing), found is None or failures > 0, parameters)

    def _agree(self, own: _Table) -> Slots | None:
        """The slots of all ranks; None if none has seen a site."""
        if self._group is not None:
            digest = _digest([own.parameters, *(astuple(identity(label)) for label in own.sites)])
            high, low = self._largest_of([digest, -digest])
            if high != -low:
                return Slots(self._resolve(self._gather(own)), self._fewest_keys)
        return Slots(own.sites, self._fewest_keys) if own.sites else None

    def _resolve(self, tables: Sequence[_Table]) -> tuple[SiteLabel, ...]:
        """The sites of all ranks, whose tables differ. A rank may lack some if it saw none in this step, if it says
        why, or if something of ours failed there: it has no rows of them then.
        """
        if odd := [rank for rank, table in self._by_rank(tables) if table.parameters != tables[0].parameters]:
            raise self._disagree([f"the parameters of rank {odd[0]} are others than those of rank {self.ranks[0]}"])
        found: dict[SiteKey, tuple[SiteLabel, int]] = {}
        differences = []
        for rank, table in self._by_rank(tables):
            for label in table.sites:
                known, other = found.setdefault(label.key, (label, rank))
                differences += _differences(label, rank, known, other)
        for rank, table in self._by_rank(tables):
            sites = {label.key for label in table.sites}
            for key, (label, other) in found.items() if sites and not table.failed else ():
                if key not in sites and label.name not in table.missing:
                    differences.append(f"rank {other} has seen {_name(label)}, rank {rank} has not")
        if differences:
            raise self._disagree(differences)
        return tuple(found[key][0] for key in sorted(found))

    def _by_rank(self, tables: Sequence[_Table]) -> Iterator[tuple[int, _Table]]:
        return zip(self.ranks, tables, strict=True)

    def _disagree(self, differences: Sequence[str]) -> InputError:
        more = f"; and {len(differences) - MOST_TOLD} more" if len(differences) > MOST_TOLD else ""
        told = "; ".join(differences[:MOST_TOLD])
        return InputError(f"The ranks do not hold the same part of the model: {told}{more}. {NAME_THE_GROUP}")

    # --- collectives ---

    def _all_reduce(self, numbers: Tensor, operation: Any) -> None:
        if self._group is not None:
            self.collectives += 1
            dist.all_reduce(numbers, operation, group=self._group)

    def _largest_of(self, numbers: Sequence[int]) -> list[int]:
        """Over the ranks, of each of these numbers. Waits for them."""
        packed = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        self._all_reduce(packed, dist.ReduceOp.MAX)
        return packed.tolist()

    def _gather(self, own: Any) -> list[Any]:
        """What each rank has, in their order: to tell what differs."""
        found: list[Any] = [None] * len(self.ranks)
        self.collectives += 1
        dist.all_gather_object(found, own, group=self._group)
        return found


def reduction_of(model: nn.Module, reduce: Any, fewest_keys: int) -> Reduction | None:
    """What ``watch(reduce=...)`` asks for; None where this process is the only one.

    Raises:
        InputError: it is none of what it may be, or the group cannot be told.
    """
    check_reduce(reduce)
    if reduce is None or not is_distributed():
        return None
    if reduce == "data":
        return Reduction(data_parallel_group(model), model, fewest_keys, assumed=is_assumed(model))
    group = reduce if isinstance(reduce, dist.ProcessGroup) else group_of_mesh(reduce)
    return Reduction(group if dist.get_world_size(group) > 1 else None, model, fewest_keys, assumed=False)


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


def _attempt(action: Callable[[], Result], fail: Fail) -> Result | None:
    try:
        return action()
    except Exception as error:  # whatever it is, the other ranks wait for this one
        fail("ranks", error)
        return None


def device_of_group(group: ProcessGroup, device: torch.device) -> torch.device:
    """Where a group takes its tensors: on the model's device if it can."""
    kinds = [kind.type for kind in group._device_types]
    if device.type in kinds or not kinds:
        return device
    return torch.device("cuda", torch.cuda.current_device()) if kinds[0] == "cuda" else torch.device(kinds[0])


def _digest(parts: Iterable[object]) -> int:
    """Of what ranks have to agree on; fits an int64."""
    return int.from_bytes(hashlib.blake2b(repr(list(parts)).encode(), digest_size=7).digest(), "big")


def _differences(label: SiteLabel, rank: int, known: SiteLabel, other: int) -> Iterator[str]:
    for name, said in (("heads", "heads"), ("first_head", "first head"), ("normalizer", "normalizer")):
        one, two = getattr(known, name), getattr(label, name)
        if one != two:
            yield f"{said} of {_name(label)}: {one} on rank {other}, {two} on rank {rank}"


def _name(label: SiteLabel) -> str:
    return f"{clean_name(label.name)} ({label.kind}, {label.mode})"
