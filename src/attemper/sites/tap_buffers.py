"""Sums that taps fill on the device: for CUDA graphs, which replay a tap's kernels and ask nobody.

A tap in code that may be captured launches its kernels always, into a buffer of its site, guarded by one flag per
device. A watch raises the flag for sampled steps and lowers it after them (a fill, no wait), and receives the sums.
Buffers live as long as the process, and none is made while a graph is captured: its memory would be the graph's.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn

from attemper.backends.sums import empty_sums
from attemper.call.call_sums import BACKEND, add
from attemper.call.known_requests import KnownRequests
from attemper.call.operator import sampled_positions
from attemper.call.request import request_of
from attemper.errors import BackendError, InputError
from attemper.sites.observation import AttentionCall, Observer
from attemper.sites.sharded import first_head


class Receiver(Protocol):
    """A watch that receives taps outside any observed forward pass (those of a compiled model): calls, or sums."""

    rows: int | None
    """Query rows of each sequence to measure."""

    @property
    def observer(self) -> Observer:
        """Receives the calls."""
        ...

    def samples(self, site: nn.Module) -> bool | None:
        """Whether the taps of this site are sampled now."""
        ...

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
    nothing: Tensor
    """The same without rows, to empty them by."""
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


_buffers: dict[tuple[str, int, torch.device, int], TapBuffer] = {}
_switches: dict[torch.device, tuple[Tensor, Tensor]] = {}
_nothing: dict[tuple[torch.device, int], Tensor] = {}
_rows: dict[tuple[torch.device, int, int], Tensor | None] = {}
"""The rows of the sample that is taken, [rows] int32, by their device and how many of how many queries they are. None
until the next sample: they are made between passes, for what a pass makes may lie in the memory of a CUDA graph."""
MOST_ROWS = 64
"""So many kinds have rows of their own. A graph may hold them: they live as long as the process."""
_known = KnownRequests(keeps=False)
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
            nothing = _nothing.setdefault((place, heads), empty_sums(heads, place))
            _buffers[key] = TapBuffer(name, module, nothing.clone(), nothing, *_switches[place])
        return _buffers[key]


def existing_buffer(name: str, module: int, device: torch.device, heads: int) -> TapBuffer | None:
    """The buffer of a site if it has been made."""
    return _buffers.get((name, module, device, heads))


def _switch(device: torch.device) -> tuple[Tensor, Tensor]:
    flag = torch.full((1,), int(bool(_up)), dtype=torch.int32, device=device)
    return flag, torch.full((1,), 0.5, dtype=torch.float64, device=device)


def _living(watches: WeakValueDictionary[int, Receiver]) -> list[Receiver]:
    """The watches that exist now. Other threads may change the dictionary meanwhile, so ``values()`` is no way."""
    return [watch for reference in watches.valuerefs() if (watch := reference()) is not None]


def subscribe(receiver: Receiver) -> None:
    """Gives ``receiver`` its taps, whichever thread or graph runs them, until ``unsubscribe`` or until it is
    garbage-collected: to its observer the calls that it samples, and to itself what is summed in buffers.
    """
    _receivers[id(receiver)] = receiver


def unsubscribe(receiver: Receiver) -> None:
    """Ends ``subscribe``; the flag is down afterwards."""
    _receivers.pop(id(receiver), None)
    lower_flag(receiver)


def receivers() -> list[Receiver]:
    """The watches that exist now and are not closed."""
    return _living(_receivers)


def has_receivers() -> bool:
    """Whether any watch exists: without one, taps outside of compiled code prepare nothing."""
    return bool(_receivers)


def raise_flag(receiver: Receiver, start: float) -> None:
    """Raises the flag of every device for ``receiver``; sampled rows start at ``start`` in [0, 1)."""
    with _lock:
        if _up:
            deliver()
        else:
            _empty(_buffers.values())
            for buffer in _buffers.values():
                buffer.ran = False
        _up[id(receiver)] = receiver
        for flag, place in _switches.values():
            flag.fill_(1)
            place.fill_(start)
        for kind in list(_rows):
            _choose(*kind)


def _choose(device: torch.device, count: int, queries: int) -> None:
    """Chooses the rows of the sample that begins, in the tensor that was made first: a graph may read it."""
    flag, start = _switches[device]
    with torch.inference_mode(False):
        chosen, before = sampled_positions(start, count, queries, flag), _rows[device, count, queries]
        _rows[device, count, queries] = chosen if before is None else before.copy_(chosen)


def is_raised(receiver: Receiver) -> bool:
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
        if not any(buffer.may_have_run or buffer.refused for buffer in used):
            return
        sums = _copies(used)
        _empty(used)
        for receiver in _living(_up):
            own = [pair for pair in sums if receiver.receives(pair[0])]
            if own:
                receiver.receive(own)
        for buffer in used:
            buffer.ran = False


def _by_device(buffers: Iterable[TapBuffer]) -> Iterable[list[TapBuffer]]:
    found: dict[torch.device, list[TapBuffer]] = {}
    for buffer in buffers:
        found.setdefault(buffer.sums.device, []).append(buffer)
    return found.values()


def _copies(buffers: list[TapBuffer]) -> list[tuple[TapBuffer, Tensor]]:
    """The sums of each, copied by one operator a device."""
    copies = []
    for own in _by_device(buffers):
        parts = torch.cat([buffer.sums for buffer in own]).split([len(buffer.sums) for buffer in own])
        copies += zip(own, parts, strict=True)
    return copies


def _empty(buffers: Iterable[TapBuffer]) -> None:
    """Leaves no rows in the sums of each, by one operator a device."""
    for own in _by_device(buffers):
        sums, nothing = [buffer.sums for buffer in own], [buffer.nothing for buffer in own]
        torch._foreach_copy_(sums, nothing)  # pyright: ignore[reportPrivateImportUsage]


def fill(buffer: TapBuffer, call: AttentionCall, site: nn.Module) -> None:
    """Launches the kernels of a tap; outside of a capture only if a watch samples, or to load them once."""
    capturing = is_capturing(call.query.device)
    owners = _owners(site) if capturing or _up else {}
    if not capturing and not any(map(is_raised, owners)):
        warm(buffer, call, site)
    elif _launch(buffer, buffer.sums, call, owners, capturing):
        if not buffer.captured and not buffer.ran:
            buffer.measured.clear()  # by a watch that is closed
        buffer.captured = buffer.captured or capturing
        buffer.ran = True
        buffer.warmed.add(_kind(call))
        if not buffer.measured:
            holder = next(iter(owners.values()), site) if hasattr(site, "tap_name") else site
            buffer.first_head = first_head(holder, call)
        buffer.measured.add(_wanted_rows(owners))
        buffer.mode = "train" if _trains(site, owners) else "eval"
        buffer.queries, buffer.keys = max(buffer.queries, call.query.shape[2]), max(buffer.keys, call.key.shape[2])


def warm(buffer: TapBuffer, call: AttentionCall, site: nn.Module) -> None:
    """Loads the kernels of a tap that may be captured later, once for each kind of call; it measures nothing."""
    kind = _kind(call)
    if kind not in buffer.warmed:
        buffer.warmed.add(kind)
        _launch(buffer, torch.empty_like(buffer.sums), call, _owners(site))


Owners = Mapping[Receiver, nn.Module]
"""The watches to which a tap belongs, and their models."""


def _launch(buffer: TapBuffer, sums: Tensor, call: AttentionCall, owners: Owners, capturing: bool = False) -> bool:
    """Whether the kernels of this call were launched, guarded by the flag; if not, ``buffer.refused`` tells why."""
    conflict = _conflict(buffer, owners)
    buffer.models.update(owners.values())  # all are told
    if conflict is not None:
        if buffer.refused is None:
            warnings.warn(f"attemper: tap {buffer.name!r} is not measured any more: {conflict}.", stacklevel=2)
        buffer.refused = conflict
        return False
    query, key = call.query.detach(), call.key.detach()
    request = request_of if capturing else _known.request
    try:
        problem = request(
            "tap", query, key, None, call.mask, replace(call.options, stats="all", backend=BACKEND)
        ).problem
    except (InputError, BackendError) as error:
        buffer.refused = str(error)
        return False
    queries, rows = query.shape[2], _wanted_rows(owners)
    if rows is not None and rows < queries:
        problem = problem.with_fields(rows=_sample_rows(buffer, rows, queries))
    add(problem, sums, buffer.flag)
    return True


def _conflict(buffer: TapBuffer, owners: Owners) -> str | None:
    """Why a buffer cannot serve the models in which its tap runs now: it is another's."""
    if not owners or not buffer.models.isdisjoint(owners.values()):
        return None
    if buffer.captured or any(receiver.receives(buffer) for receiver in receivers() if buffer.models):
        return "two models have a tap of this name: give each model different tap names"
    buffer.models.clear()
    return None


def _sample_rows(buffer: TapBuffer, rows: int, queries: int) -> Tensor:
    """``rows`` of ``queries`` rows, [rows] int32 on the device: those of the sample, or made for this call alone."""
    kind = buffer.flag.device, rows, queries
    if (chosen := _rows.get(kind)) is not None:
        return chosen
    if len(_rows) < MOST_ROWS:
        _rows[kind] = None
    return sampled_positions(buffer.start, rows, queries, buffer.flag)


def _trains(site: nn.Module, owners: Owners) -> bool:
    """Whether a tap runs in training mode: a tap of a name, which is no module, has the mode of its watched model."""
    models = owners.values() if hasattr(site, "tap_name") else ()
    return any(model.training for model in models) if models else site.training


def _owners(site: nn.Module) -> Owners:
    """The watches to which a tap that runs now belongs, and their models; those whose model is seen to run, if any."""
    owners = {receiver: model for receiver in receivers() if (model := receiver.runs(site)) is not None}
    return {receiver: model for receiver, model in owners.items() if receiver.running} or owners


def _wanted_rows(owners: Owners) -> int | None:
    wanted = [receiver.rows for receiver in owners]
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
