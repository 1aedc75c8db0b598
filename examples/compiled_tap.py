"""A compiled model with a tap beside its attention: one graph, watched. Run: ``python examples/compiled_tap.py``."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper


class Attention(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.qkv = heads, nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        attemper.tap(query, key, is_causal=True, name="attention")
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)


torch.manual_seed(0)
model = torch.compile(Attention(), fullgraph=True, backend="aot_eager")
with attemper.watch(model, every=10) as watch:
    for _ in range(20):
        model(torch.randn(2, 128, 64)).square().mean().backward()
        watch.step()
print(watch.table())
