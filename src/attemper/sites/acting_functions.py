"""Acting on attention as torch functions, inside one module's forward: SDPA, and ``nn.MultiheadAttention``'s."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attemper.errors import InputError
from attemper.sites.act import acted, actions_on, computed, normalizer_of, temperature_of, temperatures
from attemper.sites.acting_registry import first_of_tuple
from attemper.sites.observation import AttentionCall
from attemper.sites.shapes import four_dimensional, heads_of
from attemper.sites.torch_functions import read_multi_head, read_sdpa


class ActingMode(TorchFunctionMode):
    """Meets the attention functions of torch inside one module's forward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _scaled_dot_product(self.module, *args, **kwargs)
        if func is F.multi_head_attention_forward:
            return _multi_head(self.module, args, kwargs)
        if func is Tensor.unflatten:
            # The method calls super(), which torch.compile cannot follow under a mode.
            func = torch.unflatten
        return func(*args, **kwargs)


def _scaled_dot_product(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    shape, heads = query.shape, heads_of(module)

    def read(query: Tensor) -> AttentionCall:
        return read_sdpa(module, query.reshape(shape), key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    def run(query: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            query.reshape(shape), key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    plain = query.dim() == 4 and key.dim() == 4 and value.dim() == 4 and key.shape[0] == query.shape[0]
    plain = plain and (enable_gqa or query.shape[1] == key.shape[1] == value.shape[1])
    # SDPA's own rounding under autocast, and its result's type there; another map rounds as its call was read.
    ours = normalizer_of(module) is not None or not torch.is_autocast_enabled(query.device.type)
    whole = (lambda output: output) if plain and ours else None
    return acted(module, four_dimensional(query, heads), value, dropout_p, read, run, whole, _itself)


def _itself(result: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    return function(result)


def _multi_head(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``nn.MultiheadAttention``: the temperature of each head goes into the rows of the query projection."""
    given = dict(zip(_MULTI_HEAD_NAMES, args, strict=False)) | kwargs
    actions = actions_on(module)
    actions.frame().met = True
    if actions.temperatures:
        given = _with_tempered_projection(module, given)
    result = F.multi_head_attention_forward(**given)
    for listener in [listener for listener in actions.listeners if listener.wants(module)]:
        call = read_multi_head(module, **given)
        stats = computed(module, call, None, listener.stats)[1] if listener.stats else None
        result = first_of_tuple(result, partial(listener.take, module, call, stats))
    return result


_MULTI_HEAD_NAMES = (
    "query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v",
    "add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias", "training", "key_padding_mask", "need_weights",
    "attn_mask", "use_separate_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "static_k", "static_v",
    "average_attn_weights", "is_causal",
)  # fmt: skip


def _with_tempered_projection(module: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    heads, size = given["num_heads"], given["embed_dim_to_check"]
    stand_in = given["query"].new_empty(1, heads, 1, 1)
    for part in temperatures(module):
        if any(
            getattr(factor, what, False) for factor in part.modules() for what in ("follows_input", "follows_length")
        ):
            raise InputError(
                f"{type(part).__name__} differs from query to query, and nn.MultiheadAttention takes one temperature "
                "per head: put attemper.nn.MultiheadAttention(..., temperature=...) in its place."
            )
    product = temperature_of(module, stand_in, lambda: stand_in, None)
    assert product is not None
    factors = product.reciprocal().expand(1, heads, 1).reshape(heads, 1).expand(heads, size // heads).reshape(size)
    changed: dict[str, Any] = {}
    if given.get("use_separate_proj_weight"):
        weight = given["q_proj_weight"]
        changed["q_proj_weight"] = weight * factors[:, None].to(weight.dtype)
    else:
        weight = given["in_proj_weight"]
        changed["in_proj_weight"] = weight * _ones_after(factors, weight)[:, None]
    bias = given.get("in_proj_bias")
    if bias is not None:
        changed["in_proj_bias"] = bias * _ones_after(factors, bias)
    return given | changed


def _ones_after(factors: Tensor, like: Tensor) -> Tensor:
    """``factors`` for the query's third of packed features, and 1 for those of keys and values."""
    rest = factors.new_ones(like.shape[0] - len(factors))
    return torch.cat((factors, rest)).to(like.dtype)
