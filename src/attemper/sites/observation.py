"""The observers of the current thread's forward pass, and how an attention call is reported to them.

A call is read into an ``AttentionCall``: queries, keys and mask as [B, H, Q, D], [B, G, K, D] and [B, H, Q, K], rounded
as the product that the model computes takes them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from attemper.call.attn_mask import is_plain
from attemper.call.packing import Packing
from attemper.call.request import Options, Request
from attemper.call.result import AttentionStats
from attemper.errors import InputError
from attemper.sites.identity import Places, note_output
from attemper.sites.identity import places as memory_of
from attemper.sites.padding import CallContext

logger = logging.getLogger("attemper")


class UnsupportedCallError(InputError):
    """An attention call that cannot be honoured exactly. Raised before anything is computed."""

    def __init__(self, module: nn.Module, reason: str) -> None:
        super().__init__(
            f"{type(module).__name__}: {reason}. attemper computes an attention exactly or not at all; set another "
            "attention implementation for this model."
        )
        self.module, self.reason = module, reason


@dataclass(frozen=True)
class AttentionCall:
    """One attention call of a model: everything that its statistics follow from."""

    query: Tensor
    """[B, H, Q, D]"""
    key: Tensor
    """[B, G, K, D]"""
    mask: Tensor | None = None
    """Broadcastable to [B, H, Q, K]: bool (True = visible) or added to the scores."""
    options: Options = field(default_factory=Options)
    packing: Packing | None = None
    cross: bool | None = None
    """Whether queries and keys come from different sequences; None where the call does not tell."""
    tokens: Tensor | None = None
    """[B, Q] bool: which queries are real tokens, where the call itself tells."""
    places: Places = frozenset()
    """Memory of the tensors that it was called with. A tap of the same memory is of the same attention."""
    value: Tensor | None = None
    """[B, G, K, E], where its entry point shows it."""
    output: Tensor | None = None
    """[B, H, Q, E]: what the model's own code made of it, where that can be seen."""


OPERANDS = """Tensor query, Tensor key, Tensor? mask, Tensor? temperature, Tensor? sink, float? scale, bool is_causal,
    bool bottom_right, int left, int right, float? softcap, bool gqa"""
"""An attention call in the schema of an operator: what ``operands_of`` gives."""


def operands_of(call: AttentionCall) -> tuple[Any, ...]:
    """A call as an operator takes it, outside the autograd graph. A number as temperature is part of the scale."""
    options, temperature, scale = call.options, call.options.temperature, call.options.scale
    if not isinstance(temperature, Tensor):
        if temperature != 1.0:
            scale = (call.query.shape[-1] ** -0.5 if scale is None else scale) / temperature
        temperature = None
    tensors = (call.query, call.key, call.mask, temperature, options.sink_logits)
    detached = [None if tensor is None else tensor.detach() for tensor in tensors]
    bottom_right, (left, right) = options.causal_alignment == "bottom-right", options.window_size
    return *detached, scale, options.is_causal, bottom_right, left, right, options.softcap, options.enable_gqa


def call_of(operands: Sequence[Any]) -> AttentionCall:
    """The call that an operator was given as ``operands_of``."""
    query, key, mask, temperature, sink, scale, is_causal, bottom_right, left, right, softcap, gqa = operands
    options = Options(
        scale=scale,
        temperature=1.0 if temperature is None else temperature,
        is_causal=is_causal,
        causal_alignment="bottom-right" if bottom_right else "top-left",
        window_size=(left, right),
        softcap=softcap,
        sink_logits=sink,
        enable_gqa=gqa,
    )
    return AttentionCall(query, key, mask, options)


Reader = Callable[..., AttentionCall]
"""From the module that attends and the arguments of an attention function to the call that they mean."""


def check_mask(module: nn.Module, call: AttentionCall) -> None:
    if call.mask is not None and not is_plain(call.mask):
        kind = type(call.mask).__name__
        raise UnsupportedCallError(
            module, f"its mask is a {kind}, a subclass of Tensor that may mean something else than its numbers"
        )


class Observer(Protocol):
    """Receives every attention call of a forward pass."""

    replace: bool
    """Whether our kernel computes output and statistics in one pass, in place of the model's own attention."""
    stats: tuple[str, ...]
    context: CallContext

    def options_of(self, module: nn.Module, call: AttentionCall, stats: tuple[str, ...]) -> Options:
        """The options of a call, with those of ``stats`` that it has, and how they are measured."""
        ...

    def first_keys(self, module: nn.Module, call: AttentionCall) -> Tensor | None:
        """[B, K] bool: the first real token of the keys; None where only the call's own mask says which it is."""
        ...

    def observe(self, module: nn.Module, stats: AttentionStats, call: AttentionCall, request: Request) -> None:
        """Receives the statistics of a call that our kernel computed, for ``request``."""
        ...

    def see(self, module: nn.Module, call: AttentionCall) -> None:
        """Receives a call that the model's own code computes."""
        ...

    def skip(self, module: nn.Module, reason: str, places: Places = frozenset()) -> None:
        """Notes a call that cannot be measured."""
        ...

    def withdraw(self, module: nn.Module, reason: str) -> None:
        """Takes back every call of a module, in this pass and in others: together they are no map for each head."""
        ...

    def fail(self, error: Exception) -> None:
        """Notes an error in attemper itself. A scan raises it; a watch never does, so that training goes on."""
        ...


_current: ContextVar[tuple[Observer, ...]] = ContextVar("attemper_observers", default=())
_reported: ContextVar[bool] = ContextVar("attemper_reported", default=False)
in_shadow: ContextVar[list[nn.Module] | None] = ContextVar("attemper_in_shadow", default=None)
"""The sites of the taps that a model has met while it runs once more beside itself in this thread; None where it does
not. No watch takes that for a pass, and what taps measure they measure in the pass itself.
"""


def current() -> tuple[Observer, ...]:
    """The observers of this thread's forward pass; none inside a call that is reported already."""
    return () if _reported.get() else _current.get()


def present() -> tuple[Observer, ...]:
    """The observers of this thread's forward pass, also inside a call that is reported already."""
    return _current.get()


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Adds ``observer`` to the current observers until the end of the block."""
    _current.set((*_current.get(), observer))
    try:
        yield
    finally:
        # Blocks may end in another order than they began, so each removes its own observer.
        _current.set(tuple(other for other in _current.get() if other is not observer))


@contextmanager
def mark_reported() -> Iterator[None]:
    """Marks the calls made inside as already reported."""
    token = _reported.set(True)
    try:
        yield
    finally:
        _reported.reset(token)


def guard(observers: Iterable[Observer], action: Callable[..., None], *args: Any) -> None:
    """Runs ``action``, which is attemper's own code. An error in it goes to the observers and not into the training
    step; without an observer the log has it.
    """
    try:
        action(*args)
    except Exception as error:  # whatever it is
        tell(error, observers)


def tell(error: Exception, observers: Iterable[Observer] | None = None) -> None:
    """Gives an error of ours to observers, those of this thread by default; without one the log has it."""
    distinct = tuple(dict.fromkeys(_current.get() if observers is None else observers))
    for observer in distinct:
        try:
            observer.fail(error)
        except Exception as raised:
            if raised is error or isinstance(raised, Warning):  # a scan's, or a filter that makes errors of warnings
                raise
            say(raised)
    if not distinct:
        say(error)


_said: set[str] = set()


def say(error: Exception) -> None:
    """Logs, once, what failed where nobody takes note of it: without an observer, or in the report of a failure."""
    text = f"{type(error).__name__}: {error}"
    if text not in _said:
        _said.add(text)
        logger.warning("attemper: not measured: %s. Training goes on.", text)


def beside(
    function: Callable[..., Any],
    args: Any,
    kwargs: dict[str, Any],
    look: Callable[[Any], object],
    *,
    mark: bool = True,
) -> Any:
    """What a function of the model's gives, which is called once, and as if alone: ``look`` receives the result if
    anybody observes. Nothing of ours that fails here gets out, neither before the call nor after it.

    Args:
        mark: what the function calls inside is not reported as well.
    """
    observed, token = False, None
    try:
        observed = bool(current()) and torch._C._current_graph_task_id() == -1  # not where a checkpoint calls it again
        token = _reported.set(True) if observed and mark else None
    except Exception as error:
        tell(error)
    try:
        result = function(*args, **kwargs)
    finally:
        if token is not None:
            _reported.reset(token)
    try:
        if observed:
            look(result)
    except Exception as error:
        tell(error)
    return result


def report(
    reader: Reader,
    args: Any,
    kwargs: dict[str, Any],
    site: nn.Module | None = None,
    places: Places = frozenset(),
    value: Tensor | None = None,
    output: Tensor | None = None,
) -> None:
    """Reads a call that has run and reports it to every observer, or the reason why it cannot be measured.

    Args:
        site: the module that attends, where it is known; else the module that is running.
        places: memory of its queries and keys, where ``args`` and ``kwargs`` do not hold them.
        value, output: as in ``AttentionCall``.
    """
    observers = current()
    if not observers:
        return
    for observer in observers:
        observer.context.reports += 1
    # What attemper computes here is no attention of the model and needs no graph.
    with mark_reported(), torch.no_grad():
        try:
            module = observers[0].context.module() if site is None else site
            note_output(output, module)
            given = (*args[:2], *(kwargs[name] for name in ("query", "key", "q", "k") if name in kwargs))
            places = places | memory_of(given)
            call = reader(module, *args, **kwargs)
            check_mask(module, call)
            places |= memory_of((call.query, call.key))
            call = replace(call, places=places, value=value, output=output)
            for observer in observers:
                observer.context.settle(call.mask)
        except Exception as error:  # whatever it is, it must not end a training run
            known = isinstance(error, UnsupportedCallError)
            reason = error.reason if known else f"its arguments could not be read ({error})"
            for observer in observers:
                guard([observer], _tell_of, observer.skip, observer, site, reason, places)
            return
        for observer in observers:
            guard([observer], _tell_of, observer.see, observer, site, call)


def _tell_of(method: Callable[..., None], observer: Observer, site: nn.Module | None, *about: Any) -> None:
    method(observer.context.module() if site is None else site, *about)


HEAD_COUNTS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads", "nhead", "nheads")


def heads_of(module: nn.Module) -> int:
    """The number of heads that a module names among its attributes; 0 if it names none."""
    return _count(module) or 0


def refuse_shared_queries(module: nn.Module, query: Tensor, key: Tensor) -> None:
    """Raises where queries are expanded along the axis of heads, and keys are not: that axis is then one of tokens."""
    if query.dim() == 4 and query.shape[1] not in (1, heads_of(module)) and query.stride(1) == 0 != key.stride(1):
        raise UnsupportedCallError(
            module,
            "its queries are the same along the axis of heads, which is then one of tokens (a learned mix of layers, "
            "say); if it is one of heads, put attemper.tap beside it",
        )


def stated_heads(module: nn.Module) -> int | None:
    """The number of heads that a module, or its configuration, names; None where neither does."""
    return _count(module) or _count(getattr(module, "config", None))


def _count(holder: object) -> int | None:
    for name in HEAD_COUNTS:
        heads = getattr(holder, name, None)
        if isinstance(heads, int) and heads > 0:
            return heads
    return None


def four_dimensional(tensor: Tensor, heads: int) -> Tensor:
    """Queries or keys as [B, H, Q, D].

    [..., H, Q, D] has its leading dimensions made one batch, and [..., G, heads / G, Q, D] its groups made heads.
    [..., H, windows, Q, D] has its windows put before its heads. [B * heads, Q, D] is unfolded; [Q, D] is one head of
    one batch.
    """
    if tensor.dim() == 4:
        return tensor
    if tensor.dim() > 4:
        if tensor.shape[-3] != heads and tensor.shape[-4] * tensor.shape[-3] == heads:
            tensor = tensor.flatten(-4, -3)
        elif _windows_last(tensor.shape, heads):
            tensor = tensor.transpose(-4, -3)
        return tensor.flatten(0, -4) if tensor.dim() > 4 else tensor
    if tensor.dim() == 3:
        folded = heads > 1 and tensor.shape[0] % heads == 0
        return tensor.unflatten(0, (-1, heads)) if folded else tensor[:, None]
    return tensor[None, None]


def as_given(rows: Tensor, shape: Sequence[int], heads: int) -> Tensor:
    """Queries that ``four_dimensional`` made of a tensor of this shape, as they were."""
    if _windows_last(shape, heads):
        return rows.reshape(*shape[:-4], shape[-3], shape[-4], *shape[-2:]).transpose(-4, -3)
    return rows.reshape(shape)


def _windows_last(shape: Sequence[int], heads: int) -> bool:
    return len(shape) > 4 and shape[-4] == heads and shape[-3] not in (1, heads)


def mask_like(module: nn.Module, mask: Tensor, query: Tensor, heads: int, keys: int) -> Tensor:
    """A mask that broadcasts to [..., Q, K] of ``query`` [..., Q, D], in the shape that ``four_dimensional`` makes."""
    if query.dim() == 4 or mask.dim() <= 2:
        if mask.dim() > 4:
            raise UnsupportedCallError(module, f"its mask {list(mask.shape)} has more dimensions than its queries")
        return mask
    return four_dimensional(mask.expand(*query.shape[:-1], keys), heads)


def as_autocast_rounds(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys as a product or SDPA uses them: rounded to autocast's type where autocast is on.

    A function mode sees them before that rounding; the weights follow from the rounded ones.
    """
    kind = query.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return query, key
    dtype = torch.get_autocast_dtype(kind)
    first, second = (part if part.dtype == torch.float64 else part.to(dtype) for part in (query, key))
    return first, second
