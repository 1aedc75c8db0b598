"""Wraps the forward of chosen modules, so that their attention calls are tempered and listeners receive them.

What the forward calls is met where the call still says everything: transformers' registry,
``F.scaled_dot_product_attention``, ``nn.MultiheadAttention``'s function, our own layers. It is met inside the forward
because activation checkpointing runs that a second time, where no mode around the model is active any more.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from attemper.errors import InputError
from attemper.nn.temperature import ACTIONS
from attemper.sites.act import Actions, Listener, actions_on, temperatures
from attemper.sites.find import Site


def actions_of(site: Site) -> Actions:
    """The actions of a site, made if it has none. Call ``release`` when they may have no effect any more."""
    module = site.module
    actions: Actions | None = getattr(module, ACTIONS, None)
    if actions is None:
        assert site.way.actions is not None
        actions = site.way.actions()
        actions.original = module.__dict__.get("forward")
        setattr(module, ACTIONS, actions)
        actions.forward = module.forward = partial(_forward, module)
        # nn.TransformerEncoderLayer's fast path calls no forward of its parts; a hook turns it off.
        module.register_forward_pre_hook(_INERT)
    return actions


def listen(site: Site, listener: Listener) -> None:
    """Gives ``listener`` the attention calls of a site, until ``unlisten``."""
    actions_of(site).listeners.append(listener)


def unlisten(site: Site, listener: Listener) -> None:
    """Ends ``listen``. May be called again."""
    actions: Actions | None = getattr(site.module, ACTIONS, None)
    if actions is not None and listener in actions.listeners:
        actions.listeners.remove(listener)
    release(site.module)


def release(module: nn.Module) -> None:
    """Gives a module its own forward back once its actions have no effect."""
    actions: Actions | None = getattr(module, ACTIONS, None)
    if actions is None or actions.has_effect:
        return
    ours = module.__dict__.get("forward")
    if ours is not actions.forward and not (isinstance(ours, partial) and ours.func is _forward):
        return  # Somebody wrapped our forward: it stays, and changes nothing until the module is acted on again.
    delattr(module, ACTIONS)
    del module.forward
    if actions.original is not None:
        module.forward = actions.original
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, _Inert):
            del module._forward_pre_hooks[key]
    actions.release()


class _Inert:
    """A hook without effect, except that there is one."""

    def __call__(self, *_: Any) -> None:
        return None


_INERT = _Inert()


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    actions = actions_on(module)
    forward = actions.own_forward(module, args)
    if not actions.has_effect:
        return forward(*args, **kwargs)
    conditional = any(part.follows("follows_input") for part in temperatures(module))
    frame = actions.begin_forward(_input(args, kwargs) if conditional else None)
    try:
        result = actions.run(module, forward, args, kwargs)
    finally:
        actions.end_forward()
    met, frame.met = frame.met, False  # a checkpoint that is traced leaves things as they were
    if not met:
        raise InputError(
            f"{type(module).__name__}: its attention was not met in a forward pass, so that nothing was done to it. It "
            "may attend in other ways than its code tells; leave it out with sites=."
        )
    return result


def _input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The layer's input: its first tensor."""
    given = [*args, kwargs.get("hidden_states"), *kwargs.values()]
    return next((value for value in given if isinstance(value, Tensor)), None)
