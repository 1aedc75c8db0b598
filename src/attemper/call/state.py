"""The state of rows, column by column: what a kernel leaves, and what statistics follow from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import Tensor

from attemper.call import direct
from attemper.statistics import Column

State = Mapping[Column, Tensor]
"""Column -> [B, H, Q]."""


class LazyState(Mapping[Column, Tensor]):
    """The state's columns, unstacked on first access."""

    def __init__(self, columns: tuple[Column, ...], stacked: Tensor, native: bool = False) -> None:
        """``stacked`` [columns, B, H, Q]; ``native``: by the native kernels, which derive statistics from it, too."""
        self._columns = columns
        self._native = native
        self._stacked = stacked
        self._graph = torch.is_grad_enabled()
        self._parts: tuple[Tensor, ...] | None = None

    def __getitem__(self, column: Column) -> Tensor:
        if column not in self._columns:
            raise KeyError(column)
        if self._parts is None:
            with same_graph(self._graph):
                self._parts = self._stacked.unbind(0)
        return self._parts[self._columns.index(column)]

    def __iter__(self) -> Iterator[Column]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __contains__(self, column: object) -> bool:
        return column in self._columns

    def detach(self) -> LazyState:
        """The same state outside the autograd graph."""
        return LazyState(self._columns, self._stacked.detach(), self._native)

    def statistics(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Those of ``names`` that the native kernels derive in one pass, without a gradient. Formulas give the same."""
        return direct.statistics(self._columns, self._stacked, names) if self._native else {}

    def sums(self, included: Tensor | None, first_tokens: int) -> Tensor | None:
        """The rows of softmax without a sink as sums per head (``backends/sums.py``), if the native kernels can."""
        return direct.sums(self._columns, self._stacked, included, first_tokens) if self._native else None


def state_of(columns: tuple[Column, ...], stacked: Tensor, native: bool = False) -> State:
    """The state in ``stacked`` [columns, B, H, Q]."""
    if torch.compiler.is_compiling():
        return dict(zip(columns, stacked.unbind(0), strict=True))
    return LazyState(columns, stacked, native)


def detached(state: State) -> State:
    """The same state outside the autograd graph."""
    if isinstance(state, LazyState):
        return state.detach()
    return {column: value.detach() for column, value in state.items()}


def rounded(state: State, dtype: torch.dtype) -> State:
    """The state in the precision of its call, if it was left in another."""
    return state if isinstance(state, LazyState) else {column: value.to(dtype) for column, value in state.items()}


def same_graph(graph: bool) -> AbstractContextManager[object]:
    """Records on the autograd graph if ``graph`` says so, whatever holds at the moment.

    Never makes tensors of inference mode, which a later graph could not hold.
    """
    compiling = torch.compiler.is_compiling()
    if torch.is_grad_enabled() == graph and (compiling or not torch.is_inference_mode_enabled()):
        return nullcontext()
    stack = ExitStack()
    if not compiling:
        stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.set_grad_enabled(graph))
    return stack
