"""How attention functions read their arguments: flash_attn, xformers, TransformerEngine, torch's FlexAttention and
varlen attention, and our own.

Arguments of other packages are told apart by the names that the function itself gives them, since versions differ in
their order. An argument that is not known here and is not left at its default might mean masking: the call is refused
by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
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
        *("v", "value", "dropout_p", "p", "out", "output_dtype", "zero_tensors"),
        *("return_attn_probs", "return_softmax_lse", "return_lse", "max_seqlen", "max_seqlen_q", "max_seqlen_k"),
        *("op", "deterministic", "num_splits", "pack_gqa", "sm_margin"),
    )
)
"""Arguments that change nothing about which key gets which weight."""


class NamedArguments:
    """The arguments of one call by name."""

    def __init__(self, module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.module, self._function = module, getattr(function, "__name__", "attention")
        try:
            signature = inspect.signature(function)
            bound = signature.bind(*args, **kwargs).arguments
        except (TypeError, ValueError) as error:
            raise UnsupportedCallError(module, f"arguments of its {self._function} do not fit its signature") from error
        defaults = {name: parameter.default for name, parameter in signature.parameters.items()}
        self._given: dict[str, Any] = {
            name: value for name, value in bound.items() if not _same(value, defaults.get(name))
        }

    def take(self, *names: str, default: Any = None) -> Any:
        """The argument that goes by one of these names."""
        found = [self._given.pop(name) for name in names if name in self._given]
        return found[0] if found else default

    def tensor(self, *names: str) -> Tensor:
        """An argument without which there is nothing to measure."""
        found = self.take(*names)
        if not isinstance(found, Tensor):
            raise UnsupportedCallError(self.module, f"its {self._function} has no tensor {names[0]}; {TAP}")
        return found

    def refuse_rest(self) -> None:
        """Raises where an argument is left that could mean masking."""
        rest = sorted(set(self._given) - _WITHOUT_EFFECT)
        if rest:
            raise UnsupportedCallError(
                self.module, f"its {self._function} is called with {', '.join(rest)}=, which is not known here; {TAP}"
            )


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
        raise UnsupportedCallError(given.module, f"its flash attention does not say where documents start; {TAP}")
    return documents(query, key, starts_q, starts_k, _flash_options(given, query, key))


def _parts(given: NamedArguments) -> tuple[Tensor, Tensor]:
    """Queries and keys, which may come stacked before the heads: qkv [..., 3, H, D], kv [..., 2, H, D]."""
    qkv, kv = given.take("qkv"), given.take("kv")
    if qkv is not None:
        if qkv.dim() not in (4, 5) or qkv.shape[-3] != 3:
            raise UnsupportedCallError(given.module, f"its qkv is {list(qkv.shape)}; {TAP}")
        query, key, _ = qkv.unbind(-3)
        return query, key
    query = given.tensor("q")
    return (query, kv.unbind(-3)[0]) if kv is not None else (query, given.tensor("k"))


def _flash_options(given: NamedArguments, query: Tensor, key: Tensor) -> Options:
    if given.take("alibi_slopes") is not None:
        raise UnsupportedCallError(given.module, f"its flash attention adds ALiBi slopes; {TAP}")
    if given.take("block_table", "page_table") is not None:
        raise UnsupportedCallError(given.module, f"its flash attention reads a paged cache; {TAP}")
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


def flash_with_cache(given: NamedArguments) -> AttentionCall:
    """flash_attn_with_kvcache: writes into a cache whose lengths and pages only the kernel reads."""
    raise UnsupportedCallError(given.module, f"its flash attention reads and writes an internal cache; {TAP}")


def xformers(given: NamedArguments) -> AttentionCall:
    """memory_efficient_attention: [B, tokens, heads, size], or [B, tokens, size] for one head."""
    query, key = given.tensor("query"), given.tensor("key")
    parts = [part[:, :, None] if part.dim() == 3 else part for part in (query, key)]
    if any(part.dim() != 4 for part in parts):
        raise UnsupportedCallError(given.module, f"its xformers attention has grouped heads; {TAP}")
    mask, causal = _bias(given.module, given.take("attn_bias"))
    options = Options(scale=given.take("scale"), **causal)
    given.refuse_rest()
    return AttentionCall(parts[0].transpose(1, 2), parts[1].transpose(1, 2), mask, options)


_TRIANGLES: Mapping[str, str] = {
    "LowerTriangularMask": "top-left",
    "LowerTriangularFromBottomRightMask": "bottom-right",
}
"""Masks of xformers that are causality and nothing else. Classes that derive from them add something."""


def _bias(module: nn.Module, bias: Any) -> tuple[Tensor | None, dict[str, Any]]:
    """An attn_bias as a mask that is added, and as options."""
    if bias is None:
        return None, {}
    if isinstance(bias, Tensor) and bias.dim() in (3, 4) and bias.dtype != torch.bool:
        return bias if bias.dim() == 4 else bias[:, None], {}
    kind = type(bias)
    if kind.__module__.partition(".")[0] == "xformers" and kind.__name__ in _TRIANGLES:
        return None, {"is_causal": True, "causal_alignment": _TRIANGLES[kind.__name__]}
    raise UnsupportedCallError(module, f"its xformers mask is a {kind.__name__}; {TAP}")


def xformers_partial(given: NamedArguments) -> AttentionCall:
    """memory_efficient_attention_partial: over a part of the keys only, merged afterwards."""
    raise UnsupportedCallError(given.module, f"its xformers attention is over a part of the keys; {TAP}")


def transformer_engine(given: NamedArguments) -> AttentionCall:
    """DotProductAttention.forward: layouts, masks and kernels are chosen inside."""
    raise UnsupportedCallError(given.module, f"TransformerEngine chooses layout, mask and kernel inside; {TAP}")


def flex(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *options: Any, **given: Any) -> AttentionCall:
    """``flex_attention``: its mask is a BlockMask."""
    names = ("score_mod", "block_mask", "scale", "enable_gqa")
    given = dict(zip(names, options, strict=False)) | given
    if given.get("score_mod") is not None:
        raise UnsupportedCallError(module, "its FlexAttention changes scores by a custom score_mod")
    block_mask = given.get("block_mask")
    mask = None if block_mask is None else block_mask_of(module, block_mask, query, key)
    kept = Options(scale=given.get("scale"), enable_gqa=given.get("enable_gqa", False))
    return AttentionCall(*as_autocast_rounds(query, key), mask, kept)


_CACHES = ("seqused_k", "block_table")


def torch_varlen(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    *_: Any,
    **given: Any,
) -> AttentionCall:
    """``torch.nn.attention.varlen.varlen_attn``: packed documents, aligned at the bottom right."""
    if cu_seq_k is None or any(given.get(name) is not None for name in _CACHES):
        raise UnsupportedCallError(module, f"its varlen attention reads an internal cache; {TAP}")
    grouped = given.get("enable_gqa", False) or query.shape[1] != key.shape[1]
    kept = {name: given[name] for name in ("scale", "window_size") if name in given}
    options = Options(causal_alignment="bottom-right", enable_gqa=grouped, **kept)
    return documents(query, key, cu_seq_q, cu_seq_k, options)


def torch_varlen_out(module: nn.Module, out: Tensor, *args: Any, **kwargs: Any) -> AttentionCall:
    """``varlen_attn_out``, which writes into a tensor that it is given."""
    return torch_varlen(module, *args, **kwargs)


_READ = ("temperature", "normalizer", "causal_alignment", "window_size", "softcap", "sink_logits", "first_tokens")
_OWN = ("dropout_p", "is_causal", "scale", "enable_gqa")
"""Options of ours that may be given by place; dropout and statistics change no score and no weight."""


def own_attention(
    _: nn.Module, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **given: Any
) -> AttentionCall:
    options = _own_options(args, given)
    return AttentionCall(query, key, *without_causal_bias("attention", attn_mask, options, query, key.shape[2]))


def own_varlen_attention(
    _: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *args: Any,
    **given: Any,
) -> AttentionCall:
    # The greatest lengths of a document come first.
    return documents(query, key, cu_seqlens_q, cu_seqlens_k, _own_options(args[2:], given))


def _own_options(args: tuple[Any, ...], given: dict[str, Any]) -> Options:
    given = dict(zip(_OWN, args, strict=False)) | given
    return Options(**{name: given[name] for name in (*_OWN[1:], *_READ, "backend") if name in given})
