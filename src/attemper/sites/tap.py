"""``attemper.tap``: statistics from inside a model's own code, as an operator that stays in a compiled graph.

The operators have no result. ``attemper::tap`` looks for observers when it runs, so nothing recompiles when a step is
sampled or not; it does nothing inside a backward pass, where activation checkpointing calls it a second time. A CUDA
graph that replayed it would ask nobody, so it carries the tag ``cudagraph_unsafe``: a compiler leaves it out of graphs
(it cuts the graph in two there, or makes none). ``attemper::tap_into`` stands in its place in compiled code on CUDA:
its kernels ask a flag on the device and add to a buffer of the site (``tap_buffers``), so it needs no such tag, and the
graph stays whole. A graph that is captured by hand gets the same kernels.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from attemper.call import transforms
from attemper.call.compiling import constant_in_graphs
from attemper.call.masks import ADVICE, is_plain, without_causal_bias
from attemper.call.options import TEMPERATURE_ADVICE, Options, autocast_together, checked_window
from attemper.call.sums import fits
from attemper.call.transforms import is_mapped
from attemper.checks import one_of, positive_number, refuse_nested
from attemper.errors import InputError
from attemper.sites import tap_buffers
from attemper.sites.observation import AttentionCall, Observer, UnsupportedCallError, current, guarded, present
from attemper.sites.sharded import is_dtensor, local

LIBRARY = torch.library.Library("attemper", "FRAGMENT")
_ARGUMENTS = """Tensor(a!) token, Tensor query, Tensor key, Tensor? mask, Tensor? temperature, Tensor? sink, str name,
    int module, float? scale, bool is_causal, bool bottom_right, int left, int right, float? softcap, bool gqa"""
LIBRARY.define(f"tap({_ARGUMENTS}) -> ()", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe))
LIBRARY.define(f"tap_into({_ARGUMENTS}) -> ()", tags=torch.Tag.pt2_compliant_tag)
_TOKENS: dict[torch.device, Tensor] = {torch.device("cpu"): torch.zeros(1)}
"""Written by no one; an operator that claims to write cannot be dropped from a graph for having no result."""


class Listener(Protocol):
    """A watch, as taps outside any observed forward pass (those of a compiled model) know it."""

    @property
    def observer(self) -> Observer:
        """Who is told of a tap."""
        ...

    def samples(self, site: nn.Module) -> bool | None:
        """Whether the taps of this site are sampled now."""
        ...


_listeners: WeakValueDictionary[int, Listener] = WeakValueDictionary()
"""Weak: a watch that is dropped unclosed goes with its model."""


def join(listener: Listener) -> None:
    """Tells ``listener`` of every tap that it samples, whichever thread or compiled graph calls it, until it leaves or
    is garbage.
    """
    _listeners[id(listener)] = listener


def leave(listener: Listener) -> None:
    """Ends ``join``."""
    _listeners.pop(id(listener), None)


class NamedSite(nn.Module):
    """Stands for the module of a tap that only has a name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.tap_name = name


_named: dict[str, NamedSite] = {}
_modules: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
_lock = threading.Lock()


def tap(
    query: Tensor, key: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, *, name: str, temperature: float | Tensor = 1.0, causal_alignment: str = "top-left",
    window_size: tuple[int, int] = (-1, -1), softcap: float | None = None, sink_logits: Tensor | None = None,
) -> None:  # fmt: skip
    """Measures an attention from inside the model that computes it, whenever a watch samples the step.

    Put it beside any attention call, with the queries and keys that it gets. It returns nothing, changes nothing,
    holds no graph, and costs a call when no watch is sampling. It stays in a graph of
    ``torch.compile(fullgraph=True)``: one graph, no break, no recompilation between sampled and other steps; under
    activation checkpointing rows count once.

    Args:
        query: [B, H, Q, D].
        key: [B, G, K, D].
        name: of the site in tables; give each layer its own.

    The other arguments are those of :func:`attemper.attention_statistics`. Mind ``is_causal`` and ``attn_mask``: a tap
    knows only what it is given. In eager code a watch may see the attention anyway: it is one site all the same, with
    the tap's name and the attention's own numbers, and a tap that was given another scale or flag is told by a warning.

    Raises:
        InputError: the name is empty, an option has no meaning, or queries and keys are DTensors that are split along
            anything but heads.
    """
    if not name:
        raise InputError("tap(name=...) must name the site, for example 'blocks.3.attention'.")
    one_of("tap(causal_alignment=...)", causal_alignment, ("top-left", "bottom-right"))
    window_size = checked_window("tap", window_size)
    given = temperature if isinstance(temperature, Tensor) else None
    if not isinstance(temperature, Tensor) and temperature != 1.0:
        positive_number("tap(temperature=...)", temperature, TEMPERATURE_ADVICE, infinite=True)
        scale = (query.shape[-1] ** -0.5 if scale is None else scale) / temperature
    refuse_nested("tap", {"query": query, "key": key, "attn_mask": attn_mask})
    query, key, _ = autocast_together(query, key)
    rule = Options(is_causal=is_causal, causal_alignment=causal_alignment, window_size=window_size)
    attn_mask, rule = without_causal_bias("tap", attn_mask, rule, query, key.shape[2])
    if attn_mask is not None and not is_plain(attn_mask):
        raise InputError(f"tap(attn_mask=...) is a {type(attn_mask).__name__}, a subclass of Tensor. {ADVICE}")
    _call(query, key, attn_mask, given, sink_logits, name, 0, scale, rule.is_causal,
          rule.causal_alignment == "bottom-right", window_size, softcap, enable_gqa)  # fmt: skip


def tap_call(call: AttentionCall, module: nn.Module) -> None:
    """The tap of a module that a model's own registry names."""
    options = call.options
    if not torch.compiler.is_compiling():
        _modules[id(module)] = module
    _call(call.query, call.key, call.mask, None, options.sink_logits, "", id(module), options.scale, options.is_causal,
          options.causal_alignment == "bottom-right", options.window_size, options.softcap,
          options.enable_gqa)  # fmt: skip


def remember(model: nn.Module) -> None:
    """Lets the taps of a compiled model find its modules."""
    for module in model.modules():
        _modules[id(module)] = module


def _call(
    query: Tensor, key: Tensor, mask: Tensor | None, temperature: Tensor | None, sink: Tensor | None, name: str,
    module: int,
    scale: float | None, is_causal: bool, bottom_right: bool, window: tuple[int, int], softcap: float | None, gqa: bool,
) -> None:  # fmt: skip
    if any(map(is_dtensor, (query, key, mask, temperature, sink))):
        query, key, mask, sink = _on_this_process(query, key, mask, temperature, sink, name, module)
    detached = [None if tensor is None else tensor.detach() for tensor in (query, key, mask, temperature, sink)]
    operator: Callable[..., None] = torch.ops.attemper.tap
    place = str(query.device)
    if transforms.active() and any(map(is_mapped, (query, key))):
        operator = _tap  # no rule for torch.vmap: observers are told that they see nothing here
    if _may_be_captured() and tap_buffers.graphed(query.device):
        ready = _prepared(name, module, place, str(query.dtype), int(query.shape[3]), int(query.shape[1]))
        operator = torch.ops.attemper.tap_into if ready else operator
    operator(token(place), *detached, name, module, scale, is_causal, bottom_right, window[0], window[1], softcap, gqa)


def _may_be_captured() -> bool:
    """Whether this is traced by a compiler that may make CUDA graphs of it; an export runs nobody knows where."""
    return torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting()


# Both are asked while a graph is traced: what they make is not of the graph's memory.


@constant_in_graphs
def _prepared(name: str, module: int, device: str, dtype: str, size: int, heads: int) -> bool:
    """Makes the buffer of a site; False where Triton cannot fill one."""
    return fits(dtype, size) and tap_buffers.registered(name, module, device, heads) is not None


@constant_in_graphs
def token(device: str) -> Tensor:
    """What operators without a result claim to write on a device."""
    place = torch.device(device)
    if place not in _TOKENS:
        _TOKENS[place] = torch.zeros(1, device=place)
    return _TOKENS[place]


def _on_this_process(
    query: Tensor, key: Tensor, mask: Tensor | None, temperature: Tensor | None, sink: Tensor | None, name: str,
    module: int,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The parts of DTensors that are here: the operator has no rule for any other kind of tensor."""
    options = Options(temperature=1.0 if temperature is None else temperature, sink_logits=sink)
    try:
        here = local(_site(name, module), AttentionCall(query, key, mask, options))
    except UnsupportedCallError as error:
        if not name:
            raise
        raise InputError(f"tap(name={name!r}): {error.reason}.") from error
    return here.query, here.key, here.mask, here.options.sink_logits


@torch.library.impl(LIBRARY, "tap", "CompositeExplicitAutograd")
def _tap(
    _token: Tensor, query: Tensor, key: Tensor, mask: Tensor | None, temperature: Tensor | None, sink: Tensor | None,
    name: str, module: int, scale: float | None, is_causal: bool, bottom_right: bool, left: int, right: int,
    softcap: float | None, gqa: bool,
) -> None:  # fmt: skip
    if in_backward():
        return
    options = (scale, is_causal, bottom_right, left, right, softcap, gqa)
    guarded(_everyone(), _run, query, key, mask, temperature, sink, name, module, options)


def _everyone() -> Iterator[Observer]:
    """All who may be told of a tap: looked for only when something went wrong."""
    yield from present()
    yield from (listener.observer for listener in tap_buffers.alive(_listeners))


def _run(
    query: Tensor, key: Tensor, mask: Tensor | None, temperature: Tensor | None, sink: Tensor | None, name: str,
    module: int, given: tuple[Any, ...],
) -> None:  # fmt: skip
    """Tells all who sample a tap, or launches its kernels; ``given``: what ``_options`` takes."""
    if tap_buffers.graphed(query.device) and (tap_buffers.watched() or tap_buffers.capturing(query.device)):
        options = _options(temperature, sink, *given)
        if _beside_graphs(AttentionCall(query, key, mask, options), name, module):
            return
    # A tap names the call inside which it stands, though that is told already.
    here = present() if name else current()
    if not _listeners and not here:
        return
    site = _site(name, module)
    observers = (
        *here,
        *(listener.observer for listener in tap_buffers.alive(_listeners) if listener.samples(site)),
    )
    if not observers:
        return
    options = _options(temperature, sink, *given)
    for observer in observers:
        guarded([observer], observer.see, site, AttentionCall(query, key, mask, options))


def _options(
    temperature: Tensor | None, sink: Tensor | None, scale: float | None, is_causal: bool, bottom_right: bool,
    left: int, right: int, softcap: float | None, gqa: bool,
) -> Options:  # fmt: skip
    return Options(
        scale=scale, temperature=1.0 if temperature is None else temperature, is_causal=is_causal,
        causal_alignment="bottom-right" if bottom_right else "top-left", window_size=(left, right), softcap=softcap,
        sink_logits=sink, enable_gqa=gqa,
    )  # fmt: skip


def _beside_graphs(call: AttentionCall, name: str, module: int) -> bool:
    """Gets a site ready for a capture, or, inside of one, launches its kernels: then nobody else is to be told."""
    query, site = call.query, _site(name, module)
    if not tap_buffers.capturing(query.device):
        if fits(str(query.dtype), query.shape[3]):
            tap_buffers.warm(tap_buffers.registered(name, module, str(query.device), query.shape[1]), call, site)
        return False
    _fill(call, name, module, site)
    return True


def _fill_site(call: AttentionCall, name: str, module: int) -> None:
    _fill(call, name, module, _site(name, module))


def _fill(call: AttentionCall, name: str, module: int, site: nn.Module) -> None:
    """Launches the kernels of a tap into its site's buffer."""
    query = call.query
    buffer = tap_buffers.existing(name, module, query.device, query.shape[1])
    if buffer is None and not tap_buffers.capturing(query.device):
        buffer = tap_buffers.registered(name, module, str(query.device), query.shape[1])
    if buffer is not None:
        tap_buffers.fill(buffer, call, site)
        return
    warnings.warn(
        f"attemper: tap {name or type(site).__name__!r} is not in the CUDA graph that is being captured: open the "
        "watch and run the model once before the capture.",
        stacklevel=2,
    )


@torch.library.impl(LIBRARY, "tap_into", "CompositeExplicitAutograd")
def _tap_into(
    _token: Tensor, query: Tensor, key: Tensor, mask: Tensor | None, temperature: Tensor | None, sink: Tensor | None,
    name: str, module: int, scale: float | None, is_causal: bool, bottom_right: bool, left: int, right: int,
    softcap: float | None, gqa: bool,
) -> None:  # fmt: skip
    if in_backward():
        return
    options = _options(temperature, sink, scale, is_causal, bottom_right, left, right, softcap, gqa)
    guarded(_everyone(), _fill_site, AttentionCall(query, key, mask, options), name, module)


@torch.library.register_fake("attemper::tap_into", lib=LIBRARY)
@torch.library.register_fake("attemper::tap", lib=LIBRARY)
def _tap_fake(*_: Any) -> None:
    return None


def site_of(buffer: tap_buffers.TapBuffer) -> nn.Module | None:
    """The module that a buffer's tap stands for; None once it is gone."""
    return _named.get(buffer.name) if buffer.name else _modules.get(buffer.module)


def _site(name: str, module: int) -> nn.Module:
    if not name and module in _modules:
        return _modules[module]
    with _lock:
        return _named.setdefault(name, NamedSite(name or "attention"))


def in_backward() -> bool:
    """Whether this runs inside a backward pass: activation checkpointing calls the forward a second time there."""
    return torch._C._current_graph_task_id() != -1
