"""Attention that chooses its keys: the weight that the keys which it left out would have had.

A layer with an indexer (DeepSeek V3.2, GLM 5) is given a mask, hides all but the chosen keys, and attends over those.
With Z the sum of exp(score), a sink's among it, over the keys of the mask that the layer was given, and Z_c over those
that it attends to, the missed mass of a row is 1 - Z_c / Z.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from attemper.call.attention import measurement, run
from attemper.call.result import AttentionStats
from attemper.sites.observation import AttentionCall

NAME = "missed_mass"
_INDEXER = "indexer"
"""How models call the part that chooses keys."""
_CHOICE = "topk_indices"
"""How the argument ends that brings the choice of a layer before."""


def chooses(module: nn.Module) -> bool:
    """Whether a module that attends chooses keys, by the names that its code uses."""
    if hasattr(module, _INDEXER) and getattr(module, _INDEXER) is None:
        code = getattr(type(module).forward, "__code__", None)
        return code is not None and any(name.endswith(_CHOICE) for name in code.co_varnames[: code.co_argcount])
    return any(name.rpartition(".")[2] == _INDEXER for name, _ in module.named_modules())


def with_missed_mass(
    module: nn.Module, call: AttentionCall, given: Tensor | None, chosen: AttentionStats
) -> tuple[AttentionStats, str | None]:
    """The statistics of a call over chosen keys with each row's missed mass; or as they are, and why none can be told.

    Args:
        given: the 4-D mask that the module was given; None: it is causal.
        chosen: the statistics of ``call``, ``lse`` among them.
    """
    reason = _why_unknown(module, call, given)
    return (chosen if reason is not None else chosen.with_values(NAME, _missed_mass(call, given, chosen))), reason


def _why_unknown(module: nn.Module, call: AttentionCall, given: Tensor | None) -> str | None:
    if call.query.shape[-1] == 1:
        return "its scores are made by hand, and those of keys that it did not choose are gone"
    keys = call.key.shape[2]
    if given is None:
        return None if getattr(module, "is_causal", False) else "the mask that it chooses from was not seen"
    if given.shape[-1] < keys:
        return f"its mask is over {given.shape[-1]} of the keys that it chooses from, and there are {keys}"
    return None


def _missed_mass(call: AttentionCall, given: Tensor | None, chosen: AttentionStats) -> Tensor:
    mask = None if given is None else given[..., : call.key.shape[2]]
    causal = replace(call.options, is_causal=True, causal_alignment="bottom-right")
    options = replace(call.options if given is not None else causal, spans=None, stats=("lse",), backend="auto")
    every = run(measurement(call.query, call.key, mask, options)).stats
    assert every is not None
    sink = call.options.sink_logits
    levels = [stats.lse if sink is None else _with_sink(stats.lse, sink) for stats in (chosen, every)]
    return (1 - (levels[0] - levels[1]).exp()).clamp(min=0.0)


def _with_sink(lse: Tensor, sink: Tensor) -> Tensor:
    return torch.logaddexp(lse, sink.detach().to(lse)[:, None])
