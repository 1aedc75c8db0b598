"""Where a model runs: one device of torch."""

from __future__ import annotations

import torch
from torch import nn

from attemper.errors import InputError
from attemper.integrations.checkpoint import PLACES
from attemper.integrations.hub import first_line


def to_device(model: nn.Module, device: str) -> nn.Module:
    if device in PLACES:
        raise InputError(f"device {device!r} is for pretrained models; this one takes cpu, cuda, cuda:1 or mps.")
    try:
        return model.to(torch.device(device))
    except (RuntimeError, AssertionError, ValueError) as error:
        raise InputError(f"device {device!r} cannot be used: {first_line(error)}") from error
