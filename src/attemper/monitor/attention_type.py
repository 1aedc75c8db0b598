"""The type of an attention, for the labels of a history: heads of a window say other things than those that see all."""

from __future__ import annotations

from typing import Any

from torch import nn

from attemper.backends.contract import UNBOUNDED, Problem

_LATENT = ("kv_a_proj_with_mqa", "kv_b_proj", "kv_lora_rank")
"""Parts of multi-head latent attention, by the names that DeepSeek gave them."""
_LOCAL = ("sliding_attention", "chunked_attention", "local_attention")
"""Entries of ``config.layer_types``."""


def attention_type(module: nn.Module, kind: str, problem: Problem) -> str:
    """One of ``ATTENTIONS``, the first that holds: cross, sparse, mla, window, sink, full.

    Args:
        module: the one that attends.
        kind: "self" or "cross".
        problem: its call.
    """
    if kind == "cross":
        return "cross"
    if _has(module, "indexer"):  # it chooses the keys that the others see
        return "sparse"
    if any(_has(module, name) for name in _LATENT):
        return "mla"
    if problem.left < UNBOUNDED or 0 < problem.right < UNBOUNDED or _is_local(module):
        return "window"
    return "full" if problem.sink is None else "sink"


def _has(module: nn.Module, name: str) -> bool:
    return getattr(module, name, None) is not None


def _is_local(module: nn.Module) -> bool:
    """Whether a layer of transformers attends within a window, as itself or its configuration says: it is in the mask
    of a call, where nobody sees it.
    """
    if hasattr(module, "sliding_window"):
        return bool(module.sliding_window)
    config: Any = getattr(module, "config", None)
    layer, layers = getattr(module, "layer_idx", None), getattr(config, "layer_types", None)
    if isinstance(layer, int) and isinstance(layers, list | tuple) and 0 <= layer < len(layers):
        return layers[layer] in _LOCAL
    return bool(getattr(config, "sliding_window", None)) and bool(getattr(config, "use_sliding_window", True))
