"""Actions on the attention of a module: its queries are tempered, and listeners receive each call and its output.

``actions_of`` puts ``Actions`` on a module, whose forward runs inside them from then on. Attention is met inside the
forward, where the call still says everything (transformers' registry, ``F.scaled_dot_product_attention``,
``nn.MultiheadAttention``'s function, our own layers), because activation checkpointing runs the forward a second time,
where no mode around the model is active any more. Each entry point makes a ``ModelCall`` of the attention calls that it
meets there and hands it to ``attend``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from attemper.call.attention import run
from attemper.call.normalizer import rowwise_of
from attemper.call.request import Options, request_of
from attemper.call.result import AttentionStats
from attemper.call.visible_keys import visible_keys
from attemper.errors import InputError
from attemper.functional.attention import attention
from attemper.nn.normalizers import Normalizer
from attemper.nn.temperature import ACTIONS, Temperature, product_of
from attemper.sites.names import names_of
from attemper.sites.observation import AttentionCall, beside, check_mask, report
from attemper.statistics import rowwise_names

if TYPE_CHECKING:
    from attemper.sites.find import Site


class Listener(Protocol):
    """Receives the attention calls of a module, and may tie something to their output."""

    stats: tuple[str, ...]
    """Statistics this listener needs, with gradients. Empty if it works from queries and keys."""
    replaces: bool
    """Whether our kernel may compute output and statistics at once, in place of the model's own."""

    def wants(self, module: nn.Module) -> bool:
        """Whether this listener needs the present call of ``module``."""
        ...

    def receive(self, module: nn.Module, call: AttentionCall, stats: AttentionStats | None, output: Tensor) -> Tensor:
        """Receives a call; returns its output, with whatever is tied to it."""
        ...


@dataclass
class ModelCall:
    """One attention call as a model's own code makes it, and how to make it again with another query."""

    module: nn.Module
    query: Tensor
    """[B, H, Q, D]"""
    value: Tensor
    dropout: float
    replaceable: bool
    """Whether the output of our kernel can stand in for that of the model's own."""

    def read(self, query: Tensor) -> AttentionCall:
        """The call with ``query`` as its queries."""
        raise NotImplementedError

    def run(self, query: Tensor) -> Any:
        """What the model's own attention returns for ``query``."""
        raise NotImplementedError

    def result_of(self, output: Tensor) -> Any:
        """The output of our kernel, [B, H, Q, E], as what ``run`` returns."""
        raise NotImplementedError

    def map_output(self, function: Callable[[Tensor], Tensor], result: Any) -> Any:
        """What ``run`` returned, with ``function`` applied to the output in it."""
        raise NotImplementedError


@dataclass
class Frame:
    """One forward pass of a module."""

    hidden: Tensor | None = None
    """The layer's input, where a temperature is conditional on it."""
    met: bool = False
    """Whether an attention call was met."""


class Actions:
    """What acts on the attention of one module: names of its temperatures and normalizers, and its listeners.

    A copy or a pickle of the module keeps the temperatures, which are its children, and has no listeners.
    """

    def __init__(self) -> None:
        self.temperatures: list[str] = []
        self.normalizers: list[str] = []
        """Names of normalizers in place of softmax; the last one is used."""
        self.listeners: list[Listener] = []
        self.original: Any = None
        """A forward of the module's own, where it had one beside its class's."""
        self.forward: Any = None
        """Our forward, which stands in its place."""
        self._traced = Frame()
        self._frames = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: list(getattr(self, name)) for name in ("temperatures", "normalizers")}
        return {"original": self.original, **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, listeners=[], forward=None, _traced=Frame(), _frames=threading.local())

    def own_forward(self, module: nn.Module, args: tuple[Any, ...]) -> Callable[..., Any]:
        return partial(type(module).forward, module) if self.original is None else self.original

    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs the module's own forward so that its attention calls are met."""
        return forward(*args, **kwargs)

    def release(self) -> None:
        """Called once when nothing acts on the module any more."""

    def normalizer(self, module: nn.Module) -> Normalizer | None:
        """The normalizer that the module was given in place of softmax; the last one counts."""
        return getattr(module, self.normalizers[-1]) if self.normalizers else None

    @property
    def has_effect(self) -> bool:
        return bool(self.temperatures or self.normalizers or self.listeners)

    def begin_forward(self, hidden: Tensor | None) -> Frame:
        """Begins a forward pass of the module, in this thread."""
        if torch.compiler.is_compiling():
            self._traced.hidden, self._traced.met = hidden, False
            return self._traced
        frame = Frame(hidden)
        self._stack().append(frame)
        return frame

    def end_forward(self) -> None:
        """Ends the forward pass that began last."""
        if torch.compiler.is_compiling():
            self._traced.hidden = None
        else:
            self._stack().pop()

    def frame(self) -> Frame:
        """The forward pass that runs; an empty one where the attention runs outside of any."""
        if torch.compiler.is_compiling():
            return self._traced
        stack = self._stack()
        return stack[-1] if stack else Frame()

    def _stack(self) -> list[Frame]:
        if not hasattr(self._frames, "stack"):
            self._frames.stack = []
        return self._frames.stack

    def attend_layer(
        self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, dropout: float, given: dict[str, Any]
    ) -> tuple[Tensor, AttentionStats | None]:
        """The attention of a layer of ``attemper.nn``, which has applied its temperatures in ``given`` already."""
        self.frame().met = True
        listeners = [listener for listener in self.listeners if listener.wants(layer)]
        own: Any = layer.stats
        kept = rowwise_names(own) if rowwise_of(given["normalizer"]) else own
        names = tuple(dict.fromkeys([*kept, *_stats_for(listeners)]))
        output, stats = attention(query, key, value, dropout_p=dropout, stats=names, **given)
        if listeners:
            options = Options(
                **{name: given[name] for name in ("temperature", "normalizer", "is_causal") if name in given}
            )
            call = AttentionCall(query, key, given["attn_mask"], options)
            for listener in listeners:
                output = listener.receive(layer, call, stats, output)
        return output, stats if layer.stats else None


def actions_on(module: nn.Module) -> Actions:
    return getattr(module, ACTIONS)


def temperatures(module: nn.Module) -> list[Temperature]:
    """The temperatures that this module's attention was given."""
    actions: Actions | None = getattr(module, ACTIONS, None)
    return [] if actions is None else [getattr(module, name) for name in actions.temperatures]


def normalizer_of(module: nn.Module) -> Normalizer | None:
    """The normalizer that this module's attention was given in place of softmax."""
    actions: Actions | None = getattr(module, ACTIONS, None)
    return None if actions is None else actions.normalizer(module)


def modules_with_normalizer(model: nn.Module) -> list[str]:
    """Names of the modules of ``model`` whose attention was given a normalizer in place of the model's own softmax."""
    return [name for module, name in names_of(model).items() if normalizer_of(module) is not None]


def query_over_temperature(query: Tensor, temperature: Tensor) -> Tensor:
    """``query`` [B, H, Q, D] divided by ``temperature``, in float32 at least and rounded to the query's type.

    The bits stay where the temperature is 1.
    """
    wide = query if query.dtype in (torch.float32, torch.float64) else query.float()
    divided = wide * temperature.to(wide.dtype).reciprocal()[..., None]
    if query.dtype == torch.float16:
        # The largest float16 stands for what would be infinite, and NaN in a product with a key.
        largest = torch.finfo(query.dtype).max
        divided = divided.clamp(-largest, largest)
    return divided.to(query.dtype)


def attend(made: ModelCall) -> Any:
    """One attention call of a module with ``Actions``: what the model's own code gets for it."""
    module, query = made.module, made.query
    actions = actions_on(module)
    frame = actions.frame()
    frame.met = True
    if actions.temperatures:
        given, counts = temperatures(module), lambda: key_counts(_call_of(made, made.query))
        temperature = product_of(given, query, frame.hidden, counts)
        assert temperature is not None
        query = query_over_temperature(query, temperature)
    listeners = [listener for listener in actions.listeners if listener.wants(module)]
    normalizer = normalizer_of(module)
    if not listeners and normalizer is None:
        return made.run(query)
    call, names = _call_of(made, query), _stats_for(listeners)
    if normalizer is not None:
        call = _with_normalizer(made, call, normalizer, names)
        result, stats = _by_our_kernel(made, call, names)
    elif names and _may_replace(made, call, listeners):
        result, stats = _by_our_kernel(made, call, names)
    else:
        result = made.run(query)
        stats = output_and_statistics(module, call, None, names)[1] if names else None
    for listener in listeners:
        result = made.map_output(partial(listener.receive, module, call, stats), result)
    return result


def _call_of(made: ModelCall, query: Tensor) -> AttentionCall:
    """The call with this query, once it is known that its mask means the numbers it holds."""
    call = made.read(query)
    check_mask(made.module, call)
    return call


def _stats_for(listeners: list[Listener]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for listener in listeners for name in listener.stats))


def _may_replace(made: ModelCall, call: AttentionCall, listeners: list[Listener]) -> bool:
    possible = made.replaceable and made.dropout == 0 and call.packing is None
    return possible and all(listener.replaces for listener in listeners)


def _with_normalizer(
    made: ModelCall, call: AttentionCall, normalizer: Normalizer, names: tuple[str, ...]
) -> AttentionCall:
    """The call under another normalizer than softmax."""
    kind = type(made.module).__name__
    if not made.replaceable or call.packing is not None:
        raise InputError(
            f"{kind}: temper(normalizer=...) takes the place of attention over four dimensions, "
            "[batch, heads, tokens, size], without packed documents. Leave this module out with sites=; bring the "
            "queries of your own code to four dimensions; or load a model of transformers with "
            "attn_implementation='sdpa'."
        )
    if "lse" in names and rowwise_of(normalizer):
        raise InputError(
            f"{kind}: a penalty on lse (ZLoss) has a meaning under softmax only, and this attention "
            f"was given {type(normalizer).__name__}. Leave the module out with sites=."
        )
    return replace(call, options=replace(call.options, normalizer=normalizer))


def _by_our_kernel(made: ModelCall, call: AttentionCall, names: tuple[str, ...]) -> tuple[Any, AttentionStats | None]:
    """What the model's own code gets, and the statistics, from one pass of our kernel; observers receive the call."""
    given = (made.module, call, made.value, names, made.dropout)
    if torch.compiler.is_compiling():
        output, stats = output_and_statistics(*given)
    else:
        output, stats = beside(output_and_statistics, given, {}, lambda _: report(lambda *_: call, (), {}, made.module))
    return made.result_of(output), stats


def output_and_statistics(
    module: nn.Module, call: AttentionCall, value: Tensor | None, names: tuple[str, ...], dropout: float = 0.0
) -> tuple[Tensor, AttentionStats | None]:
    """Output and statistics of a call by our kernel; without values the statistics alone."""
    options = replace(call.options, stats=names, dropout_p=dropout)
    value = None if value is None else value.to(call.query.dtype)
    return run(request_of(type(module).__name__, call.query, call.key, value, call.mask, options, call.packing))


def key_counts(call: AttentionCall) -> Tensor:
    """How many keys each query of a call sees, [B or 1, H or 1, Q]."""
    options, keys = call.options, call.key.shape[2]
    if call.packing is not None or options.window_size != (-1, -1):
        raise InputError(
            "a temperature that follows the length cannot count the keys of packed documents or of a window that is "
            "not in the mask: load the model with attn_implementation='sdpa'."
        )
    offset = keys - call.query.shape[2] if options.causal_alignment == "bottom-right" else 0
    return visible_keys(call.query, keys, call.mask, options.is_causal, offset)


@contextmanager
def without_listeners(model: nn.Module) -> Iterator[None]:
    """A block in which penalties and thermostats of ``model`` receive nothing: it runs beside its training."""
    with ExitStack() as stack:
        for actions in (vars(module).get(ACTIONS) for module in model.modules()):
            if actions is not None:
                stack.callback(setattr, actions, "listeners", actions.listeners)
                actions.listeners = []
        yield


def actions_of(site: Site) -> Actions:
    """The actions of a site, made if it has none. Call ``release`` when they may have no effect any more."""
    module = site.module
    actions: Actions | None = getattr(module, ACTIONS, None)
    if actions is None:
        assert site.entry.actions is not None
        actions = site.entry.actions()
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
