"""What a model declares of the keys that rows should see: by its configuration, and by what it is called with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor, nn

from attemper.call.expected import Rule, documents_of_numbers, documents_of_positions, documents_of_starts

if TYPE_CHECKING:
    from attemper.sites.padding import Tokens

_FULL = ("full_attention", "attention")
_SLIDING = "sliding_attention"
_CHUNKED = "chunked_attention"
_OF_PARTS = ("token_type_ids", "mm_token_type_ids", "block_sequence_ids", "bidirectional_mask")
"""Arguments that let parts of a causal sequence see all of themselves, a prefix or a picture."""


def rule_of_module(module: nn.Module) -> Rule | None:
    """Causality, window and chunk of a layer of transformers, by its attributes and its configuration; None of any
    other module, and where they do not tell.
    """
    config, causal = getattr(module, "config", None), getattr(module, "is_causal", None)
    known = type(module).__module__.startswith("transformers.") and isinstance(causal, bool)
    if not known or any(name.rpartition(".")[2] == "indexer" for name, _ in module.named_modules()):
        return None
    layer, layers = getattr(module, "layer_idx", None), getattr(config, "layer_types", None)
    kind = layers[layer] if layers and isinstance(layer, int) and layer < len(layers) else None
    window = getattr(module, "sliding_window", None) or getattr(config, "sliding_window", None)
    if kind == _CHUNKED:
        size = getattr(config, "attention_chunk_size", None)
        return Rule(causal=True, chunk=size) if causal and isinstance(size, int) else None
    if kind is None and not hasattr(module, "sliding_window"):
        window = window if getattr(config, "use_sliding_window", True) else None
    elif kind in _FULL or (kind is None and not module.sliding_window):
        window = None
    elif kind not in (None, _SLIDING):
        return None
    if window is None:
        return Rule(causal=bool(causal))
    if isinstance(window, bool) or not isinstance(window, int):
        return None
    return Rule(causal=True, left=window - 1) if causal else Rule(left=window, right=window)


def documents_of_call(arguments: Mapping[str, Any], tokens: Tensor | None) -> Tensor | None:
    """[B|1, T] int: the documents that the arguments of a model declare, one of each sequence where none; None where
    nothing there could declare any.

    Args:
        tokens: [B, T] bool: which are no padding; None for all.
    """
    mask, starts = arguments.get("attention_mask"), arguments.get("cu_seq_lens_k")
    positions = arguments.get("position_ids")
    if _is_whole(starts, 1):
        first = next((one for one in arguments.values() if isinstance(one, Tensor) and one.dim() > 1), None)
        found = None if first is None else documents_of_starts(starts, first.shape[1])
    elif _is_whole(positions, 2) and positions.shape[1] > 1:
        fits = tokens is None or tokens.shape[1] == positions.shape[1]
        positions = positions if tokens is None else positions.expand(len(tokens), -1)
        found = documents_of_positions(positions, tokens) if fits else None
    else:
        found = documents_of_numbers(mask) if _is_whole(mask, 2) else None
    # Where asking does not wait, nothing is counted for a single document.
    alone = found is not None and found.device.type == "cpu" and not bool(found.any())
    return None if alone else found


def follows_rule(arguments: Mapping[str, Any]) -> bool:
    """Whether nothing that a model is called with makes rows see other keys than its layers' rules and padding say."""
    mask = arguments.get("attention_mask")
    given = isinstance(mask, Tensor) and mask.dim() == 2
    return (mask is None or given) and all(arguments.get(name) is None for name in _OF_PARTS)


def rule_of_call(own: Rule | None, kind: str, tokens: Tokens, batch: int, queries: int, keys: int) -> Rule | None:
    """What the rows of one call should see; None where that is not known.

    Args:
        own: of its module, ``rule_of_module``.
        kind: "self" or "cross".
        tokens: what the model around it was called with.
    """
    if own is None or not tokens.ruled or tokens.ids is None or tokens.unclear or tokens.sided:
        return None
    if kind == "cross":
        real = tokens.encoder
        return Rule(tokens=real) if real is not None and real.shape == (batch, keys) else None
    past = tokens.past or 0 if isinstance(tokens.past, int | None) else -1
    if keys != past + queries or (tokens.own is not None and tokens.own.shape != (batch, keys)):
        return None
    return replace(own, offset=past, tokens=tokens.own, documents=documents_of_keys(tokens, batch, keys))


def documents_of_keys(tokens: Tokens, batch: int, keys: int) -> Tensor | None:
    """[B|1, K] int: the documents of the keys of a call, where they are the tokens of the model around it."""
    found = tokens.documents
    return found if found is not None and found.shape[0] in (1, batch) and found.shape[1] == keys else None


def _is_whole(tensor: Any, dimensions: int) -> TypeGuard[Tensor]:
    """Whether this is a tensor of whole numbers with so many dimensions."""
    return (
        isinstance(tensor, Tensor)
        and tensor.dim() == dimensions
        and tensor.dtype.is_signed
        and not (tensor.is_floating_point() or tensor.is_complex())
    )
