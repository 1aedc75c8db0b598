"""Training on many ranks: one sample of all that hold the same part of a model.

On a sampled step, after it, each rank joins two collectives: a SUM of the packed sums of all heads, and a MAX of their
largest logits. No other step has any. ``merged_sample.py`` has the layout. A failure of ours never keeps a rank
from joining.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from attemper.distributed.data_parallel import (
    NAME_THE_GROUP,
    Coordinate,
    check_reduce,
    data_parallel_group,
    device_of_group,
    group_of_mesh,
    is_assumed,
    is_distributed,
)
from attemper.distributed.merged_sample import MergedSample, Slots, identity
from attemper.errors import InputError
from attemper.monitor.checked_model import device_of, hash_of
from attemper.monitor.snapshot import Snapshot
from attemper.readings.labels import Modules, joint_label, reasons, uneven
from attemper.readings.sample import SiteKey, SiteLabel
from attemper.text import call_of, clean_name, first_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from attemper.monitor.collector import Collector

Result = TypeVar("Result")
Fail = Callable[[str, Exception], None]
"""Takes note of a failure of ours: of what, and the error."""
MOST_TOLD = 3
"""Differences between ranks that a message has."""
NO_SLOT = "it was not there, or was another, in the first sampled step, whose sites all ranks agreed on"
_NONE = -(1 << 62)
"""No step."""


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
            assumed: whether nothing says that the ranks of the group hold the same.
        """
        self._group, self._model, self._fewest_keys, self._assumed = group, model, fewest_keys, assumed
        device = device_of(model) or torch.device("cpu")
        self.rank = dist.get_rank()
        self.ranks = (self.rank,) if group is None else tuple(sorted(dist.get_process_group_ranks(group)))
        self.coordinate = Coordinate.of(self.ranks)
        self._device = device if group is None else device_of_group(group, device)
        self._slots: Slots | None = None
        self._uneven: Modules = frozenset()
        """Modules that attended another number of times on some rank, in the first sampled step."""
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
    def merge(
        self, collector: Collector, period: int, failures: int, fail: Fail, loss: float | Tensor | None = None
    ) -> MergedSample | None:
        """The sample of all ranks of the step that has ended, without waiting for a device; None if none has seen a
        site so far. Whatever goes wrong on one rank, it joins the others, with no rows.

        Args:
            collector: has the sample of this rank.
            period: which of its samples is of the step.
            failures: of ours on this rank so far.
            loss: of the step on this rank; None where it has none.

        Raises:
            InputError: the ranks do not hold the same part of the model, so that their rows cannot be added. On all of
                them, after the first sampled step.
        """
        found = _attempt(collector.snapshot, fail)
        if self._slots is None:
            table = _attempt(lambda: self._table(found, period, failures, collector.skipped), fail)
            self._slots = self._agree(table or _Table((), frozenset(), failed=True, parameters=""))
            if self._slots is not None:
                found = _attempt(lambda: self._fix_calls(collector), fail)
        if self._slots is None:
            return None
        new, slots = failures - self._failures, self._slots
        packed = None if found is None else _attempt(lambda: self._pack(slots, found, collector, period, new), fail)
        self._failures = failures + (packed is None)
        added, largest = packed or slots.nothing(new + 1, self._device)
        if loss is not None:
            _attempt(lambda: slots.put_loss(added, loss), fail)
        own = added.clone()
        self._all_reduce(added, dist.ReduceOp.SUM)
        slots.put_distances(largest, own, added, self.rank)
        self._all_reduce(largest, dist.ReduceOp.MAX)
        backends = () if found is None else found.backends
        return MergedSample(slots, period, backends, len(self.ranks), added, largest)

    def _fix_calls(self, collector: Collector) -> Snapshot:
        """The sample once calls are sites as all ranks have them, which they stay."""
        assert self._slots is not None
        collector.call_sites.joined |= self._uneven
        collector.join_calls(reasons(self._uneven, "on other ranks"))
        collector.call_sites.fixed = frozenset((call_of(one.name)[0], one.mode) for one in self._slots.labels)
        return collector.snapshot()

    def _pack(
        self, slots: Slots, found: Snapshot, collector: Collector, period: int, failures: int
    ) -> tuple[Tensor, Tensor]:
        collector.skipped |= dict.fromkeys(slots.lacking(found), NO_SLOT)
        return slots.pack(found, period, failures, self._device)

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
        self._uneven = uneven(table.sites for table in tables if not table.failed)
        tables = [
            replace(one, sites=tuple(dict.fromkeys(joint_label(site, self._uneven) for site in one.sites)))
            for one in tables
        ]
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
        told = first_of(differences, MOST_TOLD, "; ")
        return InputError(f"The ranks do not hold the same part of the model: {told}. {NAME_THE_GROUP}")

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
    """What ``watch(reduce=...)`` asks for; None where this process is the only one."""
    check_reduce(reduce)
    if reduce is None or not is_distributed():
        return None
    if reduce == "data":
        return Reduction(data_parallel_group(model), model, fewest_keys, assumed=is_assumed(model))
    group = reduce if isinstance(reduce, dist.ProcessGroup) else group_of_mesh(reduce)
    return Reduction(group if dist.get_world_size(group) > 1 else None, model, fewest_keys, assumed=False)


def _attempt(action: Callable[[], Result], fail: Fail) -> Result | None:
    try:
        return action()
    except Exception as error:  # whatever it is, the other ranks wait for this one
        fail("ranks", error)
        return None


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
