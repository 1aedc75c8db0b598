"""Patches of small transformers models: masks, angles, projections and stored keys changed while a context is open."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.support.engine_models import Tiny


@contextmanager
def edited(modules: Sequence[Any], edit: Callable[[Any, dict[str, Any]], None]) -> Iterator[None]:
    """Changes what modules are called with by name."""
    with ExitStack() as stack:
        for module in modules:
            stack.callback(_wrap(module, edit))
        yield


def _wrap(module: Any, edit: Callable[[Any, dict[str, Any]], None]) -> Callable[[], None]:
    original = module.forward
    names = _names(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        kwargs |= dict(zip(names, args, strict=False))
        edit(module, kwargs)
        return original(**kwargs)

    module.forward = forward
    return lambda: module.__dict__.pop("forward", None)


def _names(module: Any) -> list[str]:
    """What a module's forward is called with, also behind a decorator."""
    return [name for name in inspect.signature(type(module).forward).parameters if name != "self"]


@contextmanager
def changed(parameters: Sequence[Tensor], change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    saved = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(change(parameter))
        yield
        for parameter, before in zip(parameters, saved, strict=True):
            parameter.copy_(before)


@contextmanager
def attributes(objects: Sequence[Any], name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    saved = [getattr(one, name) for one in objects]
    for one in objects:
        setattr(one, name, change(getattr(one, name)))
    yield
    for one, before in zip(objects, saved, strict=True):
        setattr(one, name, before)


@contextmanager
def projected(tiny: Tiny, sites: list[int], which: str, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Changes what the projection of queries, keys or values gives, before norms and rotary embedding, as
    [B, tokens, heads, size].
    """
    handles = []
    for site in sites:
        module = tiny.attentions[site]
        if hasattr(module, "c_attn"):
            place = "qkv".index(which)

            def packed(_: Any, __: Any, out: Tensor, place: int = place) -> Tensor:
                parts = list(out.chunk(3, -1))
                parts[place] = change(parts[place].unflatten(-1, (tiny.heads, -1))).flatten(-2)
                return torch.cat(parts, -1)

            handles.append(module.c_attn.register_forward_hook(packed))
            continue
        names = {"q": ("q_proj", "query"), "k": ("k_proj", "key"), "v": ("v_proj", "value")}[which]
        layer = next(getattr(module, name) for name in names if hasattr(module, name))
        handles.append(
            layer.register_forward_hook(lambda _, __, out: change(out.unflatten(-1, (-1, tiny.size))).flatten(-2))
        )
    yield
    for handle in handles:
        handle.remove()


class _Cache:
    """Stands where a cache of keys and values would: changes them as they are stored."""

    def __init__(self, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        self._change = change

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self._change(key, value)


def stored(tiny: Tiny, sites: list[int], change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Any:
    def edit(module: Any, kwargs: dict[str, Any]) -> None:
        kwargs["cache" if "cache" in _names(module) else "past_key_values"] = _Cache(change)

    return edited([tiny.attentions[site] for site in sites], edit)


def masked(tiny: Tiny, sites: list[int], change: Callable[[Tensor], Tensor]) -> Any:
    """Changes which keys are seen, [B, 1, Q, K] bool."""

    def edit(_: Any, kwargs: dict[str, Any]) -> None:
        mask, states = kwargs.get("attention_mask"), kwargs["hidden_states"]
        seen, additive = _seen(mask, states, tiny.causal)
        # Eager attention adds its mask: of True and False it would hide nothing.
        additive |= tiny.model.config._attn_implementation == "eager"
        seen = change(seen)
        least = torch.finfo(states.dtype).min
        kwargs["attention_mask"] = torch.where(seen, 0.0, least).to(states.dtype) if additive else seen

    return edited([tiny.attentions[site] for site in sites], edit)


def _seen(mask: Tensor | None, states: Tensor, causal: bool) -> tuple[Tensor, bool]:
    if mask is None:
        size = states.shape[1]
        ones = torch.ones(1, 1, size, size, dtype=torch.bool)
        return ones.tril() if causal else ones, False
    additive = mask.dtype != torch.bool
    seen = mask > -1e4 if additive else mask
    return seen.expand(-1, 1, states.shape[1], -1), additive


def biased(tiny: Tiny, sites: list[int], bias: Callable[[int], Tensor]) -> Any:
    """Adds numbers to scores, [heads or 1, Q, K]."""

    def edit(_: Any, kwargs: dict[str, Any]) -> None:
        states = kwargs["hidden_states"]
        seen, _ = _seen(kwargs.get("attention_mask"), states, tiny.causal)
        least = torch.finfo(states.dtype).min
        kwargs["attention_mask"] = torch.where(seen, bias(states.shape[1])[None], least).to(states.dtype)

    return edited([tiny.attentions[site] for site in sites], edit)


def turned(tiny: Tiny, sites: list[int], angles: Callable[[Tensor], Tensor], length: float = 1.0) -> Any:
    """Gives other cosines and sines to attention. ``angles``: from the model's own per token to others, [pairs]."""

    def edit(module: Any, kwargs: dict[str, Any]) -> None:
        cos, _ = kwargs["position_embeddings"]
        turned = torch.arange(cos.shape[1])[:, None] * angles(_own_angles(tiny, module))[None]
        if cos.shape[-1] == 2 * turned.shape[-1]:
            turned = torch.cat((turned, turned), -1)
        pair = [(function(turned) * length)[None].to(cos.dtype) for function in (torch.cos, torch.sin)]
        kwargs["position_embeddings"] = tuple(part.expand_as(cos) for part in pair)

    return edited([tiny.attentions[site] for site in sites], edit)


def _own_angles(tiny: Tiny, module: Any) -> Tensor:
    buffers = {name: part for name, part in tiny.model.named_buffers() if name.endswith("inv_freq")}
    found = [part for name, part in buffers.items() if "original" not in name]
    if len(found) > 1:
        kind = "sliding_attention" if module.sliding_window else "full_attention"
        found = [part for name, part in buffers.items() if kind in name and "original" not in name]
    return found[0].float().cpu()


def interleaved(tiny: Tiny, sites: list[int], _: float) -> Any:
    """Rotates neighbours instead of halves."""
    home = sys.modules[type(tiny.attentions[0]).__module__]

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        half = q.shape[-1] // 2
        c, s = cos[:, None, :, :half], sin[:, None, :, :half]

        def one(x: Tensor) -> Tensor:
            even, odd = x[..., 0::2], x[..., 1::2]
            return torch.stack((even * c - odd * s, odd * c + even * s), -1).flatten(-2).to(x.dtype)

        return one(q), one(k)

    return attributes([home], "apply_rotary_pos_emb", lambda _: rotate)


def grid(x: Tensor, bits: float) -> Tensor:
    most = 2 ** (int(bits) - 1) - 1
    step = x.float().abs().amax(-1, keepdim=True) / most
    return ((x.float() / step).round() * step).to(x.dtype)


def noise(x: Tensor, size: float) -> Tensor:
    drawn = torch.randn(x.shape, generator=torch.Generator().manual_seed(7))
    return x + (drawn * x.float().std() * size).to(x.dtype)


def logarithms(count: int, length: float) -> Tensor:
    return (torch.arange(1, count + 1).float().log() / math.log(length)).clamp(min=1.0)
