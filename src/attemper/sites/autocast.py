"""What autocast does to queries and keys on their way into a product."""

from __future__ import annotations

import torch
from torch import Tensor


def rounded(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys as a product or SDPA takes them here: rounded to autocast's type where it is on.

    Whoever looks at the call sees them before; the weights are those of the rounded ones.
    """
    kind = query.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return query, key
    dtype = torch.get_autocast_dtype(kind)
    first, second = (part if part.dtype == torch.float64 else part.to(dtype) for part in (query, key))
    return first, second
