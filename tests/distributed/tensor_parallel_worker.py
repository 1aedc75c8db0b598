"""One of several processes: reads heads that are split over them. Run by ``test_tensor_parallel.py``."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel

import attemper
from attemper.sites import tap_buffers
from tests.support.ranks import folder_of_cases, run_cases

TOKENS = 40


def llama(*, key_heads: int = 4, split: bool = False) -> Any:
    """A tiny Llama that stands in the folder, whole or with this process's part of every layer."""
    from transformers import LlamaForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    options: dict[str, Any] = {"distributed_config": DistributedConfig(tp_plan="auto")} if split else {}
    return LlamaForCausalLM.from_pretrained(
        folder_of_cases() / f"llama-{key_heads}", attn_implementation="sdpa", **options
    )


def ids() -> Tensor:
    return torch.randint(0, 99, (3, TOKENS), generator=torch.Generator().manual_seed(1))


def numbers(scan: Any) -> list[list[Any]]:
    """Site, number, entropy and largest logit of every head."""
    return [[site.name, head.head, head.entropy_nats, head.max_logit] for site, head in scan.reading.placed_heads]


def scanned(key_heads: int) -> Any:
    try:
        model = llama(key_heads=key_heads, split=True).eval()
        with torch.no_grad():
            found = numbers(attemper.scan(model, [ids()]))
    except Exception as error:  # what transformers says of a model that it cannot split
        return {"refused": f"{type(error).__name__}: {error}"}
    whole = numbers(attemper.scan(llama(key_heads=key_heads).eval(), [ids()]))
    return {"found": found, "whole": whole, "ids": ids().tolist()}


def trained_and_stored() -> Any:
    """A run of a model of which each process trains its heads, stored by each, and its alarms."""
    model = llama(split=True).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    store = folder_of_cases() / "run"
    with attemper.watch(model, store=store, limits={"logits": -1.0}, fewest_keys=2) as watch:
        for _ in range(3):
            optimizer.zero_grad()
            model(ids(), labels=ids()).loss.backward()
            optimizer.step()
            watch.step()
        table = watch.table()
        alarms = [[alarm.site, alarm.head] for alarm in watch.alarms() if alarm.kind == "logits"]
    return {"heads": [head.head for head in table.reading.heads], "alarms": alarms}


class Parallel(nn.Module):
    """Attention over queries, keys and values that are DTensors."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return nn.functional.scaled_dot_product_attention(query, key, value)


class Attention(nn.Module):
    """Attention with grouped queries, on the heads that its projections make here. It names no number of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = nn.Linear(32, 48), nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part(x).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.wq, self.wk, self.wv))
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def colwise_projections() -> Any:
    """Heads of queries that split projections have made."""
    torch.manual_seed(0)
    layer = Attention()
    x = torch.randn(2, TOKENS, 32)
    whole = numbers(attemper.scan(layer.eval(), [x]))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plan: Any = {name: ColwiseParallel() for name in ("wq", "wk", "wv")}
    parallelize_module(layer, mesh, plan)
    with torch.no_grad():
        return {"found": numbers(attemper.scan(layer, [x])), "whole": whole}


class Tapped(Attention):
    """The same with a tap beside the attention."""

    def forward(self, x: Tensor) -> Tensor:
        query, key = (part(x).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.wq, self.wk))
        attemper.tap(query, key, is_causal=True, enable_gqa=True, name="tapped")
        return super().forward(x)


def taps_in_graphs() -> Any:
    """Numbers of heads that taps in compiled code on a device of CUDA graphs sum; the CPU stands in for one."""
    os.environ["TRITON_INTERPRET"] = "1"
    layer, mesh = Tapped(), init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plan: Any = {name: ColwiseParallel() for name in ("wq", "wk", "wv")}
    parallelize_module(layer, mesh, plan)
    compiled: Any = torch.compile(layer, backend="eager")
    with mock.patch.object(tap_buffers, "has_graphs", return_value=True), torch.no_grad():
        with attemper.watch(compiled) as watch:
            compiled(torch.randn(1, 8, 32))
            watch.step()
        found = watch.table()
    return {"backend": found.backend, "heads": [head.head for head in found.reading.heads]}


def dtensor_heads() -> Any:
    """Numbers of heads of queries that are DTensors."""
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    torch.manual_seed(3)
    whole = [torch.randn(2, 6, TOKENS, 8) for _ in range(3)]
    layer = Parallel()
    with attemper.watch(layer) as watch:
        layer(*(distribute_tensor(tensor, mesh, [Shard(1)]) for tensor in whole))
    return [head.head for head in watch.table().reading.heads]


CASES: dict[str, Callable[[], Any]] = {
    "colwise": colwise_projections,
    "tp_plan": partial(scanned, 4),
    "grouped keys": partial(scanned, 2),
    "one key head": partial(scanned, 1),
    "stored": trained_and_stored,
    "DTensor queries": dtensor_heads,
    "taps in graphs": taps_in_graphs,
}


if __name__ == "__main__":
    run_cases(CASES)
