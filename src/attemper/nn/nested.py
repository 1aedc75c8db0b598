"""Nested tensors in ``nn.MultiheadAttention``: padded on the way in, nested again on the way out.

``nn.TransformerEncoder`` makes them, in eval mode without gradients, of a batch with ``src_key_padding_mask``, for a
fast path of torch that knows nothing of temperatures and normalizers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attemper.errors import InputError


def over_padded(
    attend: Callable[..., tuple[Tensor, Any]], query: Tensor, key: Tensor, value: Tensor,
    key_padding_mask: Tensor | None = None, *args: Any, batch_first: bool = True, **kwargs: Any,
) -> tuple[Tensor, Any]:  # fmt: skip
    """``attend(query, key, value, key_padding_mask, ...)`` of ``nn.MultiheadAttention``, for nested sequences.

    Args:
        query, key, value: [B, tokens of each, E]; all of them nested, batch first.

    Returns:
        ``(output, second)``: the output is nested as the queries are; weights and statistics have rows for padding too.

    Raises:
        InputError: some are not nested, a ``key_padding_mask`` is given too, or they are not batch first or jagged.
    """
    known = all(part.is_nested and part.layout is torch.strided for part in (query, key, value))
    if not known or key_padding_mask is not None or not batch_first:
        raise InputError(
            "MultiheadAttention takes nested tensors if query, key and value all are, batch first, in torch's strided "
            "layout and without a key_padding_mask. Pad them with torch.nested.to_padded_tensor and pass one."
        )
    query_lengths, key_lengths = lengths(query), lengths(key)
    # One tensor stays one: self attention is told from cross attention by it.
    dense = {id(part): torch.nested.to_padded_tensor(part, 0.0) for part in (query, key, value)}
    query, key, value = (dense[id(part)] for part in (query, key, value))
    places = torch.arange(key.shape[1], device=key.device)
    padding = places >= torch.tensor(key_lengths, device=key.device)[:, None]
    output, second = attend(query, key, value, padding, *args, **kwargs)
    parts = [row[:length] for row, length in zip(output, query_lengths, strict=True)]
    return torch.nested.as_nested_tensor(parts), second


def lengths(nested: Tensor) -> list[int]:
    """Tokens of each sequence."""
    return [part.shape[0] for part in nested.unbind()]
