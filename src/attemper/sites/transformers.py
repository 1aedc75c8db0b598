"""The adapter for transformers' attention registry: ``attemper`` as an attention implementation.

It is registered for masks too: without a mask function of the same name the mask would arrive as None, and padding
would be ignored. Windows and chunks are in that mask, so ``sliding_window`` carries nothing more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from attemper.errors import InputError, MissingExtraError
from attemper.functional.attention import executed
from attemper.functional.call import Options, first_true, planned
from attemper.sites.observer import UnsupportedCallError, current

NAME = "attemper"

_WITHOUT_EFFECT = frozenset(
    [
        "cache_position",
        "deterministic",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "seq_idx",
        "sliding_window",
        "use_cache",
    ]
)
"""Keywords that models pass along and that mean nothing to attention over a mask. Any other one is refused."""


def register() -> None:
    """Makes ``set_attn_implementation("attemper")`` known to transformers. Safe to call again."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise MissingExtraError("Measuring a transformers model", "transformers", "transformers") from error
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, position_bias: Tensor | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention as transformers' models call it: query [B, H, Q, D], key and value [B, G, K, D]; returns ([B, Q, H,
    E], None).

    Raises:
        UnsupportedCallError: a keyword or a mask that is not known here: it might mean masking.
    """
    unknown = sorted(name for name, given in others.items() if given is not None and name not in _WITHOUT_EFFECT)
    if unknown:
        raise UnsupportedCallError(
            module, f"its attention is called with {', '.join(unknown)}=, which is not known here"
        )
    mask = _mask(module, query, key, attention_mask, position_bias)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    observer = current()
    if observer is not None and dropout > 0:
        raise InputError(
            "attention dropout is on: call model.eval() before a scan, its outputs would be random otherwise."
        )
    options = Options(
        scale=scaling, is_causal=bool(is_causal) and attention_mask is None and query.shape[2] > 1, softcap=softcap,
        sink_logits=s_aux, dropout_p=dropout, enable_gqa=query.shape[1] != key.shape[1],
        stats=() if observer is None else observer.stats, backend="auto" if observer is None else observer.backend,
    )  # fmt: skip
    call = planned(f"{type(module).__name__} with attn_implementation='attemper'", query, key, value, mask, options)
    if observer is not None:
        tokens = observer.key_tokens(module, key.shape[2])
        if tokens is not None:
            call = replace(call, first_keys=first_true(tokens, call.first_tokens))
    output, stats = executed(call)
    if observer is not None and stats is not None:
        observer.observe(module, stats, key.shape[2])
    return output.transpose(1, 2).contiguous(), None


def _mask(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, position_bias: Tensor | None
) -> Tensor | None:
    """Mask and position bias as one tensor, cut to the keys that are there."""
    for name, tensor in (("attention_mask", mask), ("position_bias", position_bias)):
        if tensor is not None and (not isinstance(tensor, Tensor) or tensor.dim() != 4):
            came = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise UnsupportedCallError(module, f"its {name} is {came} where [batch, heads, queries, keys] is expected")
    if query.dim() != 4:
        raise UnsupportedCallError(
            module, f"its queries are {list(query.shape)} where [batch, heads, tokens, size] is expected"
        )
    keys = key.shape[2]
    mask, bias = (None if tensor is None else tensor[..., :keys] for tensor in (mask, position_bias))
    if mask is None or bias is None:
        return bias if mask is None else mask
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else mask + bias


@dataclass
class Switched:
    """Models whose attention runs here for a while, and those that would not."""

    models: list[nn.Module] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """Module name -> reason."""
    _saved: list[tuple[Any, str | None]] = field(default_factory=list)

    def take(self, config: Any) -> None:
        """Makes what reads this config attend here."""
        self._saved.append((config, config._attn_implementation_internal))
        config._attn_implementation_internal = NAME

    def exclude(self, model: nn.Module) -> None:
        """Gives one model its own implementation back, for good."""
        config: Any = model.config
        for saved, implementation in self._saved:
            if saved is config:
                saved._attn_implementation_internal = implementation
        self.models = [other for other in self.models if other.config is not config]

    def restore(self) -> None:
        for config, implementation in self._saved:
            config._attn_implementation_internal = implementation


@contextmanager
def switched(model: nn.Module) -> Iterator[Switched]:
    """Runs the attention of every transformers model inside ``model`` here; each gets its own back whatever happens."""
    register()
    from transformers import PreTrainedModel

    state = Switched()
    seen: set[int] = set()
    for name, module in model.named_modules():
        if not isinstance(module, PreTrainedModel):
            continue
        if not module._can_set_attn_implementation():
            state.refused[name or type(module).__name__] = (
                f"{type(module).__name__} computes attention with code of its own, not through transformers' "
                f"attention registry"
            )
            continue
        state.models.append(module)
        if id(module.config) not in seen:
            seen.add(id(module.config))
            state.take(module.config)
    for config in [config for config, _ in state._saved]:
        # Some models give a sub-config to modules that are no PreTrainedModel: nothing but the config tells them.
        for sub in _sub_configs(config):
            if id(sub) not in seen:
                seen.add(id(sub))
                state.take(sub)
    try:
        yield state
    finally:
        state.restore()


def _sub_configs(config: Any) -> Iterator[Any]:
    for name in config.sub_configs:
        sub = getattr(config, name, None)
        if sub is not None:
            yield sub
            yield from _sub_configs(sub)
