"""Which ranks hold the weights of a model's attention: other parts of them, or copies that see other examples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from attemper.monitor.data_parallel import data_parallel_group, group_of_mesh, is_distributed
from attemper.sites.sharded import is_dtensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def weight_ranks(model: nn.Module, modules: Iterable[nn.Module], reduce: Any) -> list[ProcessGroup]:
    """Groups of ranks that hold copies or parts of the weights of ``modules``. A number that is brought together over
    one group after the other is brought together over all ranks that it depends on.

    These are the data-parallel ranks, and the ranks of the meshes of weights that are DTensors: one group where a mesh
    has both. A collective where a mesh has several dimensions: all ranks must call it.

    Args:
        model: for the data-parallel ranks.
        modules: attention modules of it.
        reduce: "data", or the data-parallel ranks as a process group or a DeviceMesh; None for no groups at all.

    Raises:
        InputError: the data-parallel ranks cannot be told.
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
