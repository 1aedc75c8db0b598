"""How the attention functions of transformers' registry read their arguments: eager, SDPA, flash and flex.

A call is understood exactly or refused: a keyword that is not known might mean masking.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from attemper.call.options import Options
from attemper.call.packing import Packing
from attemper.sites.autocast import rounded
from attemper.sites.block_mask import dense as block_mask_of
from attemper.sites.observation import AttentionCall, UnsupportedCallError

WITHOUT_EFFECT = frozenset(
    (
        "cache_position", "deterministic", "num_items_in_batch", "output_attentions", "output_hidden_states",
        "output_router_logits", "position_ids", "return_dict", "seq_idx", "sliding_window", "use_cache",
    )
)  # fmt: skip
"""Keywords that models pass along and that mean nothing to attention over a mask. Any other one is refused."""


def reader_of(function: Callable[..., Any], implementation: str) -> Callable[..., AttentionCall]:
    """How a registry function reads its arguments: known of transformers' own functions, whatever their name there.

    A kernel of the Hub runs under its own name through the flash function; a name tells nothing of a function that
    somebody registered.
    """
    for home, name, reader in (
        ("sdpa_attention", "sdpa_attention_forward", _as_sdpa),
        ("flash_attention", "flash_attention_forward", _as_flash),
        ("flex_attention", "flex_attention_forward", _as_flex),
    ):
        known = getattr(sys.modules.get(f"transformers.integrations.{home}"), name, None)
        if function is known:
            return reader

    def unknown(module: nn.Module, *_: Any, **__: Any) -> AttentionCall:
        raise UnsupportedCallError(
            module, f"how {implementation!r} masks is not known here; put attemper.tap beside it"
        )

    return unknown


def as_eager(module: nn.Module, query: Tensor, key: Tensor, mask: Any, **given: Any) -> AttentionCall:
    """Eager's convention: a mask that is added."""
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        raise UnsupportedCallError(module, "its eager attention is given a bool mask, which most add as 0 and 1")
    if given.get("s_aux") is None and getattr(module, "sinks", None) is not None:
        given["s_aux"] = module.sinks
    return understood(module, *rounded(query, key), mask, eager=True, **given)


def _as_sdpa(module: nn.Module, query: Tensor, key: Tensor, mask: Any, **given: Any) -> AttentionCall:
    """SDPA's convention: a mask that is bool or added; without one, whether it is causal."""
    return understood(module, *rounded(query, key), mask, **given)


def _as_flash(
    module: nn.Module, query: Tensor, key: Tensor, mask: Any, *, scaling: float | None = None,
    is_causal: bool | None = None, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, position_ids: Tensor | None = None, cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None, max_length_q: Any = None, max_length_k: Any = None, **others: Any,
) -> AttentionCall:  # fmt: skip
    """Flash's convention: a 2-D padding mask or none, causal from the bottom right, the window as an argument.

    Without a mask, documents are packed: by their starts, or where positions start anew.
    """
    _refuse_unknown(module, others)
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
        raise UnsupportedCallError(module, "its attention_mask is not the 2-D padding mask that flash attention takes")
    if getattr(sys.modules["transformers.integrations.flash_attention"], "_use_top_left_mask", False):
        raise UnsupportedCallError(module, "its flash attention is of a version that masks from the top left")
    causal = module.is_causal if is_causal is None else is_causal
    window = (-1, -1)
    if sliding_window is not None and key.shape[2] > sliding_window:
        window = (sliding_window - 1, sliding_window - 1)
    options = Options(
        scale=scaling, is_causal=bool(causal), causal_alignment="bottom-right", window_size=window,
        softcap=softcap, sink_logits=s_aux, enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    if mask is not None:
        return AttentionCall(query, key, mask[:, None, None, -key.shape[2] :].bool(), options)
    told = all(given is not None for given in (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k))
    starts = (cu_seq_lens_q, cu_seq_lens_k) if told else _starts(query, position_ids)
    if starts is None:
        return AttentionCall(query, key, None, options)
    if query.shape[0] != 1 or (not told and query.shape[2] != key.shape[2]):
        shapes = f"{list(query.shape)} queries and {list(key.shape)} keys"
        raise UnsupportedCallError(module, f"its documents are packed in a way that is not known here: {shapes}")
    assert starts[0] is not None
    assert starts[1] is not None
    return AttentionCall(query, key, None, options, Packing(starts[0], starts[1]))


def _starts(query: Tensor, positions: Any) -> tuple[Tensor, Tensor] | None:
    """Where packed documents start, [documents + 1], told by positions [1, tokens] that start anew; None for one."""
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
    return understood(module, *rounded(query, key), mask, eager=True, **given)


def understood(
    module: nn.Module, query: Tensor, key: Tensor, mask: Any, *, scaling: float | None = None,
    is_causal: bool | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
    position_bias: Tensor | None = None, eager: bool = False, **others: Any,
) -> AttentionCall:  # fmt: skip
    """A call of a registry function whose mask is 4-D or None. ``eager``: no mask means no mask, not a causal one."""
    _refuse_unknown(module, others)
    if query.dim() != 4:
        raise UnsupportedCallError(
            module, f"its queries are {list(query.shape)} where [batch, heads, tokens, size] is expected"
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    options = Options(
        scale=scaling, is_causal=bool(is_causal) and mask is None and query.shape[2] > 1 and not eager, softcap=softcap,
        sink_logits=s_aux, enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return AttentionCall(query, key, _mask(module, key, mask, position_bias), options)


def _refuse_unknown(module: nn.Module, others: dict[str, Any]) -> None:
    unknown = sorted(name for name, given in others.items() if given is not None and name not in WITHOUT_EFFECT)
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
