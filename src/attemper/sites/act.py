"""What is done to one attention call of a chosen module: its query is tempered, and who acts on it takes part."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from attemper.call.normalizer import rowwise_of
from attemper.call.options import Options, planned
from attemper.call.result import AttentionStats
from attemper.call.visible import visible_keys
from attemper.errors import InputError
from attemper.functional.attention import attention, executed
from attemper.nn.normalizers import Normalizer
from attemper.nn.temperature import ACTIONS, Temperature, times
from attemper.sites.names import named
from attemper.sites.observation import AttentionCall, check_mask, tell
from attemper.statistics import rowwise_names


class Listener(Protocol):
    """Who acts on the output of attention calls, or measures them."""

    stats: tuple[str, ...]
    """Statistics that it needs, with their gradients; none for who reads queries and keys itself."""
    replaces: bool
    """Whether our kernel may compute output and statistics at once, in place of the model's own."""

    def wants(self, module: nn.Module) -> bool:
        """Whether this call of ``module`` concerns it."""
        ...

    def take(self, module: nn.Module, call: AttentionCall, stats: AttentionStats | None, output: Tensor) -> Tensor:
        """Takes a call; gives the output on, which it may tie something to."""
        ...


@dataclass
class Frame:
    """One forward pass of a module."""

    hidden: Tensor | None = None
    """The layer's input, where a temperature is conditional on it."""
    met: bool = False
    """Whether an attention call was met."""


class Actions:
    """What is done to the attention of one module: names of its temperatures, and who listens.

    A copy or a pickle of the module keeps the temperatures, which are its children, and leaves listeners behind.
    """

    def __init__(self, way: str) -> None:
        self.way = way
        self.temperatures: list[str] = []
        self.normalizers: list[str] = []
        """Names of maps that replace softmax; the last is the one."""
        self.listeners: list[Listener] = []
        self.original: Any = None
        """A forward that the module had of its own, not its class's."""
        self.forward: Any = None
        """Ours, that stands in its place."""
        self._traced = Frame()
        self._frames = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: list(getattr(self, name)) for name in ("temperatures", "normalizers")}
        return {"way": self.way, "original": self.original, **kept}

    def normalizer(self, module: nn.Module) -> Normalizer | None:
        """The map that the module was given in place of softmax; the last one counts."""
        return getattr(module, self.normalizers[-1]) if self.normalizers else None

    @property
    def idle(self) -> bool:
        """Whether nothing is done."""
        return not self.temperatures and not self.normalizers and not self.listeners

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(
            {"normalizers": []} | state, listeners=[], forward=None, _traced=Frame(), _frames=threading.local()
        )

    def enter(self, hidden: Tensor | None) -> Frame:
        """Begins a forward pass of the module, in this thread."""
        if torch.compiler.is_compiling():
            self._traced.hidden, self._traced.met = hidden, False
            return self._traced
        frame = Frame(hidden)
        self._stack().append(frame)
        return frame

    def leave_frame(self) -> None:
        """Ends it."""
        if torch.compiler.is_compiling():
            self._traced.hidden = None
        else:
            self._stack().pop()

    def frame(self) -> Frame:
        """The forward pass that runs; a stand-in where the attention runs outside of one."""
        if torch.compiler.is_compiling():
            return self._traced
        stack = self._stack()
        return stack[-1] if stack else Frame()

    def _stack(self) -> list[Frame]:
        if not hasattr(self._frames, "stack"):
            self._frames.stack = []
        return self._frames.stack

    def attended(
        self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, dropout: float, given: dict[str, Any]
    ) -> tuple[Tensor, AttentionStats | None]:
        """The attention of a layer of ``attemper.nn``, which has its temperatures in ``given`` already."""
        self.frame().met = True
        listeners = [listener for listener in self.listeners if listener.wants(layer)]
        own: Any = layer.stats
        kept = rowwise_names(own) if rowwise_of(given["normalizer"]) else own
        names = tuple(dict.fromkeys([*kept, *_names(listeners)]))
        output, stats = attention(query, key, value, dropout_p=dropout, stats=names, **given)
        if listeners:
            options = Options(
                temperature=given["temperature"], normalizer=given["normalizer"],
                is_causal=given.get("is_causal", False),
            )  # fmt: skip
            call = AttentionCall(query, key, given["attn_mask"], options)
            for listener in listeners:
                output = listener.take(layer, call, stats, output)
        return output, stats if layer.stats else None


def actions_on(module: nn.Module) -> Actions:
    """The actions of a module that has some."""
    return getattr(module, ACTIONS)


def _names(listeners: list[Listener]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for listener in listeners for name in listener.stats))


def temperatures(module: nn.Module) -> list[Temperature]:
    """The temperatures that this module's attention was given."""
    actions: Actions | None = getattr(module, ACTIONS, None)
    return [] if actions is None else [getattr(module, name) for name in actions.temperatures]


def normalizer_of(module: nn.Module) -> Normalizer | None:
    """The map that this module's attention was given in place of softmax."""
    actions: Actions | None = getattr(module, ACTIONS, None)
    return None if actions is None else actions.normalizer(module)


def other_maps(model: nn.Module) -> list[str]:
    """Names of the modules of ``model`` whose attention was given another map than the model's own softmax."""
    return [name for module, name in named(model).items() if normalizer_of(module) is not None]


def temperature_of(
    module: nn.Module, query: Tensor, counts: Callable[[], Tensor], hidden: Tensor | None
) -> Tensor | None:
    """The product of a module's temperatures, broadcastable to [B, H, Q]; None where it has none."""
    product: Tensor | None = None
    for given in temperatures(module):
        visible = counts() if given.follows("follows_length") else None
        part = given(query, hidden=hidden, visible_keys=visible)
        product = part if product is None else times(product, part)
    return product


def tempered(query: Tensor, temperature: Tensor) -> Tensor:
    """``query`` [B, H, Q, D] divided by ``temperature``, in float32 at least and rounded to the query's type.

    The bits stay where the temperature is 1.
    """
    wide = query if query.dtype in (torch.float32, torch.float64) else query.float()
    divided = wide * temperature.to(wide.dtype).reciprocal()[..., None]
    if query.dtype == torch.float16:
        # The largest number there is stands for what would be infinite there, and NaN once it met a key.
        largest = torch.finfo(query.dtype).max
        divided = divided.clamp(-largest, largest)
    return divided.to(query.dtype)


def acted(
    module: nn.Module, query: Tensor, value: Tensor | None, dropout: float,
    read: Callable[[Tensor], AttentionCall], run: Callable[[Tensor], Any],
    whole: Callable[[Tensor], Any] | None, first: Callable[[Any, Callable[[Tensor], Tensor]], Any],
) -> Any:  # fmt: skip
    """One attention call of a module, with what is done to it.

    Args:
        query: [B, H, Q, D].
        read: from a query to the whole call.
        run: the model's own attention of a query.
        whole: from our output [B, H, Q, E] to what ``run`` returns; None where ours cannot take its place.
        first: applies a function to the output within what ``run`` returns.
    """
    read = partial(_known, module, read)
    actions = actions_on(module)
    frame = actions.frame()
    frame.met = True
    if actions.temperatures:
        temperature = temperature_of(module, query, partial(_counts, read, query), frame.hidden)
        assert temperature is not None
        query = tempered(query, temperature)
    listeners = [listener for listener in actions.listeners if listener.wants(module)]
    normalizer = normalizer_of(module)
    if not listeners and normalizer is None:
        return run(query)
    call = read(query)
    names = _names(listeners)
    if normalizer is not None:
        call, result, stats = _normalized(module, call, value, dropout, normalizer, names, whole)
        for listener in listeners:
            result = first(result, partial(listener.take, module, call, stats))
        return result
    ours = whole is not None and value is not None and dropout == 0 and call.packing is None
    if names and ours and all(listener.replaces for listener in listeners):
        output, stats = computed(module, call, value, names)
        if not torch.compiler.is_compiling():
            tell(lambda *_: call, (), {}, module)
        assert whole is not None
        result = whole(output)
    else:
        result = run(query)
        stats = computed(module, call, None, names)[1] if names else None
    for listener in listeners:
        result = first(result, partial(listener.take, module, call, stats))
    return result


def _known(module: nn.Module, read: Callable[[Tensor], AttentionCall], query: Tensor) -> AttentionCall:
    """A call whose mask means what it holds."""
    call = read(query)
    check_mask(module, call)
    return call


def _normalized(
    module: nn.Module, call: AttentionCall, value: Tensor | None, dropout: float, normalizer: Normalizer,
    names: tuple[str, ...], whole: Callable[[Tensor], Any] | None,
) -> tuple[AttentionCall, Any, AttentionStats | None]:  # fmt: skip
    """A call by our kernel with another map than softmax: the call, its result and its statistics."""
    if whole is None or value is None or call.packing is not None:
        raise InputError(
            f"{type(module).__name__}: temper(normalizer=...) takes the place of attention over four dimensions, "
            "[batch, heads, tokens, size], without packed documents. Leave this module out with sites=; bring the "
            "queries of your own code to four dimensions; or load a model of transformers with "
            "attn_implementation='sdpa'."
        )
    if "lse" in names and rowwise_of(normalizer):
        raise InputError(
            f"{type(module).__name__}: a penalty on lse (ZLoss) has a meaning under softmax only, and this attention "
            f"was given {type(normalizer).__name__}. Leave the module out with sites=."
        )
    call = replace(call, options=replace(call.options, normalizer=normalizer))
    output, stats = computed(module, call, value, names, dropout)
    if not torch.compiler.is_compiling():
        tell(lambda *_: call, (), {}, module)
    return call, whole(output), stats


def computed(
    module: nn.Module, call: AttentionCall, value: Tensor | None, names: tuple[str, ...], dropout: float = 0.0
) -> tuple[Tensor, AttentionStats | None]:
    """Output and statistics of a call by our kernel; without values the statistics alone."""
    options = replace(call.options, stats=names, dropout_p=dropout)
    value = None if value is None else value.to(call.query.dtype)
    return executed(planned(type(module).__name__, call.query, call.key, value, call.mask, options, call.packing))


def _counts(read: Callable[[Tensor], AttentionCall], query: Tensor) -> Tensor:
    """How many keys each query of a call sees."""
    call = read(query)
    if call.packing is not None or call.options.window_size != (-1, -1):
        raise InputError(
            "a temperature that follows the length cannot count the keys of packed documents or of a window that is "
            "not in the mask: load the model with attn_implementation='sdpa'."
        )
    keys = call.key.shape[2]
    offset = keys - query.shape[2] if call.options.causal_alignment == "bottom-right" else 0
    return visible_keys(query, keys, call.mask, call.options.is_causal, offset)
