"""FlexAttention's BlockMask as a mask: its rule asked for every pair of a query and a key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor

from attemper.sites.observation import UnsupportedCallError


def dense(module: nn.Module, block_mask: Any, query: Tensor, key: Tensor) -> Tensor:
    """[B or 1, H or 1, Q, K] bool: the pairs that a BlockMask lets see each other; as many heads as its rule
    tells apart.

    Raises:
        UnsupportedCallError: it was made of blocks, without a rule.
    """
    from torch.nn.attention.flex_attention import create_mask, noop_mask

    rule = block_mask.mask_mod
    if rule is noop_mask and not bool(block_mask.to_dense().all()):
        raise UnsupportedCallError(module, "its BlockMask is made of blocks without a rule (mask_mod)")
    batch = query.shape[0] if _asks(rule, 0, query.device) else 1
    heads = query.shape[1] if _asks(rule, 1, query.device) else 1
    return create_mask(rule, batch, heads, query.shape[2], key.shape[2], device=query.device)


def _asks(rule: Callable[..., Tensor], place: int, device: torch.device) -> bool:
    """Whether a rule's answer depends on the sample (place 0) or on the head (place 1)."""
    found = []

    def probe(index: Tensor) -> Tensor:
        indices = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(4)]
        indices[place] = index
        answer = rule(*indices)
        found.append(is_batchedtensor(answer))
        return answer.clone()

    torch.vmap(probe)(torch.zeros(1, dtype=torch.int64, device=device))
    return found[0]
