"""Exporting to ONNX: what has no form there says so in one sentence, before the exporter meets an unknown operator."""

from __future__ import annotations

import sys

import torch

from attemper.call.transforms import constant_in_graphs
from attemper.errors import BackendError

_EXPORTERS = ("torch.onnx._internal.exporter._flags", "torch.onnx._internal.torchscript_exporter._globals")
"""Loaded while anything is exported. Asking torch loads them, which costs seconds that no other call should pay."""


SOFTMAX_INSTEAD = "For ONNX use softmax, with a temperature."
"""What a function of scores can be replaced by."""


@constant_in_graphs
def exports_to_onnx() -> bool:
    """Whether ``torch.onnx.export`` is tracing."""
    return any(name in sys.modules for name in _EXPORTERS) and torch.onnx.is_in_onnx_export()


def refuse_onnx(what: str, instead: str) -> None:
    """Refuses an operator of ours while ``torch.onnx.export`` is tracing.

    Raises:
        BackendError: it is.
    """
    if exports_to_onnx():
        raise BackendError(
            f"{what} cannot be exported to ONNX: it is an operator of attemper, which ONNX has no form of. "
            f"torch.export.export(...) takes it. {instead}"
        )
