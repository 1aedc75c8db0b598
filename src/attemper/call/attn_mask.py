"""What ``attn_mask=`` may be: a tensor of numbers or marks, or torch's ``CausalBias``, which holds neither."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import add, and_
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from attemper.errors import InputError

ADVICE = (
    "attn_mask takes plain tensors (or torch.nn.attention.bias.CausalBias): a subclass may mean something else than "
    "the numbers in its memory. If it does not, pass mask.as_subclass(torch.Tensor)."
)
_STAND_INS = ("torch._subclasses.", "torch.distributed.")
_HOME = "torch.nn.attention.bias"

Rule = TypeVar("Rule", bound=Any)
"""``Options``, or anything with its fields ``is_causal``, ``causal_alignment`` and ``window_size``."""


def is_causal_bias(mask: object) -> TypeGuard[Tensor]:
    """Whether this is a ``torch.nn.attention.bias.CausalBias``: its memory was never written, its attributes tell."""
    kind = type(mask)
    # By its name: importing torch's module takes a second, and a compiled graph would watch over ``sys.modules``.
    return kind is not Tensor and kind.__name__ == "CausalBias" and kind.__module__ == _HOME


def is_plain(mask: object) -> bool:
    """Whether a tensor means the numbers it holds: it is of torch's own class, or stands for one of them in a trace or
    on several processes.
    """
    kind = type(mask)
    return kind is Tensor or kind is nn.Parameter or kind.__module__.startswith(_STAND_INS)


def alignment_of(bias: Any) -> str:
    """Where a ``CausalBias`` has its diagonal: "top-left" or "bottom-right"."""
    return "top-left" if bias.variant == type(bias.variant).UPPER_LEFT else "bottom-right"


def sizes_of(bias: Any) -> tuple[int, int]:
    """(queries, keys) that a ``CausalBias`` was made for."""
    return bias.seq_len_q, bias.seq_len_kv


def causal_marks(bias: Any, device: torch.device) -> Tensor:
    """A ``CausalBias`` as a tensor, [Q, K] bool, True = visible."""
    queries, keys = sizes_of(bias)
    diagonal = keys - queries if alignment_of(bias) == "bottom-right" else 0
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(diagonal)


def without_causal_bias(
    where: str, mask: Tensor | None, rule: Rule, query: Tensor, keys: int
) -> tuple[Tensor | None, Rule]:
    """Mask and rule with a ``CausalBias`` read as the rule that it is; as a mask where another rule stands already."""
    if not is_causal_bias(mask):
        return mask, rule
    if rule.is_causal:
        raise InputError(
            f"{where}(is_causal=True) beside an attn_mask that is a CausalBias: the bias is causal already, and "
            "F.scaled_dot_product_attention refuses both. Leave is_causal out."
        )
    sizes = (query.shape[2], keys)
    if sizes_of(mask) != sizes:
        raise InputError(
            f"{where}(attn_mask=...) is a CausalBias of {sizes_of(mask)} (queries, keys); the call has "
            f"{sizes}. Make it for these sizes, or pass is_causal=True and "
            "causal_alignment='top-left' or 'bottom-right'."
        )
    square = sizes[0] == sizes[1]
    alignment = rule.causal_alignment if square else alignment_of(mask)
    if tuple(rule.window_size) != (-1, -1) and alignment != rule.causal_alignment:
        return causal_marks(mask, query.device), rule
    return None, replace(rule, is_causal=True, causal_alignment=alignment)


def check_mask(where: str, mask: Tensor, query: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``mask`` with four dimensions, that of the keys full, each other one full or 1."""
    if isinstance(mask, Tensor) and not is_plain(mask):
        raise InputError(f"{where}(attn_mask=...) is a {type(mask).__name__}, a subclass of Tensor. {ADVICE}")
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.dtype.is_floating_point):
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(
            f"{where}(attn_mask=...) must be a bool tensor (True = visible) or a floating one that is added to the "
            f"scores, got {kind}. For a mask of 0 and 1 pass mask.bool()."
        )
    fits = mask.dim() <= 4 and all(m in (1, n) for m, n in zip(mask.shape[::-1], shape[::-1], strict=False))
    if not fits:
        raise InputError(
            f"{where}(attn_mask=...) must broadcast to [batch, heads, queries, keys] = {list(shape)}, got "
            f"{list(mask.shape)}. A padding mask [batch, keys] is written mask[:, None, None, :]."
        )
    mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    if mask.shape[3] == shape[3]:
        return mask
    # Kernels count keys: a mask that is one wide stands for every key.
    return _widen(mask, query).expand(*mask.shape[:3], shape[3])


def join_masks(masks: Sequence[Tensor], query: Tensor) -> Tensor | None:
    """Masks (True = visible, or added) as one: of marks where all are marks, else one that is added; None of none."""
    if all(mask.dtype == torch.bool for mask in masks):
        return reduce(and_, masks) if masks else None
    # Not in half precision, where -1e9 would become -inf and hide a key.
    dtype = torch.promote_types(query.dtype, torch.float32)
    added = [
        torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -math.inf)
        if mask.dtype == torch.bool
        else _widen(mask, query).to(dtype)
        for mask in masks
    ]
    return reduce(add, added)


def _widen(mask: Tensor, query: Tensor) -> Tensor:
    """A bias in the type that its call is computed in: what it sums over keys in its gradient is rounded once then."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    if mask.dtype == torch.bool or torch.promote_types(mask.dtype, dtype) == mask.dtype:
        return mask
    return mask.to(dtype).masked_fill(hides(mask), -math.inf)


def hides(mask: Tensor) -> Tensor:
    """Where a mask of torch's layers hides: True, or a number that no score outweighs once added (-inf, the lowest)."""
    return mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2


def shows(mask: Tensor) -> Tensor:
    """Where a mask of scaled dot product attention shows: True, or a number that does not hide; NaN is one."""
    return mask if mask.dtype == torch.bool else ~hides(mask)
