"""attemper measures and tempers the sharpness of attention in PyTorch Transformers.

The public names load on first use: ``import attemper`` alone does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attemper import functional, nn, schedules
    from attemper.control.qk_clip import QKClip
    from attemper.errors import BackendError, InputError, MissingExtraError
    from attemper.functional.attention import attention, attention_statistics, dense_weights, varlen_attention
    from attemper.functional.stats import AttentionOutput, AttentionStats
    from attemper.monitor.result import Scan
    from attemper.monitor.scan import scan
    from attemper.monitor.watch import Watch, watch
    from attemper.sites.tap import tap

__version__ = "0.1.0"

_HOMES = {
    "AttentionOutput": "attemper.functional.stats",
    "AttentionStats": "attemper.functional.stats",
    "BackendError": "attemper.errors",
    "InputError": "attemper.errors",
    "MissingExtraError": "attemper.errors",
    "QKClip": "attemper.control.qk_clip",
    "Scan": "attemper.monitor.result",
    "attention": "attemper.functional.attention",
    "attention_statistics": "attemper.functional.attention",
    "dense_weights": "attemper.functional.attention",
    "functional": "attemper.functional",
    "nn": "attemper.nn",
    "scan": "attemper.monitor.scan",
    "schedules": "attemper.schedules",
    "tap": "attemper.sites.tap",
    "watch": "attemper.monitor.watch",
    "Watch": "attemper.monitor.watch",
    "varlen_attention": "attemper.functional.attention",
}

__all__ = [
    "AttentionOutput",
    "AttentionStats",
    "BackendError",
    "InputError",
    "MissingExtraError",
    "QKClip",
    "Scan",
    "Watch",
    "attention",
    "attention_statistics",
    "dense_weights",
    "functional",
    "nn",
    "scan",
    "schedules",
    "tap",
    "varlen_attention",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'attemper' has no attribute {name!r}")
    home = import_module(_HOMES[name])
    value = home if _HOMES[name] == f"attemper.{name}" else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
