"""Sums that taps fill on the device: for CUDA graphs, which replay a tap's kernels and ask nobody.

A tap in code that may be captured launches its kernels always, into a buffer of its site, guarded by one flag per
device. A watch raises the flag for sampled steps and lowers it after them (a fill, no wait), and receives the sums.
Buffers live as long as the process, and none is made while a graph is captured: its memory would be the graph's.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn

from attemper.backends.sums import WIDTH, clear
from attemper.call.operator import sampled_positions
from attemper.call.options import request_of
from attemper.call.sums import BACKEND, add
from attemper.errors import BackendError, InputError
from attemper.sites.observation import AttentionCall
from attemper.sites.sharded import first_head


class Receiver(Protocol):
    """A watch whose taps add to buffers."""

    rows: int | None
    """Query rows of each sequence to measure."""

    @property
    def running(self) -> bool:
        """Whether a forward of its model runs now."""
        ...

    def receives(self, buffer: TapBuffer) -> bool | None:
        """Whether this buffer is of a tap in its model."""
        ...

    def runs(self, site: nn.Module) -> nn.Module | None:
        """Its model, if the tap of ``site`` that runs now is in it."""
        ...

    def receive(self, sums: list[tuple[TapBuffer, Tensor]]) -> None:
        """Receives what was added to each of its buffers since the last time; it may be nothing."""
        ...


@dataclass(eq=False)
class TapBuffer:
    """The sums of one site: of a tap's name or module, on one device, with one number of heads."""

    name: str
    module: int
    sums: Tensor
    """[heads, WIDTH] float64."""
    flag: Tensor
    """[1] int32, of the device: whether any watch samples."""
    start: Tensor
    """[1] float64 in [0, 1), of the device: where the rows of a sample start."""
    queries: int = 0
    keys: int = 0
    mode: str = "eval"
    first_head: int = 0
    """The number in the whole model of the first of its heads."""
    measured: set[int | None] = field(default_factory=set)
    """How many rows of each sequence its kernels were launched for (None: all): a CUDA graph keeps that."""
    refused: str | None = None
    """Why it cannot be measured."""
    ran: bool = False
    """Whether Python launched its kernels since its sums were delivered."""
    captured: bool = False
    """Whether a graph holds its kernels: then they may run without Python."""
    models: WeakSet[nn.Module] = field(default_factory=WeakSet)
    """The watched models in which its tap was seen to run."""
    warmed: set[object] = field(default_factory=set)
    """Kinds of calls whose kernels are loaded: a graph that is captured must not load any."""

    @property
    def may_have_run(self) -> bool:
        """Whether rows may have been added since its sums were delivered; only the device knows."""
        return self.ran or self.captured


Watching = TypeVar("Watching")
_buffers: dict[tuple[str, int, torch.device, int], TapBuffer] = {}
_switches: dict[torch.device, tuple[Tensor, Tensor]] = {}
# Both are weak: a watch that is garbage-collected without ``close()`` receives nothing more.
_receivers: WeakValueDictionary[int, Receiver] = WeakValueDictionary()
_up: WeakValueDictionary[int, Receiver] = WeakValueDictionary()
_lock = threading.RLock()


def has_graphs(device: torch.device) -> bool:
    """Whether compiled code on this device may be captured into graphs that replay without Python."""
    return device.type == "cuda"


def is_capturing(device: torch.device | None = None) -> bool:
    """Whether what is launched on this device now, or on any, is captured into a CUDA graph."""
    on_cuda = torch.cuda.is_initialized() if device is None else device.type == "cuda"
    return on_cuda and torch.cuda.is_current_stream_capturing()


def buffer_of(name: str, module: int, device: str, heads: int) -> TapBuffer:
    """The buffer of a site, made when it is first asked for. Nothing is launched unless a watch samples."""
    place = torch.device(device)
    key = (name, module, place, heads)
    # What a model makes in inference mode could not be written to outside of it.
    with _lock, torch.inference_mode(False):
        if place not in _switches:
            _switches[place] = _switch(place)
        if key not in _buffers:
            sums = torch.empty((heads, WIDTH), dtype=torch.float64, device=place)
            _buffers[key] = TapBuffer(name, module, clear(sums) if _up else sums, *_switches[place])
        return _buffers[key]


def existing_buffer(name: str, module: int, device: torch.device, heads: int) -> TapBuffer | None:
    """The buffer of a site if it has been made."""
    return _buffers.get((name, module, device, heads))


def _switch(device: torch.device) -> tuple[Tensor, Tensor]:
    flag = torch.full((1,), int(bool(_up)), dtype=torch.int32, device=device)
    return flag, torch.full((1,), 0.5, dtype=torch.float64, device=device)


def living(watches: WeakValueDictionary[int, Watching]) -> list[Watching]:
    """The watches that exist now. Other threads may change the dictionary meanwhile, so ``values()`` is no way."""
    return [watch for reference in watches.valuerefs() if (watch := reference()) is not None]


def subscribe(receiver: Receiver) -> None:
    """Delivers the sums of its taps to ``receiver``, until ``unsubscribe`` or until it is garbage-collected."""
    _receivers[id(receiver)] = receiver


def unsubscribe(receiver: Receiver) -> None:
    """Ends ``subscribe``; the flag is down afterwards."""
    lower_flag(receiver)
    _receivers.pop(id(receiver), None)


def has_receivers() -> bool:
    """Whether any watch exists: without one, taps outside of compiled code prepare nothing."""
    return bool(_receivers)


def raise_flag(receiver: Receiver, start: float) -> None:
    """Raises the flag of every device for ``receiver``; sampled rows start at ``start`` in [0, 1)."""
    with _lock:
        if _up:
            deliver()
        else:
            for buffer in _buffers.values():
                clear(buffer.sums)
                buffer.ran = False
        _up[id(receiver)] = receiver
        for flag, place in _switches.values():
            flag.fill_(1)
            place.fill_(start)


def is_raised(receiver: Receiver) -> bool:
    """Whether the flag is up for ``receiver``."""
    return id(receiver) in _up


def lower_flag(receiver: Receiver) -> None:
    """Lowers the flag, unless another watch samples, after the receiver's sums are delivered."""
    with _lock:
        if is_raised(receiver):
            deliver()
            _up.pop(id(receiver), None)
        # The flag of a watch that was garbage-collected without ``close()`` is still up.
        if not _up:
            for flag, _ in _switches.values():
                flag.fill_(0)


def deliver() -> None:
    """Gives each sampling watch what its taps have added since the last time, and empties the buffers."""
    with _lock:
        if not _up:
            return
        used = [buffer for buffer in _buffers.values() if buffer.measured or buffer.refused]
        sums = [(buffer, buffer.sums.clone()) for buffer in used]
        for buffer in used:
            clear(buffer.sums)
        for receiver in living(_up):
            own = [pair for pair in sums if receiver.receives(pair[0])]
            if own:
                receiver.receive(own)
        for buffer in used:
            buffer.ran = False


def fill(buffer: TapBuffer, call: AttentionCall, site: nn.Module) -> None:
    """Launches the kernels of a tap; outside of a capture only if a watch samples, or to load them once."""
    if not _up and not is_capturing(call.query.device):
        warm(buffer, call, site)
    elif _launch(buffer, buffer.sums, call, site):
        buffer.captured = buffer.captured or is_capturing(call.query.device)
        buffer.ran = True
        buffer.warmed.add(_kind(call))
        if not buffer.measured:
            holder = next(iter(_owners(site).values()), site) if hasattr(site, "tap_name") else site
            buffer.first_head = first_head(holder, call)
        buffer.measured.add(_wanted_rows(site))
        buffer.mode = "train" if _trains(site) else "eval"
        buffer.queries, buffer.keys = max(buffer.queries, call.query.shape[2]), max(buffer.keys, call.key.shape[2])


def warm(buffer: TapBuffer, call: AttentionCall, site: nn.Module) -> None:
    """Loads the kernels of a tap that may be captured later, once for each kind of call; it measures nothing."""
    kind = _kind(call)
    if kind not in buffer.warmed:
        buffer.warmed.add(kind)
        _launch(buffer, torch.empty_like(buffer.sums), call, site)


def _launch(buffer: TapBuffer, sums: Tensor, call: AttentionCall, site: nn.Module) -> bool:
    """Whether the kernels of this call were launched, guarded by the flag; if not, ``buffer.refused`` tells why."""
    buffer.models.update(_owners(site).values())
    try:
        options = replace(call.options, stats="all", backend=BACKEND)
        request = request_of("tap", call.query.detach(), call.key.detach(), None, call.mask, options)
    except (InputError, BackendError) as error:
        buffer.refused = str(error)
        return False
    queries, rows, chosen = call.query.shape[2], _wanted_rows(site), None
    if rows is not None and rows < queries:
        chosen = sampled_positions(buffer.start, rows, queries, buffer.flag)
    add(replace(request.problem, rows=chosen), sums, buffer.flag)
    return True


def _trains(site: nn.Module) -> bool:
    """Whether a tap runs in training mode: a tap of a name, which is no module, has the mode of its watched model."""
    models = _owners(site).values() if hasattr(site, "tap_name") else ()
    return any(model.training for model in models) if models else site.training


def _owners(site: nn.Module) -> dict[Receiver, nn.Module]:
    """The watches to which a tap that runs now belongs, and their models; those whose model is seen to run, if any."""
    owners = {receiver: model for receiver in living(_receivers) if (model := receiver.runs(site)) is not None}
    return {receiver: model for receiver, model in owners.items() if receiver.running} or owners


def _wanted_rows(site: nn.Module) -> int | None:
    wanted = [receiver.rows for receiver in _owners(site)]
    counts = [rows for rows in wanted if rows is not None]
    return max(counts) if counts and len(counts) == len(wanted) else None


def _kind(call: AttentionCall) -> object:
    """What the kernels of a call are compiled for, and more."""
    tensors = (call.query, call.key, call.mask)
    options = call.options
    return tuple((t.shape, t.stride(), t.dtype) if isinstance(t, Tensor) else None for t in tensors), (
        options.softcap is None,
        options.sink_logits is None,
        isinstance(options.temperature, Tensor),
        options.is_causal,
        options.window_size,
        options.causal_alignment,
    )
