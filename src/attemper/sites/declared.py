"""What a model declares of the keys that rows should see: by its configuration, and by what it is called with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from attemper.call.visible_keys import Rule, documents_of_numbers, documents_of_positions, documents_of_starts
from attemper.text import count

if TYPE_CHECKING:
    from attemper.sites.padding import Tokens

_SLIDING = "sliding_attention"
_SIZES = {_SLIDING: "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Entries of ``config.layer_types`` with a window, and where its size stands."""
_FULL = ("full_attention", "attention")
_WITHOUT_WINDOW = (*_FULL, "indexed_attention", "linear_attention", "mamba", "conv", "hybrid", "moe")
"""Those that have none. What others see is not known: pooled keys, say."""
_NO_ENTRY = "config.{} has no entry for layer {}"
STARTS = ("cu_seq_lens_q", "cu_seqlens_q", "cu_seqlens", "cu_seq_lens", "cu_seq_lens_k")
"""Arguments that say where each document begins, and where the last one ends."""
_OF_PARTS = ("token_type_ids", "mm_token_type_ids", "block_sequence_ids", "bidirectional_mask")
"""Arguments that let parts of a causal sequence see all of themselves, a prefix or a picture."""


@dataclass(frozen=True)
class Window:
    """The keys near a row: ``size`` of them up to its own place and as many behind it, or those of its own chunk."""

    size: int
    chunked: bool = False

    def __str__(self) -> str:
        return f"chunks of {self.size}" if self.chunked else count(self.size, "key")


def windows_of_config(config: Any) -> tuple[str, tuple[Window | str | None, ...]]:
    """The field of a configuration that declares windows, and the window of each layer: one alone is that of all. None:
    a layer without; a str: why it is not known.
    """
    found: list[Window | str | None] = []
    field, layers = None, getattr(config, "num_hidden_layers", None)
    if _varies(config):
        field, each = "per_layer_config", [windows_of_config(one)[1] or (None,) for one in config.per_layer_config]
        found = [
            one[0] if len(one) == 1 else one[layer] if layer < len(one) else _NO_ENTRY.format("layer_types", layer)
            for layer, one in enumerate(each)
        ]
    elif kinds := getattr(config, "layer_types", None):
        field, found = "layer_types", [_of_kind(config, kind) for kind in kinds]
    elif (kinds := getattr(config, "attention_layers", None)) and isinstance(getattr(config, "window_size", None), int):
        field = "attention_layers"
        found = [Window(config.window_size) if kind == "local" else None for kind in kinds]
    if field is None:
        return "sliding_window", (_window_of(config, None),) if hasattr(config, "sliding_window") else ()
    lacking = range(len(found), layers if type(layers) is int else 0)
    return field, (*found, *(_NO_ENTRY.format(field, layer) for layer in lacking))


def _of_kind(config: Any, kind: str) -> Window | str | None:
    """The window of a layer of an entry of ``layer_types``, None for none, or why it is not known."""
    window = _window_of(config, kind) if kind in _SIZES else None
    return window if window or kind in _WITHOUT_WINDOW else f"no window is known of layers of the kind {kind}"


def config_of_layer(module: nn.Module) -> Any:
    """The configuration of a layer of transformers; None where it does not tell."""
    config: Any = getattr(module, "config", None)
    layer = getattr(module, "layer_idx", None)
    if not _varies(config):
        return config
    layers = config.per_layer_config
    return layers[layer] if isinstance(layer, int) and layer < len(layers) else None


def _varies(config: Any) -> bool:
    """Whether attributes differ by layer: such a configuration of transformers raises when it is asked as a whole."""
    return getattr(config, "is_heterogeneous", False) is True


def _window_of(config: Any, kind: str | None) -> Window | None:
    """The window of a layer of this kind, or of one in a configuration that names no kinds."""
    size = getattr(config, _SIZES.get(kind or _SLIDING, ""), None)
    used = kind is not None or getattr(config, "use_sliding_window", True)
    return Window(size, kind not in (None, _SLIDING)) if used and type(size) is int and size > 0 else None


def rule_of_module(module: nn.Module) -> Rule | None:
    """Causality, window and chunk of a layer of transformers, by its attributes and its configuration; None of any
    other module, and where they do not tell.
    """
    config, causal = config_of_layer(module), getattr(module, "is_causal", None)
    known = type(module).__module__.startswith("transformers.") and isinstance(causal, bool)
    layer, layers = getattr(module, "layer_idx", None), getattr(config, "layer_types", None)
    kind = layers[layer] if layers and isinstance(layer, int) and layer < len(layers) else None
    indexed = any(name.rpartition(".")[2] == "indexer" for name, _ in module.named_modules())
    untold = config is None and getattr(module, "config", None) is not None
    if not known or untold or indexed or kind not in (None, *_FULL, *_SIZES):
        return None
    window, own = _window_of(config, kind), getattr(module, "sliding_window", None)
    if kind not in (None, *_FULL, _SLIDING):
        return None if window is None or not causal else Rule(causal=True, chunk=window.size)
    size = None if window is None or (kind is None and hasattr(module, "sliding_window")) else window.size
    size = own if own and kind not in _FULL else size
    if size is None:
        return Rule(causal=bool(causal))
    if type(size) is not int:
        return None
    return Rule(causal=True, left=size - 1) if causal else Rule(left=size, right=size)


def declared_documents(
    arguments: Mapping[str, Any], shape: tuple[int, int], tokens: Tensor | None
) -> Iterator[tuple[str, Tensor]]:
    """What may tell the documents of a batch [B, T] apart among the arguments of a model, in the order in which it
    counts: its name, and the documents that it declares, [B|1, T] int; one of each sequence where it separates none.

    Args:
        tokens: [B, T] bool: which are no padding; None for all.
    """
    for name in STARTS:
        if is_whole(starts := arguments.get(name), 1):
            yield name, documents_between(starts, shape)
    places, mask, numbers = (arguments.get(name) for name in ("position_ids", "attention_mask", "seq_idx"))
    if is_whole(places, 2) and places.shape[1] > 1 and (tokens is None or tokens.shape[1] == places.shape[1]):
        places = places if tokens is None else places.expand(len(tokens), -1)
        yield "position_ids", documents_of_positions(places, tokens)
    if is_whole(mask, 2):
        yield "attention_mask", documents_of_numbers(mask)
    if is_whole(numbers, 2):
        yield "seq_idx", numbers.long()


def documents_between(starts: Tensor, shape: tuple[int, int]) -> Tensor:
    """[B|1, T] int: the documents of a batch by where each begins, in every sequence, or in all of them laid end to end
    (which is asked where that does not wait).
    """
    together = shape[0] > 1 and starts.device.type == "cpu" and int(starts[-1]) == shape[0] * shape[1]
    return (
        documents_of_starts(starts, shape[0] * shape[1]).view(shape)
        if together
        else documents_of_starts(starts, shape[1])
    )


def documents_of_call(arguments: Mapping[str, Any], tokens: Tensor | None) -> Tensor | None:
    """[B|1, T] int: the documents that the arguments of a model declare; None where nothing there could declare any."""
    first = next((one for one in arguments.values() if isinstance(one, Tensor) and one.dim() > 1), None)
    shape = (0, 0) if first is None else (first.shape[0], first.shape[1])
    # Where asking does not wait, nothing is counted for a single document.
    each = (found for _, found in declared_documents(arguments, shape, tokens) if first is not None)
    return next((found for found in each if found.device.type != "cpu" or bool(found.any())), None)


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


def is_whole(tensor: Any, dimensions: int) -> TypeGuard[Tensor]:
    """Whether this is a tensor of whole numbers with so many dimensions."""
    whole = isinstance(tensor, Tensor) and not (tensor.is_floating_point() or tensor.is_complex())
    return whole and tensor.dim() == dimensions and tensor.dtype != torch.bool
