"""How attention functions read their arguments: flash_attn, xformers, TransformerEngine, torch's FlexAttention and
varlen attention, and our own.

Arguments are told apart by the names that the function itself gives them, since versions differ in their order. An
argument that is not known here and is not left at its default might mean masking: the call is refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from attemper.call.attn_mask import without_causal_bias
from attemper.call.packing import Packing
from attemper.call.request import Options
from attemper.sites.observation import AttentionCall, UnsupportedCallError, as_autocast_rounds
from attemper.sites.transformers_arguments import block_mask_of

TAP = "put attemper.tap beside it"

_WITHOUT_EFFECT = frozenset(
    (
        *("v", "value", "dropout_p", "p", "out", "output_dtype", "zero_tensors", "op", "kernel_options"),
        *("return_attn_probs", "return_softmax_lse", "return_lse", "return_aux"),
        *("max_seqlen", "max_seqlen_q", "max_seqlen_k", "max_q", "max_k"),
        *("deterministic", "num_splits", "pack_gqa", "sm_margin"),
    )
)
"""Arguments that change nothing about which key gets which weight."""


@lru_cache(maxsize=64)
def _signature(function: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, Any]]:
    """The signature of a function, and the defaults of its arguments."""
    signature = inspect.signature(function)
    return signature, {name: parameter.default for name, parameter in signature.parameters.items()}


class NamedArguments:
    """The arguments of one call by name, without those that are at their defaults."""

    def __init__(self, module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.module, self._function = module, getattr(function, "__name__", "attention")
        try:
            signature, defaults = _signature(function)
            bound = signature.bind(*args, **kwargs).arguments
        except (TypeError, ValueError) as error:
            raise UnsupportedCallError(module, f"arguments of its {self._function} do not fit its signature") from error
        self._given = {name: value for name, value in bound.items() if not _same(value, defaults.get(name))}

    def take(self, *names: str, default: Any = None) -> Any:
        """The argument that goes by one of these names."""
        found = [self._given.pop(name) for name in names if name in self._given]
        return found[0] if found else default

    def tensor(self, *names: str) -> Tensor:
        """An argument without which there is nothing to measure."""
        found = self.take(*names)
        if not isinstance(found, Tensor):
            raise self.unreadable(f"its {self._function} has no tensor {names[0]}")
        return found

    def refuse_rest(self) -> None:
        """Raises where an argument is left that could mean masking."""
        rest = sorted(set(self._given) - _WITHOUT_EFFECT)
        if rest:
            raise self.unreadable(f"its {self._function} is called with {', '.join(rest)}=, which is not known here")

    def unreadable(self, reason: str) -> UnsupportedCallError:
        said = f"{reason}; {TAP}"
        return UnsupportedCallError(self.module, said)


Read = Callable[[NamedArguments], AttentionCall]
"""From the arguments of a function to the call that they mean."""


def _same(value: Any, default: Any) -> bool:
    if value is None or value is default:
        return True
    plain = (bool, int, float, str, tuple, list)
    return isinstance(value, plain) and isinstance(default, plain) and value == default


def flash(given: NamedArguments) -> AttentionCall:
    """flash_attn_func, its qkvpacked and varlen forms: [B, tokens, heads, size] or [total, heads, size]."""
    query, key = _parts(given)
    if query.dim() == 4:
        options = _flash_options(given, query, key)
        return AttentionCall(query.transpose(1, 2), key.transpose(1, 2), None, options)
    starts = given.take("cu_seqlens")
    starts_q, starts_k = given.take("cu_seqlens_q", default=starts), given.take("cu_seqlens_k", default=starts)
    if starts_q is None or starts_k is None or query.dim() != 3:
        raise given.unreadable("its flash attention does not say where documents start")
    return documents(query, key, starts_q, starts_k, _flash_options(given, query, key))


def _parts(given: NamedArguments) -> tuple[Tensor, Tensor]:
    """Queries and keys, which may come stacked before the heads: qkv [..., 3, H, D], kv [..., 2, H, D]."""
    qkv, kv = given.take("qkv"), given.take("kv")
    if qkv is not None:
        if qkv.dim() not in (4, 5) or qkv.shape[-3] != 3:
            raise given.unreadable(f"its qkv is {list(qkv.shape)}")
        query, key, _ = qkv.unbind(-3)
        return query, key
    query = given.tensor("q")
    return (query, kv.unbind(-3)[0]) if kv is not None else (query, given.tensor("k"))


def _flash_options(given: NamedArguments, query: Tensor, key: Tensor) -> Options:
    if given.take("alibi_slopes") is not None:
        raise given.unreadable("its flash attention adds ALiBi slopes")
    if given.take("block_table", "page_table") is not None:
        raise given.unreadable("its flash attention reads a paged cache")
    window = given.take("window_size", default=(-1, -1))
    left, right = (-1 if side is None else side for side in window)
    options = Options(
        scale=given.take("softmax_scale"),
        is_causal=bool(given.take("causal", default=False)),
        causal_alignment="bottom-right",
        window_size=(left, right),
        softcap=given.take("softcap") or None,
        sink_logits=given.take("learnable_sink", "s_aux"),
        enable_gqa=query.shape[-2] != key.shape[-2],
    )
    given.refuse_rest()
    return options


def documents(query: Tensor, key: Tensor, starts_q: Tensor, starts_k: Tensor, options: Options) -> AttentionCall:
    """The call of packed documents [total, heads, size]: one sequence in which each starts where ``starts`` say."""
    views = [part.transpose(0, 1)[None] for part in (query, key)]
    return AttentionCall(views[0], views[1], None, options, Packing(starts_q, starts_k))


def xformers(given: NamedArguments) -> AttentionCall:
    """memory_efficient_attention: [B, tokens, heads, size], or [B, tokens, size] for one head."""
    query, key = given.tensor("query"), given.tensor("key")
    parts = [part[:, :, None] if part.dim() == 3 else part for part in (query, key)]
    if any(part.dim() != 4 for part in parts):
        raise given.unreadable("its xformers attention has grouped heads")
    mask, causal = _bias(given)
    options = Options(scale=given.take("scale"), **causal)
    given.refuse_rest()
    return AttentionCall(parts[0].transpose(1, 2), parts[1].transpose(1, 2), mask, options)


_TRIANGLES: Mapping[str, str] = {
    "LowerTriangularMask": "top-left",
    "LowerTriangularFromBottomRightMask": "bottom-right",
}
"""Masks of xformers that are causality and nothing else. Classes that derive from them add something."""


def _bias(given: NamedArguments) -> tuple[Tensor | None, dict[str, Any]]:
    """An attn_bias as a mask that is added, and as options."""
    bias = given.take("attn_bias")
    if bias is None:
        return None, {}
    if isinstance(bias, Tensor) and bias.dim() in (3, 4) and bias.dtype != torch.bool:
        return bias if bias.dim() == 4 else bias[:, None], {}
    kind = type(bias)
    if kind.__module__.partition(".")[0] == "xformers" and kind.__name__ in _TRIANGLES:
        return None, {"is_causal": True, "causal_alignment": _TRIANGLES[kind.__name__]}
    raise given.unreadable(f"its xformers mask is a {kind.__name__}")


def flex(given: NamedArguments) -> AttentionCall:
    """``flex_attention``: its mask is a BlockMask."""
    query, key, block_mask = given.tensor("query"), given.tensor("key"), given.take("block_mask")
    if given.take("score_mod") is not None:
        raise UnsupportedCallError(given.module, "its FlexAttention changes scores by a custom score_mod")
    options = Options(scale=given.take("scale"), enable_gqa=given.take("enable_gqa", default=False))
    given.refuse_rest()
    mask = None if block_mask is None else block_mask_of(given.module, block_mask, query, key)
    return AttentionCall(*as_autocast_rounds(query, key), mask, options)


def torch_varlen(given: NamedArguments) -> AttentionCall:
    """``torch.nn.attention.varlen``: packed documents, aligned at the bottom right."""
    query, key = given.tensor("query"), given.tensor("key")
    starts_q, starts_k = given.tensor("cu_seq_q"), given.take("cu_seq_k")
    if starts_k is None or given.take("seqused_k", "block_table") is not None:
        raise given.unreadable("its varlen attention reads an internal cache")
    options = Options(
        scale=given.take("scale"),
        causal_alignment="bottom-right",
        window_size=given.take("window_size", default=(-1, -1)),
        enable_gqa=given.take("enable_gqa", default=query.shape[1] != key.shape[1]),
    )
    given.refuse_rest()
    return documents(query, key, starts_q, starts_k, options)


_OWN = [name for name in Options.__dataclass_fields__ if name not in ("dropout_p", "stats", "spans")]
"""Options of ours that are read; dropout and statistics change no score and no weight."""


def own_attention(given: NamedArguments) -> AttentionCall:
    query, key, mask = given.tensor("query"), given.tensor("key"), given.take("attn_mask")
    return AttentionCall(query, key, *without_causal_bias("attention", mask, _own(given), query, key.shape[2]))


def own_varlen_attention(given: NamedArguments) -> AttentionCall:
    query, key = given.tensor("query"), given.tensor("key")
    return documents(query, key, given.tensor("cu_seqlens_q"), given.tensor("cu_seqlens_k"), _own(given))


def _own(given: NamedArguments) -> Options:
    return Options(**{name: value for name in _OWN if (value := given.take(name)) is not None})


def refusing(reason: str) -> Read:
    """Reads no call: what it attends to is decided inside."""

    def read(given: NamedArguments) -> AttentionCall:
        raise given.unreadable(reason)

    return read
