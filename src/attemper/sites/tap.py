"""``attemper.tap``: statistics from inside a model's own code, as an operator that stays in a compiled graph.

The operators have no result. ``attemper::tap`` looks for observers when it runs, so that sampling a step recompiles
nothing. It does nothing inside a backward pass, where activation checkpointing calls it a second time. A CUDA graph
replays kernels without running Python, so the operator carries the tag ``cudagraph_unsafe``: a compiler leaves it out
of graphs (it cuts the graph in two there, or makes none). In compiled code on CUDA ``attemper::tap_into`` takes its
place: its kernels read a flag on the device and add to a buffer of the site (``tap_buffers``). It needs no such tag,
and the graph stays whole. A graph that is captured by hand gets the same kernels.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Unpack
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from attemper.call import transforms
from attemper.call.attn_mask import ADVICE, is_plain, without_causal_bias
from attemper.call.call_sums import fits
from attemper.call.operator import operator
from attemper.call.request import ScoreKeywords, autocast_together, check_window, options_of, shows_keywords
from attemper.call.temperature import TEMPERATURE_ADVICE
from attemper.call.transforms import constant_in_graphs, is_mapped
from attemper.checks import one_of, positive_number, refuse_nested
from attemper.errors import InputError
from attemper.sites import tap_buffers
from attemper.sites.names import writable
from attemper.sites.observation import (
    OPERANDS,
    AttentionCall,
    Observer,
    UnsupportedCallError,
    call_of,
    current,
    guard,
    in_shadow,
    operands_of,
    present,
    tell,
)
from attemper.sites.sharded import first_head, is_dtensor, local, numbered_from

_ARGUMENTS = f"Tensor(a!) token, str name, int module, {OPERANDS}"
_TOKENS: dict[torch.device, Tensor] = {torch.device("cpu"): torch.zeros(1)}
"""Never written to. An operator that claims to write is not dropped from a graph for having no result."""


class NamedSite(nn.Module):
    """Stands for the module of a tap that only has a name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.tap_name = name


_named: dict[str, NamedSite] = {}
_modules: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
_lock = threading.Lock()


@shows_keywords(ScoreKeywords)
def tap(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    name: str,
    **options: Unpack[ScoreKeywords],
) -> None:
    """Measures one attention call from inside your model when a watch samples.

    Put it beside any attention call, with the queries and keys that it gets. It returns nothing, changes nothing,
    holds no graph, and costs a call when no watch is sampling. It stays in a graph of
    ``torch.compile(fullgraph=True)``: one graph, no break, no recompilation between sampled and other steps; under
    activation checkpointing rows count once.

    Args:
        query: [B, H, Q, D].
        key: [B, G, K, D].
        name: of the site in tables; give each layer its own, and each of several models that are watched at once.

    The other arguments are those of :func:`attemper.attention_statistics`. Mind ``is_causal`` and ``attn_mask``: a tap
    knows only what it is given. In eager code a watch may see the attention anyway: it is one site all the same, with
    the tap's name and the attention's own numbers, with a warning if the tap was given another scale or flag.

    Raises:
        InputError: the name is empty, an option has no meaning, or queries and keys are DTensors that are split along
            anything but heads.
    """
    try:
        flags = {"scale": scale, "is_causal": is_causal, "enable_gqa": enable_gqa}
        _run_operator(_call_of_tap(query, key, attn_mask, name, options, **flags), name, 0)
    except Exception as error:
        if isinstance(error, InputError) or not options.keys() <= ScoreKeywords.__annotations__.keys():
            raise  # what has no meaning is told where it stands; what else fails must not end a training step
        tell(error, _everyone())


def _call_of_tap(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, name: str, options: ScoreKeywords, **flags: Any
) -> AttentionCall:
    """The attention that a tap of a model's own code is given."""
    if not name:
        raise InputError("tap(name=...) must name the site, for example 'blocks.3.attention'.")
    given = options_of("tap", options, kind=ScoreKeywords, **flags)
    one_of("tap(causal_alignment=...)", given.causal_alignment, ("top-left", "bottom-right"))
    check_window("tap", given.window_size)
    if not isinstance(given.temperature, Tensor) and given.temperature != 1.0:
        positive_number("tap(temperature=...)", given.temperature, TEMPERATURE_ADVICE, infinite=True)
    refuse_nested("tap", {"query": query, "key": key, "attn_mask": attn_mask})
    query, key, _ = autocast_together(query, key)
    attn_mask, given = without_causal_bias("tap", attn_mask, given, query, key.shape[2])
    if attn_mask is not None and not is_plain(attn_mask):
        raise InputError(f"tap(attn_mask=...) is a {type(attn_mask).__name__}, a subclass of Tensor. {ADVICE}")
    return AttentionCall(query, key, attn_mask, given)


def tap_call(call: AttentionCall, module: nn.Module) -> None:
    """The tap of a module that attends through a model's own registry."""
    try:
        if not torch.compiler.is_compiling():
            _modules[id(module)] = module
        _run_operator(call, "", id(module))
    except InputError:
        raise
    except Exception as error:  # whatever it is, it must not end a training run
        tell(error, _everyone())


def remember(model: nn.Module) -> None:
    """Keeps weak references to the modules of a model, by which taps in its compiled code find them."""
    for module in model.modules():
        _modules[id(module)] = module


def _run_operator(call: AttentionCall, name: str, module: int) -> None:
    """Runs the operator of a tap: of a site's name, or of the module with this ``id``."""
    options, first = call.options, None
    # Its observers get the part that is here, which no longer says which heads these are.
    if is_dtensor(call.query) and not torch.compiler.is_compiling():
        first = first_head(_site(name, module), call)
    if any(map(is_dtensor, (call.query, call.key, call.mask, options.temperature, options.sink_logits))):
        call = _on_this_process(call, name, module)
    query, device = call.query, str(call.query.device)
    operator: Callable[..., None] = torch.ops.attemper.tap
    if transforms.active() and any(map(is_mapped, (query, call.key))):
        operator = _tap  # no rule for torch.vmap: observers note that they see nothing here
    # Where an export will run is not known.
    if torch.compiler.is_dynamo_compiling() and not _exports() and tap_buffers.has_graphs(query.device):
        ready = _has_buffer(name, module, device, str(query.dtype), int(query.shape[3]), int(query.shape[1]))
        operator = torch.ops.attemper.tap_into if ready else operator
    if first is None:
        operator(token(device), name, module, *operands_of(call))
        return
    with numbered_from(first):
        operator(token(device), name, module, *operands_of(call))


# These run while a graph is traced: what they make is not in the graph's memory.


@constant_in_graphs
def _exports() -> bool:
    """Asked outside of the graph: inside of one, torch 2.11 takes every compilation for an export."""
    return torch.compiler.is_exporting()


@constant_in_graphs
def _has_buffer(name: str, module: int, device: str, dtype: str, size: int, heads: int) -> bool:
    """Whether a site has a buffer, which is made here; Triton cannot fill one for every type and size."""
    return fits(dtype, size) and tap_buffers.buffer_of(name, module, device, heads) is not None


@constant_in_graphs
def token(device: str) -> Tensor:
    """The tensor of a device that operators without a result claim to write."""
    place = torch.device(device)
    if place not in _TOKENS:
        _TOKENS[place] = torch.zeros(1, device=place)
    return _TOKENS[place]


def _on_this_process(call: AttentionCall, name: str, module: int) -> AttentionCall:
    """The parts of DTensors that are here: the operator has no rule for any other kind of tensor."""
    try:
        return local(_site(name, module), call)
    except UnsupportedCallError as error:
        if not name:
            raise
        raise InputError(f"tap(name={name!r}): {error.reason}.") from error


class _TapArguments:
    """What the operators are called with, after the token."""

    def __init__(self, name: str, module: int, *operands: Any) -> None:
        self.name, self.module, self._operands = name, module, operands
        self.query: Tensor = operands[0]

    def call(self) -> AttentionCall:
        return call_of(self._operands)

    def site(self) -> nn.Module:
        """The module that attends, or one that stands for the tap's name."""
        return _site(self.name, self.module)


@operator(f"tap({_ARGUMENTS}) -> ()", tags=(torch.Tag.cudagraph_unsafe,))
def _tap(_token: Tensor, *given: Any) -> None:
    try:
        if not in_backward():
            _run(_TapArguments(*given))
    except Exception as error:
        tell(error, _everyone())


def _everyone() -> Iterator[Observer]:
    """All observers that a tap may have: looked for only when something went wrong."""
    yield from present()
    yield from (receiver.observer for receiver in tap_buffers.receivers())


def _run(tapped: _TapArguments) -> None:
    """Reports a tap to all who sample it, or launches its kernels."""
    if (met := in_shadow.get()) is not None:
        met.append(tapped.site())
        for observer in present() if tapped.name else ():  # which finds the attention beside it
            guard([observer], observer.see, met[-1], tapped.call())
        return
    device = tapped.query.device
    if tap_buffers.has_graphs(device) and (tap_buffers.has_receivers() or tap_buffers.is_capturing(device)):
        if tap_buffers.is_capturing(device):
            _fill(tapped)
            return
        query = tapped.query
        if fits(str(query.dtype), query.shape[3]):
            buffer = tap_buffers.buffer_of(tapped.name, tapped.module, str(query.device), query.shape[1])
            tap_buffers.warm(buffer, tapped.call(), tapped.site())
    # A tap names the call inside which it stands, though that call is reported already.
    here = present() if tapped.name else current()
    if not tap_buffers.has_receivers() and not here:
        return
    site = tapped.site()
    observers = (*here, *(receiver.observer for receiver in tap_buffers.receivers() if receiver.samples(site)))
    if not observers:
        return
    call = tapped.call()
    for observer in observers:
        guard([observer], observer.see, site, call)


def _fill(tapped: _TapArguments) -> None:
    """Launches the kernels of a tap into its site's buffer."""
    query, site = tapped.query, tapped.site()
    buffer = tap_buffers.existing_buffer(tapped.name, tapped.module, query.device, query.shape[1])
    if buffer is None and not tap_buffers.is_capturing(query.device):
        buffer = tap_buffers.buffer_of(tapped.name, tapped.module, str(query.device), query.shape[1])
    if buffer is not None:
        tap_buffers.fill(buffer, tapped.call(), site)
        return
    warnings.warn(
        f"attemper: tap {tapped.name or type(site).__name__!r} is not in the CUDA graph that is being captured: open "
        "the watch and run the model once before the capture.",
        stacklevel=2,
    )


@operator(f"tap_into({_ARGUMENTS}) -> ()")
def _tap_into(_token: Tensor, *given: Any) -> None:
    try:
        if not in_backward():
            _fill(_TapArguments(*given))
    except Exception as error:
        tell(error, _everyone())


def site_of(buffer: tap_buffers.TapBuffer) -> nn.Module | None:
    """The module that a buffer's tap stands for; None once it is gone."""
    return _named.get(buffer.name) if buffer.name else _modules.get(buffer.module)


def _site(name: str, module: int) -> nn.Module:
    if not name and module in _modules:
        return _modules[module]
    if name not in _named:
        with _lock:
            _named.setdefault(name, NamedSite(writable(name) or "attention"))
    return _named[name]


def in_backward() -> bool:
    """Whether this runs inside a backward pass: activation checkpointing calls the forward a second time there."""
    return torch._C._current_graph_task_id() != -1
