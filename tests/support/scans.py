"""What tests read of a scan, and of the hooks on a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import attemper


def hooks(model: nn.Module) -> int:
    """How many there are on all modules."""
    return sum(len(part._forward_pre_hooks) + len(part._forward_hooks) for part in model.modules())


def names(scan: attemper.Scan) -> list[str]:
    return [site.name for site in scan.sites]


def entropies(scan: attemper.Scan, *sites: str) -> Tensor:
    """Mean entropies in nats, [sites, H] float64, of these sites or of all."""
    chosen = [site for site in scan.sites if not sites or site.name in sites]
    return torch.tensor([[head.entropy_nats for head in site.heads] for site in chosen], dtype=torch.float64)


def of_heads(site: Any) -> Tensor:
    """The mean entropies of a site's heads in nats, [H] float64."""
    return torch.tensor([head.entropy_nats for head in site.heads], dtype=torch.float64)
