"""How the attention functions of transformers' registry read their arguments: eager, SDPA, flash and flex.

A call is understood exactly or refused: a keyword that is not known might mean masking.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor

from attemper.call.packing import Packing
from attemper.call.request import Options
from attemper.sites.observation import AttentionCall, Reader, UnsupportedCallError, as_autocast_rounds

OPTIONS = ("scaling", "is_causal", "softcap", "s_aux", "position_bias")
"""Keywords of registry functions that change the scores or the mask."""
WITHOUT_EFFECT = frozenset(
    (
        *("cache_position", "position_ids", "seq_idx", "sliding_window", "num_items_in_batch", "deterministic"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "use_cache"),
    )
)
"""Keywords that models pass along and that mean nothing to attention over a mask. Any other one is refused."""
_DOCUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_FLASH = frozenset(("scaling", "is_causal", "sliding_window", "softcap", "s_aux", "position_ids", *_DOCUMENTS))
"""Keywords that flash's convention gives a meaning."""


def reader_of(function: Callable[..., Any], implementation: str, eager: Any = None) -> Reader:
    """How a registry function reads its arguments: known of transformers' own functions, whatever their name there,
    and of the model's ``eager`` one.

    A kernel of the Hub runs under its own name through the flash function. Of a function that was registered by
    others its name says nothing.
    """
    if function is eager:
        return as_eager
    for kind, reader in ("sdpa", _as_sdpa), ("flash", _as_flash), ("flex", _as_flex):
        home = sys.modules.get(f"transformers.integrations.{kind}_attention")
        if function is getattr(home, f"{kind}_attention_forward", None):
            return reader
    return partial(_unknown, implementation)


def _unknown(implementation: str, module: nn.Module, *_: Any, **__: Any) -> AttentionCall:
    raise UnsupportedCallError(module, f"how {implementation!r} masks is not known here; put attemper.tap beside it")


def can_read(reader: Reader, given: Mapping[str, Any]) -> bool:
    """Whether a reader knows what these arguments mean to its function, or nothing inside of that could tell."""
    by_functions = reader in (as_eager, _as_sdpa)  # whose softmax or call of SDPA can be read
    return getattr(reader, "func", None) is not _unknown and not (by_functions and _unknown_keywords(given))


def as_eager(module: nn.Module, query: Tensor, key: Tensor, mask: Any, **given: Any) -> AttentionCall:
    """Eager's convention: a mask that is added. Whole numbers are, too."""
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        raise UnsupportedCallError(
            module,
            "its eager attention is given a bool mask, which transformers' eager attention adds as 0 and 1, so that it "
            "hides nothing: pass torch.where(mask, 0.0, torch.finfo(dtype).min), or set attn_implementation='sdpa'",
        )
    if isinstance(mask, Tensor) and not mask.is_floating_point():
        mask = mask.to(query.dtype)
    if given.get("s_aux") is None and getattr(module, "sinks", None) is not None:
        given["s_aux"] = module.sinks
    return registry_call(module, *as_autocast_rounds(query, key), mask, eager=True, **given)


def _as_sdpa(module: nn.Module, query: Tensor, key: Tensor, mask: Any, **given: Any) -> AttentionCall:
    """SDPA's convention: a mask that is bool or added; without one, whether it is causal. Sinks are ignored."""
    given.pop("s_aux", None)
    if given.get("softcap") is not None:
        raise UnsupportedCallError(module, "transformers' SDPA attention takes no softcap")
    return registry_call(module, *as_autocast_rounds(query, key), mask, **given)


def _as_flash(module: nn.Module, query: Tensor, key: Tensor, mask: Any, **given: Any) -> AttentionCall:
    """Flash's convention: a 2-D padding mask or none, causal from the bottom right, the window as an argument.

    Without a mask, documents are packed: by their starts, or where positions start anew.
    """
    _refuse_unknown(module, {name: value for name, value in given.items() if name not in _FLASH})
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
        raise UnsupportedCallError(module, "its attention_mask is not the 2-D padding mask that flash attention takes")
    if getattr(sys.modules["transformers.integrations.flash_attention"], "_use_top_left_mask", False):
        raise UnsupportedCallError(module, "its flash attention is of a version that masks from the top left")
    options = _flash_options(module, query, key, given)
    if mask is not None:
        return AttentionCall(query, key, mask[:, None, None, -key.shape[2] :].bool(), options)
    packing = _packing(module, query, key, given)
    return AttentionCall(query, key, None, options, packing)


def _flash_options(module: nn.Module, query: Tensor, key: Tensor, given: Mapping[str, Any]) -> Options:
    causal, size = given.get("is_causal"), given.get("sliding_window")
    window = (-1, -1) if size is None or key.shape[2] <= size else (size - 1, size - 1)
    return Options(
        scale=given.get("scaling"),
        is_causal=bool(module.is_causal if causal is None else causal),
        causal_alignment="bottom-right",
        window_size=window,
        softcap=given.get("softcap"),
        sink_logits=given.get("s_aux"),
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _packing(module: nn.Module, query: Tensor, key: Tensor, given: Mapping[str, Any]) -> Packing | None:
    """Packed documents: by their starts and lengths if all are given, else by positions that start anew."""
    exact = all(given.get(name) is not None for name in _DOCUMENTS)
    positions = None if exact else _starts(query, given.get("position_ids"))
    starts = (given["cu_seq_lens_q"], given["cu_seq_lens_k"]) if exact else positions
    if starts is None:
        return None
    if query.shape[0] != 1 or (not exact and query.shape[2] != key.shape[2]):
        raise UnsupportedCallError(
            module,
            f"its documents are packed in a way that is not known here: queries {list(query.shape)}, "
            f"keys {list(key.shape)}",
        )
    return Packing(*starts)


def _starts(query: Tensor, positions: Any) -> tuple[Tensor, Tensor] | None:
    """Where packed documents start, [documents + 1], by positions [1, tokens] that start anew; None for one."""
    if not isinstance(positions, Tensor) or query.shape[0] != 1 or positions.shape[-1] == 1:
        return None
    places = positions.reshape(-1)
    if bool((places.diff() == 1).all()):
        return None
    first = (places == places.min()).nonzero().view(-1)
    starts = torch.cat((first, first.new_tensor([places.numel()]))).to(torch.int32)
    return starts, starts


def _as_flex(module: nn.Module, query: Tensor, key: Tensor, mask: Any, **given: Any) -> AttentionCall:
    """FlexAttention's convention: a BlockMask, or a tensor that is added, of whose heads only the first is read."""
    if isinstance(mask, Tensor):
        mask = mask[:, :1].to(query.dtype)
    elif mask is not None:
        mask = block_mask_of(module, mask, query, key)
    given.pop("kernel_options", None)
    return registry_call(module, *as_autocast_rounds(query, key), mask, eager=True, **given)


def registry_call(
    module: nn.Module, query: Tensor, key: Tensor, mask: Any, *, eager: bool = False, **given: Any
) -> AttentionCall:
    """A call of a registry function whose mask is 4-D or None.

    Args:
        eager: a mask of any type is added, and no mask means that nothing is masked; else the mask is of a type that
            SDPA takes, and without one the call is causal where its module is.
        given: ``scaling``, ``is_causal``, ``softcap``, ``s_aux``, ``position_bias``, and keywords without effect.
    """
    scaling, causal, softcap, sink, bias = (given.pop(name, None) for name in OPTIONS)
    _refuse_unknown(module, given)
    if not eager and isinstance(mask, Tensor) and not _sdpa_takes(mask, query):
        raise UnsupportedCallError(module, f"its mask is {mask.dtype}, and SDPA takes bool, float32 or {query.dtype}")
    if query.dim() != 4:
        raise UnsupportedCallError(
            module, f"its queries are {list(query.shape)} where [batch, heads, tokens, size] is expected"
        )
    if causal is None:
        causal = getattr(module, "is_causal", True)
    causal = bool(causal) and mask is None and query.shape[2] > 1 and not eager
    grouped = query.shape[1] != key.shape[1]
    options = Options(scale=scaling, is_causal=causal, softcap=softcap, sink_logits=sink, enable_gqa=grouped)
    return AttentionCall(query, key, _mask(module, key, mask, bias), options)


def _sdpa_takes(mask: Tensor, query: Tensor) -> bool:
    """Whether SDPA takes a mask of this type. Under autocast it rounds masks, too."""
    return mask.dtype in (torch.bool, torch.float32, query.dtype) or torch.is_autocast_enabled(query.device.type)


def _unknown_keywords(given: Mapping[str, Any]) -> list[str]:
    """Keywords of a registry call that might mean masking."""
    known = WITHOUT_EFFECT.union(OPTIONS, ("mask",))
    return sorted(name for name, value in given.items() if value is not None and name not in known)


def _refuse_unknown(module: nn.Module, others: dict[str, Any]) -> None:
    unknown = _unknown_keywords(others)
    if unknown:
        raise UnsupportedCallError(
            module, f"its attention is called with {', '.join(unknown)}=, which is not known here"
        )


def _mask(module: nn.Module, key: Tensor, mask: Any, position_bias: Any) -> Tensor | None:
    """Mask and position bias as one tensor, cut to the keys that are there."""
    for name, tensor in (("attention_mask", mask), ("position_bias", position_bias)):
        if tensor is not None and (not isinstance(tensor, Tensor) or tensor.dim() != 4):
            came = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise UnsupportedCallError(module, f"its {name} is {came} where [batch, heads, queries, keys] is expected")
    keys = key.shape[2]
    mask, bias = (None if tensor is None else tensor[..., :keys] for tensor in (mask, position_bias))
    if mask is None or bias is None:
        return bias if mask is None else mask
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else mask + bias


def block_mask_of(module: nn.Module, block_mask: Any, query: Tensor, key: Tensor) -> Tensor:
    """FlexAttention's BlockMask as a mask, [B or 1, H or 1, Q, K] bool: its rule asked for every query and key.

    The batch or the heads are 1 where the rule does not depend on them.

    Raises:
        UnsupportedCallError: it was made of blocks, without a rule.
    """
    from torch.nn.attention.flex_attention import create_mask, noop_mask

    rule = block_mask.mask_mod
    if rule is noop_mask and not bool(block_mask.to_dense().all()):
        raise UnsupportedCallError(module, "its BlockMask is made of blocks without a rule (mask_mod)")
    batch = query.shape[0] if _depends(rule, 0, query.device) else 1
    heads = query.shape[1] if _depends(rule, 1, query.device) else 1
    return create_mask(rule, batch, heads, query.shape[2], key.shape[2], device=query.device)


def _depends(rule: Callable[..., Tensor], place: int, device: torch.device) -> bool:
    """Whether a rule's answer depends on the sample (place 0) or on the head (place 1)."""
    depends = []

    def probe(index: Tensor) -> Tensor:
        indices = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(4)]
        indices[place] = index
        answer = rule(*indices)
        depends.append(is_batchedtensor(answer))
        return answer.clone()

    torch.vmap(probe)(torch.zeros(1, dtype=torch.int64, device=device))
    return depends[0]
