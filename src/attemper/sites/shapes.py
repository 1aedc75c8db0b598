"""Shapes in which models pass queries, scores and masks, brought to [B, H, Q, D]."""

from __future__ import annotations

from torch import Tensor, nn

from attemper.sites.observation import UnsupportedCallError

_HEAD_COUNTS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads", "nhead", "nheads")


def heads_of(module: nn.Module) -> int:
    """The number of heads that a module names among its attributes; 1 if it names none."""
    for name in _HEAD_COUNTS:
        heads = getattr(module, name, None)
        if isinstance(heads, int) and heads > 0:
            return heads
    return 1


def four_dimensional(tensor: Tensor, heads: int) -> Tensor:
    """[..., H, Q, D] with leading dimensions as one batch, where [..., G, heads / G, Q, D] is heads in groups;
    [B * heads, Q, D] unfolded; [Q, D] as one head of one batch.
    """
    if tensor.dim() == 4:
        return tensor
    if tensor.dim() > 4:
        if tensor.shape[-3] != heads and tensor.shape[-4] * tensor.shape[-3] == heads:
            tensor = tensor.flatten(-4, -3)
        return tensor.flatten(0, -4) if tensor.dim() > 4 else tensor
    if tensor.dim() == 3:
        folded = heads > 1 and tensor.shape[0] % heads == 0
        return tensor.unflatten(0, (-1, heads)) if folded else tensor[:, None]
    return tensor[None, None]


def mask_like(module: nn.Module, mask: Tensor, query: Tensor, heads: int, keys: int) -> Tensor:
    """A mask that broadcasts to [..., Q, K] of ``query`` [..., Q, D], in the shape ``four_dimensional`` gives it."""
    if query.dim() == 4 or mask.dim() <= 2:
        if mask.dim() > 4:
            raise UnsupportedCallError(module, f"its mask {list(mask.shape)} has more dimensions than its queries")
        return mask
    return four_dimensional(mask.expand(*query.shape[:-1], keys), heads)
