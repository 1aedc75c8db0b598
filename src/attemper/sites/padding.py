"""Which tokens of a transformers model are real, told by the 2-D masks that its models are called with.

The innermost model decides: an encoder and a decoder each get their own mask, a vision tower gets none. A 4-D mask
does not
tell: right-padded rows see keys there.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

CROSS_ARGUMENTS = ("key_value_states", "encoder_hidden_states", "cross_attention_states")
"""Arguments whose presence makes a module's attention cross attention."""


_PADDING = {
    nn.TransformerEncoderLayer: ("src_key_padding_mask",),
    nn.TransformerDecoderLayer: ("tgt_key_padding_mask",),
}
"""Layers of torch that are told their padding by other names, in which True hides."""
_LAYERS = tuple(_PADDING)

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


@dataclass(frozen=True)
class Tokens:
    """Real tokens as [B, tokens] bool: those that ask, and those that a cross attention is asked about."""

    own: Tensor | None
    encoder: Tensor | None


@dataclass
class CallContext:
    """What surrounds the attention call that is running."""

    stack: list[Tokens] = field(default_factory=list)
    cross: dict[nn.Module, bool] = field(default_factory=dict)
    calls: dict[nn.Module, int] = field(default_factory=dict)
    """Attention calls of a module since its forward began."""

    running: list[nn.Module] = field(default_factory=list)
    """Modules whose forward is running, outermost first."""

    def module(self) -> nn.Module:
        """The innermost module that is running."""
        return self.running[-1]

    def reset(self) -> None:
        """Back to outside of every module."""
        self.stack.clear()
        self.running.clear()
        self.calls.clear()

    @property
    def tokens(self) -> Tokens:
        return self.stack[-1] if self.stack else Tokens(None, None)


@contextmanager
def tracked(
    context: CallContext, model: nn.Module, models: list[nn.Module], entered: Call | None = None
) -> Iterator[CallContext]:
    """Follows masks and cross attention through ``model``'s forward passes by hooks, which are all gone afterwards.

    ``models``: the modules whose masks count (transformers' ``PreTrainedModel``); without any, ``model`` itself.
    Layers of nn.Transformer tell padding too. ``entered``: the arguments of a forward of ``model`` that has begun.
    """
    counted = {id(module) for module in (models or [model])}
    with ExitStack() as hooks:
        for module in model.modules():
            if entered is not None and module is model:
                continue  # its hooks run already, and must not change while they do
            names = _parameters(module)
            cross = [name for name in CROSS_ARGUMENTS if name in names]
            handle = module.register_forward_pre_hook(_enter_module(context, names, cross), with_kwargs=True)
            hooks.callback(handle.remove)
            after = module.register_forward_hook(_leave_module(context), always_call=True)
            hooks.callback(after.remove)
            if id(module) in counted or isinstance(module, _LAYERS):
                before = module.register_forward_pre_hook(_enter_model(context, names), with_kwargs=True)
                after = module.register_forward_hook(
                    lambda *_: context.stack.pop() and None if context.stack else None, always_call=True
                )
                hooks.callback(before.remove)
                hooks.callback(after.remove)
        if entered is not None:
            names = _parameters(model)
            _enter_module(context, names, [])(model, *entered)
            if id(model) in counted:
                _enter_model(context, names)(model, *entered)
        yield context


def _parameters(module: nn.Module) -> list[str]:
    try:
        return list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        return []


def _given(names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """An argument of a call, by keyword or by place."""
    if name in kwargs:
        return kwargs[name]
    place = names.index(name) if name in names else len(args)
    return args[place] if place < len(args) else None


def _enter_module(context: CallContext, names: list[str], cross: list[str]) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        context.calls[module] = 0
        if cross:
            first = args[0] if args else kwargs.get("hidden_states")
            others = [_given(names, args, kwargs, name) for name in cross]
            context.cross[module] = any(isinstance(other, Tensor) and other is not first for other in others)
        context.running.append(module)

    return hook


def _enter_model(context: CallContext, names: list[str]) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        own, encoder = (
            _token_mask(_given(names, args, kwargs, name)) for name in ("attention_mask", "encoder_attention_mask")
        )
        for name in _PADDING.get(type(module), ()):
            padding = _token_mask(_given(names, args, kwargs, name))
            own = own if padding is None else ~padding
        context.stack.append(Tokens(own, encoder))

    return hook


def _leave_module(context: CallContext) -> Any:
    def hook(*_: Any) -> None:
        if context.running:
            context.running.pop()

    return hook


def _token_mask(mask: Any) -> Tensor | None:
    return mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None
