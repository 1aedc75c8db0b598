"""A loop of accelerate, watched. Run: ``python examples/accelerate_loop.py``, or ``accelerate launch`` it."""

from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import attemper
from attemper.lab.model import ByteConfig, ByteModel, encode, windows

torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
model = ByteModel(ByteConfig(layers=2, context=64))
text = windows(encode(Path(__file__).read_text(encoding="utf-8") * 8), 64)
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.AdamW(model.parameters(), lr=3e-3), DataLoader(text, batch_size=8)
)
with attemper.watch(model, every=5, rows=16) as watch:
    for batch in loader:
        with accelerator.accumulate(model):
            logits = model(batch[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            watch.step()
print(watch.table())
