"""A model of two attention layers, trained for seconds on repeated sequences: it grows a previous-token head in its
first layer and induction heads in its second.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 64
LENGTH = 40


class AttentionLayer(nn.Module):
    """Causal attention that is added to its input; places reach queries and keys alone."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key, self.value = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        def split(part: Tensor) -> Tensor:
            return part.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        query, key = self.query_key(x + places).chunk(2, -1)
        found = F.scaled_dot_product_attention(split(query), split(key), split(self.value(x)), is_causal=True)
        return x + self.out(found.transpose(1, 2).flatten(2))


class InductionModel(nn.Module):
    """Two attention layers without anything between them."""

    def __init__(self, width: int = 64, heads: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(4 * LENGTH, width)
        self.layers = nn.ModuleList(AttentionLayer(width, heads) for _ in range(2))
        self.norm, self.unembed = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.tokens

    def forward(self, input_ids: Tensor) -> Tensor:
        x, places = self.tokens(input_ids), self.places.weight[: input_ids.shape[1]]
        for layer in self.layers:
            x = layer(x, places)
        return self.unembed(self.norm(x))


def repeated(many: int, periods: tuple[int, int] = (6, LENGTH // 2)) -> tuple[Tensor, Tensor]:
    """Sequences [many, LENGTH] that repeat distinct random tokens, and after how many tokens each, [many, 1]."""
    period = torch.randint(periods[0], periods[1] + 1, (many, 1))
    ids = torch.rand(many, VOCABULARY).argsort(1)
    return ids.gather(1, torch.arange(LENGTH)[None] % period), period


@cache
def trained() -> InductionModel:
    """The model after 300 steps: about five seconds of one thread."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = InductionModel()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
        for step in range(300):
            optimizer.param_groups[0]["lr"] = 5e-3 * min(1.0, (step + 1) / 50)
            ids, period = repeated(32)
            known = torch.arange(1, LENGTH)[None] >= period  # earlier tokens follow from nothing
            loss = F.cross_entropy(model(ids)[:, :-1][known], ids[:, 1:][known])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()
