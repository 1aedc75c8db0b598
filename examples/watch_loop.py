"""A plain training loop, watched: one line around it, one line in it. Run: ``python examples/watch_loop.py``."""

from pathlib import Path

import torch

import attemper
from attemper.lab.model import ByteConfig, ByteModel, encode, windows

torch.manual_seed(0)
model = ByteModel(ByteConfig(layers=2, context=64))
batches = windows(encode(Path(__file__).read_text(encoding="utf-8") * 4), 64).split(8)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

with attemper.watch(model, every=5, rows=16) as watch:
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = model.loss(batch)
        loss.backward()
        optimizer.step()
        watch.step(loss=loss)
        if step % 5 == 0:
            sharpest = min(h.normalized_entropy or 1.0 for site in watch.table().sites for h in site.heads)
            print(f"step {step}: loss {loss.item():.2f} nats, sharpest head {sharpest:.2f} of log n")

print(watch.table())
