"""float32 products that are float32, whatever the process allows elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_lock = threading.Lock()
_saved: list[Any] = []
_depth = 0


@contextmanager
def exact(like: Tensor) -> Iterator[None]:
    """float32 products in float32: no autocast, no TF32, no bfloat16 matmul inside; the settings are put back after.

    The precision settings are process-wide, so nested and concurrent calls share one count.
    """
    with torch.autocast(like.device.type, enabled=False), _ieee_float32():
        yield


@contextmanager
def _ieee_float32() -> Iterator[None]:
    global _depth
    settings: tuple[Any, ...] = (torch.backends.mkldnn.matmul, torch.backends.cuda.matmul)  # pyright: ignore[reportAttributeAccessIssue]
    with _lock:
        if _depth == 0:
            _saved[:] = [setting.fp32_precision for setting in settings]
            for setting in settings:
                setting.fp32_precision = "ieee"
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                for setting, saved in zip(settings, _saved, strict=True):
                    setting.fp32_precision = saved
