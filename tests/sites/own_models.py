"""Models that people write themselves, each with the entropies of its weights computed another way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.attention.flex_attention as flex
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attemper


class Own(nn.Module):
    """nanoGPT's way: packed projections, F.scaled_dot_product_attention."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.n_head, self.dropout = nn.Linear(32, 96), 4, dropout
        self.qkv.weight.data *= 4

    def split(self, x: Tensor) -> list[Tensor]:
        return [part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]

    def weights(self, x: Tensor) -> Tensor:
        query, key, _ = self.split(x.double())
        scores = query @ key.transpose(-2, -1) / 8**0.5
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -torch.inf).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.split(x)
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)


class Tapped(Own):
    """A model with a tap beside its attention."""

    def __init__(self, name: str = "first") -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        del attention_mask
        query, key, value = self.split(x)
        attemper.tap(query, key, is_causal=True, name=self.name)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Checkpointed(nn.Module):
    """A model whose block is computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Tapped()

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=False)


class Hand(Own):
    """The same with a softmax by hand, and dropout between it and the values."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.split(x)
        scores = query @ key.transpose(-2, -1) / 8**0.5
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = F.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
        return F.dropout(weights, self.dropout, self.training) @ value


class Folded(Own):
    """Batch and heads folded into one dimension, as many older models do it; bmm and a bias of -1e4."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.flatten(0, 1) for part in self.split(x))
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = torch.bmm(query, key.transpose(1, 2)) / 8**0.5
        weights = torch.softmax(scores.masked_fill(hidden, torch.finfo(scores.dtype).min), -1)
        return torch.bmm(weights, value)


class Flex(Own):
    """FlexAttention, called eagerly."""

    def forward(self, x: Tensor) -> Tensor:
        mask = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, x.shape[1], x.shape[1], device="cpu")
        with torch.no_grad():
            return flex.flex_attention(*self.split(x), block_mask=mask)  # type: ignore[return-value]


def _own(kind: type[Own]) -> Callable[..., tuple[Own, tuple[Tensor, ...]]]:
    def build(dropout: float = 0.0, tokens: int = 20) -> tuple[Own, tuple[Tensor, ...]]:
        return kind(dropout).eval(), (torch.randn(2, tokens, 32),)

    return build


def _encoder(dropout: float = 0.0) -> tuple[nn.Module, tuple[Any, ...]]:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    padding = torch.zeros(3, 20, dtype=torch.bool)
    padding[1, 15:] = True
    return model, (torch.randn(3, 20, 32), None, padding)


def _encoder_decoder(dropout: float = 0.0) -> tuple[nn.Module, tuple[Any, ...]]:
    model = nn.Transformer(32, 4, 1, 1, 64, dropout, batch_first=True).eval()
    mask = nn.Transformer.generate_square_subsequent_mask(7)
    return model, (torch.randn(2, 20, 32), torch.randn(2, 7, 32), None, mask)


OWN: dict[str, Callable[..., tuple[Any, tuple[Any, ...]]]] = {
    "sdpa": _own(Own),
    "softmax": _own(Hand),
    "folded": _own(Folded),
    "flex": _own(Flex),
    "encoder": _encoder,
    "encoder-decoder": _encoder_decoder,
}

ROWS = {
    "sdpa": ("causal attention", "F.scaled_dot_product_attention"),
    "softmax": ("causal attention", "softmax by hand"),
    "folded": ("heads folded into the batch, bmm", "softmax by hand"),
    "flex": ("causal attention", "FlexAttention, eager"),
    "encoder": ("nn.TransformerEncoder", "nn.MultiheadAttention"),
    "encoder-decoder": ("nn.Transformer", "nn.MultiheadAttention"),
}
"""(model, way) of each on the page of seen models, under ``LIBRARY``."""
LIBRARY = "torch / your own code"


def is_close(scan: attemper.Scan, expected: Tensor) -> bool:
    """Whether entropies of the heads of the first site are these."""
    found = torch.tensor([head.entropy_nats for head in scan.sites[0].heads], dtype=torch.float64)
    return bool((found - expected).abs().max() < 2e-5)


def entropies(model: nn.Module, batch: tuple[Any, ...]) -> list[Tensor]:
    """Mean entropy per head [H] of every site in the order of modules, in float64, padded queries left out."""
    if isinstance(model, Own):
        twin = type(model)().double()
        twin.load_state_dict(model.state_dict())
        return [_mean(twin.weights(batch[0]), None)]
    found: dict[str, Tensor] = {}
    twin = _double(model)
    padding = batch[2] if len(batch) == 3 else None
    for name, module in twin.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            _listen(name, module, found, padding)
    arguments = [part.double() if isinstance(part, Tensor) and part.is_floating_point() else part for part in batch]
    twin(*arguments)
    return [found[name] for name, module in twin.named_modules() if isinstance(module, nn.MultiheadAttention)]


def _double(model: nn.Module) -> nn.Module:
    import copy

    return copy.deepcopy(model).double().eval()


def _listen(name: str, module: nn.MultiheadAttention, found: dict[str, Tensor], padding: Tensor | None) -> None:
    """Replaces a module's forward by one that asks for weights per head."""
    plain = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        found_weights: tuple[Any, Any] = plain(*args, **kwargs | {"need_weights": True, "average_attn_weights": False})
        found[name] = _mean(found_weights[1], padding)
        return found_weights

    module.forward = forward  # type: ignore[method-assign]


def _mean(weights: Tensor, padding: Tensor | None) -> Tensor:
    entropy = -torch.where(weights > 0, weights * torch.where(weights > 0, weights, 1.0).log(), 0.0).sum(-1)
    rows = torch.ones(entropy.shape[0], entropy.shape[2], dtype=torch.bool) if padding is None else ~padding
    return torch.stack([entropy[:, head][rows].mean() for head in range(entropy.shape[1])]).detach()
