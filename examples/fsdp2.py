"""A model that FSDP2 shards over two processes. Its samples are one of all ranks, and the first rank stores them.

Run: ``torchrun --standalone --nproc-per-node 2 examples/fsdp2.py``; then ``attemper show runs/fsdp2``
"""

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

# On sampled steps, and on no others, two collectives make the samples of all ranks one. Every rank watches.
with attemper.watch(model, every=5, rows=16, store="runs/fsdp2", reduce="data") as watch:
    for batch in batches:
        part = batch[rank::world]
        optimizer.zero_grad()
        F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()).backward()
        optimizer.step()
        watch.step()
if rank == 0:
    print(watch.table())
    with attemper.open("runs/fsdp2") as run:
        print(run)
dist.destroy_process_group()
