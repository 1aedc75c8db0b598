"""Who is looking: the observer of the current thread's forward pass, and what it must know of the call it sees."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from torch import Tensor, nn

from attemper.errors import InputError
from attemper.functional.stats import AttentionStats


class UnsupportedCallError(InputError):
    """An attention call that cannot be honoured exactly. Raised before anything is computed."""

    def __init__(self, module: nn.Module, reason: str) -> None:
        super().__init__(
            f"{type(module).__name__}: {reason}. attemper computes an attention exactly or not at all; set another "
            f"attention "
            "implementation for this model."
        )
        self.module, self.reason = module, reason


class Observer(Protocol):
    """What an adapter tells of each attention call."""

    stats: tuple[str, ...]
    """Names of the statistics it wants."""
    backend: str

    def key_tokens(self, module: nn.Module, keys: int) -> Tensor | None:
        """[B, K] bool: which keys are real tokens; None where the call's own mask has to tell."""
        ...

    def observe(self, module: nn.Module, stats: AttentionStats, keys: int) -> None:
        """Takes the statistics of one call."""
        ...


_current: ContextVar[Observer | None] = ContextVar("attemper_observer", default=None)


def current() -> Observer | None:
    """The observer of this thread's forward pass, or None."""
    return _current.get()


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Makes ``observer`` the current one; the one before comes back whatever happens."""
    token = _current.set(observer)
    try:
        yield
    finally:
        _current.reset(token)
