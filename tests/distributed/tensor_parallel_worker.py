"""One of several processes: reads heads that are split over them. Run by ``test_tensor_parallel.py``."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import attemper
from attemper.sites import tap_buffers
from tests.distributed.models import Attention
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
    with torch.no_grad():
        found = numbers(attemper.scan(llama(key_heads=key_heads, split=True).eval(), [ids()]))
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


def taps_in_graphs() -> Any:
    """Numbers of heads that taps in compiled code on a device of CUDA graphs sum; the CPU stands in for one."""
    os.environ["TRITON_INTERPRET"] = "1"
    layer = Attention(48, 6, 2, tapped="tapped")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plan: Any = {f"{name}_proj": RowwiseParallel() if name == "o" else ColwiseParallel() for name in "qkvo"}
    parallelize_module(layer, mesh, plan)
    compiled: Any = torch.compile(layer, backend="eager")
    with mock.patch.object(tap_buffers, "has_graphs", return_value=True), torch.no_grad():
        with attemper.watch(compiled, observe="beside") as watch:  # taps alone: "auto" also reads the attention itself
            compiled(torch.randn(1, 8, 48))
            watch.step()
        found = watch.table()
    return {"backend": found.backend, "heads": [head.head for head in found.reading.heads]}


CASES: dict[str, Callable[[], Any]] = {
    "tp_plan": partial(scanned, 4),
    "grouped keys": partial(scanned, 2),
    "stored": trained_and_stored,
    "taps in graphs": taps_in_graphs,
}


if __name__ == "__main__":
    run_cases(CASES)
