"""A model that FSDP2 shards over two processes, watched in the first of them.

Run: ``torchrun --standalone --nproc-per-node 2 examples/fsdp2.py``
"""

from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import attemper
from attemper.lab.model import ByteConfig, ByteModel, encode, windows

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = ByteModel(ByteConfig(layers=2, context=64))
mesh = init_device_mesh("cpu", (world,))
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
batches = windows(encode(Path(__file__).read_text(encoding="utf-8") * 8), 64).split(8 * world)[:-1]

# A watch sends nothing to other processes: whether one of them watches, all do or none, they never wait for it.
with attemper.watch(model, every=5, rows=16) if rank == 0 else nullcontext() as watch:
    for batch in batches:
        part = batch[rank::world]
        optimizer.zero_grad()
        F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()).backward()
        optimizer.step()
        if watch:
            watch.step()
if watch:
    print(watch.table())
dist.destroy_process_group()
