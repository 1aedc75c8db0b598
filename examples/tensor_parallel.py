"""A model whose heads are split over two processes by transformers' ``tp_plan="auto"``: one run with all of its heads.

Run: ``torchrun --standalone --nproc-per-node 2 examples/tensor_parallel.py [FOLDER]``, with the folder of a model that
has a plan; without one, a tiny random Llama. Then ``attemper show runs/split``
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging

import attemper

dist.init_process_group("gloo")
logging.disable_progress_bar()
rank = dist.get_rank()
folder = [sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
if rank == 0 and len(sys.argv) == 1:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(folder[0])
dist.barrier()
model = AutoModelForCausalLM.from_pretrained(folder[0], distributed_config=DistributedConfig(tp_plan="auto"))
ids = torch.arange(400).view(2, 200) % 250

# Each rank reads its own heads, numbered as in the whole model, and stores them. The run shows each site once.
with attemper.watch(model.train(), store="runs/split") as watch:
    for _ in range(3):
        model(ids, labels=ids).loss.backward()
        watch.step()
print(f"rank {rank}: heads {[head.head for head in watch.table().reading.sites[0].heads]}")
dist.barrier()
if rank == 0:
    with attemper.open("runs/split") as run:
        print(run.at(2))
dist.destroy_process_group()
