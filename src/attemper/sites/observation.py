"""Who is looking: the observers of the current thread's forward pass, and what they are told of the calls they see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from attemper.call.masks import is_plain
from attemper.call.options import Options, Request
from attemper.call.packing import Packing
from attemper.call.result import AttentionStats
from attemper.errors import InputError
from attemper.sites.identity import Places
from attemper.sites.identity import places as memory_of
from attemper.sites.padding import CallContext


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
    """One attention call as it was seen: what its statistics follow from."""

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
    """Memory of the tensors that it was called with: tells whether a tap is of the same attention."""


def check_mask(module: nn.Module, call: AttentionCall) -> None:
    """Refuses a mask of a subclass of Tensor that is not known here.

    Raises:
        UnsupportedCallError: it may mean something else than the numbers it holds.
    """
    if call.mask is not None and not is_plain(call.mask):
        kind = type(call.mask).__name__
        raise UnsupportedCallError(
            module, f"its mask is a {kind}, a subclass of Tensor that may mean something else than its numbers"
        )


class Observer(Protocol):
    """What is told of each attention call of a forward pass."""

    replace: bool
    """Whether it wants output and statistics from one pass of ours, in place of the model's own attention."""
    stats: tuple[str, ...]
    backend: str
    context: CallContext

    def running(self) -> nn.Module:
        """The module whose forward is running."""
        ...

    def key_tokens(self, module: nn.Module, keys: int) -> Tensor | None:
        """[B, K] bool: which keys are real tokens; None where the call's own mask has to tell."""
        ...

    def observe(self, module: nn.Module, stats: AttentionStats, call: AttentionCall, request: Request) -> None:
        """Takes the statistics of a call that was computed here, for ``request``."""
        ...

    def see(self, module: nn.Module, call: AttentionCall) -> None:
        """Takes a call that somebody else computes."""
        ...

    def skip(self, module: nn.Module, reason: str, places: Places = frozenset()) -> None:
        """Takes note of a call that cannot be measured."""
        ...

    def fail(self, error: Exception) -> None:
        """Takes note of a failure of ours; raises it where that does no harm (a scan), and never in a training step."""
        ...


_current: ContextVar[tuple[Observer, ...]] = ContextVar("attemper_observers", default=())
_inside: ContextVar[bool] = ContextVar("attemper_inside", default=False)


def current() -> tuple[Observer, ...]:
    """The observers of this thread's forward pass; none inside a call that has been told already."""
    return () if _inside.get() else _current.get()


def present() -> tuple[Observer, ...]:
    """The observers of this thread's forward pass, inside a call that has been told, too."""
    return _current.get()


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Adds ``observer`` to the current ones; it is gone afterwards whatever happens."""
    _current.set((*_current.get(), observer))
    try:
        yield
    finally:
        # Observers may leave in another order than they came: each takes out itself.
        _current.set(tuple(other for other in _current.get() if other is not observer))


@contextmanager
def told() -> Iterator[None]:
    """What runs in here belongs to a call that has been told: it is not told again."""
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


def guarded(observers: Iterable[Observer], action: Callable[..., None], *args: Any) -> None:
    """Runs ``action``, which is ours: what goes wrong in it goes to the observers, and not into somebody's training.
    Where nobody observes it is raised.
    """
    try:
        action(*args)
    except Exception as error:  # whatever it is
        told_of = tuple(dict.fromkeys(observers))
        for observer in told_of:
            observer.fail(error)
        if not told_of:
            raise


def tell(
    reader: Callable[..., AttentionCall], args: tuple[Any, ...], kwargs: dict[str, Any], site: nn.Module | None = None,
    places: Places = frozenset(),
) -> None:  # fmt: skip
    """Reads a call that has run, and tells every observer of it, or why it cannot be measured.

    Args:
        site: the module that attends, where it is known; the one that is running otherwise.
        places: memory of its queries and keys, where ``args`` and ``kwargs`` do not hold them.
    """
    observers = current()
    if not observers:
        return
    # Our own arithmetic is nobody's attention, and needs no graph.
    with told(), torch.no_grad():
        try:
            module = observers[0].running() if site is None else site
            given = (*args[:2], *(kwargs[name] for name in ("query", "key", "q", "k") if name in kwargs))
            places = places | memory_of(given)
            call = reader(module, *args, **kwargs)
            check_mask(module, call)
            call = replace(call, places=places | memory_of((call.query, call.key)))
            for observer in observers:
                observer.context.settle(call.mask)
        except Exception as error:  # whatever it is, it must not end somebody's training run
            known = isinstance(error, UnsupportedCallError)
            reason = error.reason if known else f"its arguments could not be read ({error})"
            for observer in observers:
                guarded([observer], _skip, observer, site, reason, places)
            return
        for observer in observers:
            guarded([observer], _see, observer, site, call)


def _skip(observer: Observer, site: nn.Module | None, reason: str, places: Places) -> None:
    observer.skip(observer.running() if site is None else site, reason, places)


def _see(observer: Observer, site: nn.Module | None, call: AttentionCall) -> None:
    observer.see(observer.running() if site is None else site, call)
