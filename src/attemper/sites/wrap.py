"""Acting on the attention of chosen modules: their queries are tempered, their calls are told to who acts on them.

Each chosen module's forward is wrapped, and what it calls inside is met where it still says everything: transformers'
registry, ``F.scaled_dot_product_attention``, ``nn.MultiheadAttention``'s function, our own layers. Inside the forward,
because activation checkpointing calls it a second time, where no mode around the model stands any more.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from attemper.errors import InputError
from attemper.nn.attention import over_padded
from attemper.nn.temperature import ACTIONS
from attemper.sites import find
from attemper.sites.act import Actions, Listener, actions_on, temperatures
from attemper.sites.acting_functions import ActingMode
from attemper.sites.acting_registry import RegistryActions


def actions_of(module: nn.Module, way: str) -> Actions:
    """The actions of a module, which gets some if it has none; ``release`` when nothing is left of them."""
    actions: Actions | None = getattr(module, ACTIONS, None)
    if actions is None:
        actions = RegistryActions(way) if way == find.REGISTRY else Actions(way)
        actions.original = module.__dict__.get("forward")
        setattr(module, ACTIONS, actions)
        actions.forward = module.forward = partial(_forward, module)
        # nn.TransformerEncoderLayer's fast path calls no forward of its parts; a hook turns it off.
        module.register_forward_pre_hook(_INERT)
    return actions


def listen(module: nn.Module, way: str, listener: Listener) -> None:
    """Tells ``listener`` of the attention calls of a module, until ``unlisten``."""
    actions_of(module, way).listeners.append(listener)


def unlisten(module: nn.Module, listener: Listener) -> None:
    """Tells it no more. May be called again."""
    actions: Actions | None = getattr(module, ACTIONS, None)
    if actions is not None and listener in actions.listeners:
        actions.listeners.remove(listener)
    release(module)


def release(module: nn.Module) -> None:
    """Gives a module its own forward back when nothing is done to its attention any more."""
    actions: Actions | None = getattr(module, ACTIONS, None)
    if actions is None or not actions.idle:
        return
    ours = module.__dict__.get("forward")
    if ours is not actions.forward and not (isinstance(ours, partial) and ours.func is _forward):
        return  # Somebody wrapped ours: it stays, and passes through until it is acted on again.
    delattr(module, ACTIONS)
    del module.forward
    if actions.original is not None:
        module.forward = actions.original
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, _Inert):
            del module._forward_pre_hooks[key]
    if isinstance(actions, RegistryActions):
        actions.leave()


class _Inert:
    """A hook that does nothing but be there."""

    def __call__(self, *_: Any) -> None:
        return None


_INERT = _Inert()


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    actions = actions_on(module)
    run = partial(type(module).forward, module) if actions.original is None else actions.original
    if actions.way == find.TORCH and any(getattr(part, "is_nested", False) for part in args):
        # Torch's fast path takes nested tensors, and it is off where somebody acts.
        run = partial(over_padded, run, batch_first=bool(module.batch_first))
    if actions.idle:
        return run(*args, **kwargs)
    conditional = any(part.follows("follows_input") for part in temperatures(module))
    frame = actions.enter(_input(args, kwargs) if conditional else None)
    try:
        if actions.way in (find.SDPA, find.TORCH):
            with ActingMode(module):
                result = run(*args, **kwargs)
        else:
            result = run(*args, **kwargs)
    finally:
        actions.leave_frame()
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
