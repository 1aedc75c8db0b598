"""Tensor-parallel attention: queries and keys as DTensors are measured where they are, on the heads of this process.

Nothing is gathered: a collective that only some processes join would wait forever. What the local part does not
determine (a split along tokens or batch, a sum that is pending) is refused. Heads keep the numbers that they have in
the whole model: of queries that are DTensors their placement says which they are, of plain queries that a projection
with split weights has made (transformers' ``tp_plan="auto"``) the placement of these weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attemper.sites.observation import AttentionCall, UnsupportedCallError, stated_heads

HEADS = 1
"""The dimension of [B, H, Q, D] that may be split."""
_first: ContextVar[int | None] = ContextVar("first head of a tap", default=None)
"""The number of the first head here, while a tap on DTensors shows its observers plain tensors."""


def local(module: nn.Module, call: AttentionCall) -> AttentionCall:
    """``call`` with plain tensors: the heads of this process."""
    if not any(is_dtensor(tensor) for tensor in (call.query, call.key, call.mask, call.options.sink_logits)):
        if _context_parallel():
            raise UnsupportedCallError(module, "context parallelism spreads its sequences over processes")
        return call
    query, key = call.query, call.key
    split = _split(module, query)
    if call.packing is not None or split != _split(module, key) or isinstance(call.options.temperature, Tensor):
        raise UnsupportedCallError(module, "its queries and keys are DTensors that are split differently")
    here = replace(call, query=_local(query), key=_local(key), mask=_mask(module, call.mask, split))
    if here.query.shape[HEADS] * key.shape[HEADS] != here.key.shape[HEADS] * query.shape[HEADS]:
        raise UnsupportedCallError(module, "its heads are split so that queries and keys of one group are apart")
    sink = _sink(module, call.options.sink_logits, split)
    return replace(here, options=replace(call.options, sink_logits=sink))


def first_head(module: nn.Module, call: AttentionCall) -> int:
    """The number in the whole model of the first head of a call, which ``local`` did not change; 0 where none is split.

    Args:
        module: the one in which the attention runs, with its projections.
        call: of DTensors, or of plain tensors that hold the heads of this process.
    """
    if sys.modules.get("torch.distributed.tensor") is None:
        return 0
    if (known := _first.get()) is not None:
        return known
    if is_dtensor(call.query):
        heads = call.query.shape[HEADS]
        part, parts = part_of(call.query, HEADS)
        return min(part * -(-heads // parts), heads)
    heads, size, groups = call.query.shape[HEADS], call.query.shape[-1], call.key.shape[HEADS]
    stated = stated_heads(module)
    # Features of a projection of queries, or of one of queries, keys and values.
    features = (heads * size, (heads + 2 * groups) * size) if stated is None else ()
    for weight in (one for one in module.parameters() if is_dtensor(one) and one.dim() == 2):
        for dim in (0, 1):  # transformers' Conv1D has its outputs last
            part, parts = part_of(weight, dim)
            whole = stated == parts * heads or weight.shape[dim] in [parts * one for one in features]
            if parts > 1 and whole:
                return part * heads
    return 0


@contextmanager
def numbered_from(first: int) -> Iterator[None]:
    """Heads are numbered from ``first`` on, whatever holds them."""
    before = _first.set(first)
    try:
        yield
    finally:
        _first.reset(before)


def part_of(tensor: Any, dimension: int) -> tuple[int, int]:
    """Which part of a DTensor along a dimension is here, and of how many; (0, 1) if it is not split along it."""
    part, parts = 0, 1
    for place, placement in enumerate(tensor.placements):
        if getattr(placement, "dim", None) in (dimension, dimension - tensor.dim()):
            size = tensor.device_mesh.size(place)
            part, parts = part * size + tensor.device_mesh.get_local_rank(place), parts * size
    return part, parts


def heads_like(query: Any, values: Tensor) -> Tensor:
    """Values [1, H or 1, 1] of the heads here as a DTensor that can be computed with ``query``."""
    package: Any = sys.modules["torch.distributed.tensor"]
    shard, whole = package.Shard(HEADS), package.Replicate()
    split = [values.shape[HEADS] > 1 and one.is_shard() and one.dim == HEADS for one in query.placements]
    placements = [shard if one else whole for one in split]
    return package.DTensor.from_local(values, query.device_mesh, placements, run_check=False)


def local_places(tensor: Any, dimension: int) -> Tensor:
    """The places along a dimension that the part of a DTensor on this rank has, ascending."""
    package: Any = sys.modules["torch.distributed.tensor"]
    alike = [_along(placement, dimension - tensor.dim(), dimension) for placement in tensor.placements]
    whole = torch.arange(tensor.shape[dimension])
    return package.distribute_tensor(whole, tensor.device_mesh, alike, src_data_rank=None).to_local()


def _along(placement: Any, *dimensions: int) -> Any:
    """The placement of a list of places along a dimension, of a tensor that is placed so."""
    package: Any = sys.modules["torch.distributed.tensor"]
    if getattr(placement, "dim", None) not in dimensions:
        return package.Replicate()
    if placement.is_shard():
        return package.Shard(0)
    return type(placement)(0, split_factor=placement.split_factor)  # FSDP2 of weights that are split already


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is split over processes."""
    # Nobody has made a DTensor where its package is not even imported.
    package = sys.modules.get("torch.distributed.tensor")
    return package is not None and isinstance(tensor, package.DTensor)


def _context_parallel() -> bool:
    """Whether torch's ``context_parallel`` is on: plain queries and keys are then parts of sequences."""
    package: Any = sys.modules.get("torch.distributed.tensor.experimental._context_parallel._attention")
    if package is None:
        return False
    # Both of its ways give DTensors' dispatcher rings in place of attention, and take them back.
    handlers = package.DTensor._op_dispatcher._custom_op_handlers
    return any(operator in handlers for operator in package.custom_ops)


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor


def _split(module: nn.Module, tensor: Any, dimension: int = HEADS) -> tuple[bool, ...]:
    """For each dimension of the mesh, whether heads are split along it; empty where nothing is split."""
    if not is_dtensor(tensor):
        return ()
    for placement in tensor.placements:
        if not placement.is_replicate() and not (placement.is_shard() and placement.dim == dimension):
            raise UnsupportedCallError(
                module,
                f"its queries, keys or masks are DTensors placed as {tuple(map(str, tensor.placements))}: only heads "
                "may be split, whole sequences have to be on one process",
            )
    split = tuple(placement.is_shard() for placement in tensor.placements)
    return split if any(split) else ()


def _mask(module: nn.Module, mask: Any, split: tuple[bool, ...]) -> Tensor | None:
    if mask is None:
        return None
    shared = mask.dim() < 3 or mask.shape[-3] == 1
    if _split(module, mask) == split or (shared and not _split(module, mask)):
        return _local(mask)
    raise UnsupportedCallError(module, "its mask has a row for each head, and is not split as its queries are")


def _sink(module: nn.Module, sink: Any, split: tuple[bool, ...]) -> Any:
    if sink is not None and _split(module, sink, 0) != split:
        raise UnsupportedCallError(module, "its sink logits are not split as its heads are")
    return _local(sink)
