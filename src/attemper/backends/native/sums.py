"""Statistics of rows as sums per head, from their state in one pass: what a reading keeps of a call."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from attemper.backends.native.arguments import address
from attemper.backends.native.library import run
from attemper.backends.sums import SUMMED, WIDTH

# AttemperSums of source/sums.cpp.
_CALL = struct.Struct("5q 2Q 3q Q")


def sums(state: Tensor, included: Tensor | None, first_tokens: int) -> Tensor:
    """[H, WIDTH] float64, the layout of ``backends/sums.py``, of softmax without a sink.

    ``state``: [F, B, H, R] float32, contiguous, its first columns ``SUMMED``; ``included`` [B, H, R] bool, any strides.
    """
    _, batch, heads, rows = state.shape
    total = torch.empty((heads, WIDTH), dtype=torch.float64)
    strides = (0, 0, 0) if included is None else included.stride()
    assert state.shape[0] >= len(SUMMED)
    call = _CALL.pack(
        batch, heads, rows, first_tokens, torch.get_num_threads(), address(state),
        address(included), *strides, address(total),
    )  # fmt: skip
    run("attemper_sums", call)
    return total
