"""The state of rows, column by column: what a kernel leaves, and what statistics follow from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import ModuleType

import torch
from torch import Tensor

from attemper.backends import table
from attemper.backends.sums import SUMMED
from attemper.call import transforms
from attemper.statistics import Column

State = Mapping[Column, Tensor]
"""Column -> [B, H, Q]."""


class LazyState(Mapping[Column, Tensor]):
    """The state's columns, unstacked on first access."""

    def __init__(self, columns: tuple[Column, ...], stacked: Tensor, backend: str | None = None) -> None:
        """``stacked`` [columns, B, H, Q]; ``backend``: the one whose kernels derive statistics from it, too."""
        self._columns = columns
        self._backend = backend
        self._stacked = stacked
        self._graph = torch.is_grad_enabled()
        self._parts: dict[Column, Tensor] | None = None

    def __getitem__(self, column: Column) -> Tensor:
        if self._parts is None:
            with same_graph(self._graph):
                self._parts = dict(zip(self._columns, self._stacked.unbind(0), strict=True))
        return self._parts[column]

    def __iter__(self) -> Iterator[Column]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __contains__(self, column: object) -> bool:
        return column in self._columns

    def detach(self) -> LazyState:
        """The same state outside the autograd graph."""
        return LazyState(self._columns, self._stacked.detach(), self._backend)

    def statistics(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Those of ``names`` that the kernels derive in one pass instead of thirty operators. Formulas give the same.

        Empty where a gradient is wanted, or where something listens to what is computed.
        """
        kernels, stacked = self._kernels(), self._stacked
        return {} if kernels is None or stacked.requires_grad else kernels.statistics(self._columns, stacked, names)

    def sums(self, included: Tensor | None, first_tokens: int) -> Tensor | None:
        """The rows of softmax without a sink as sums per head (``backends/sums.py``), if the kernels can."""
        kernels = self._kernels()
        if kernels is None or self._columns[: len(SUMMED)] != SUMMED:
            return None
        return kernels.sums(self._stacked.detach(), included, first_tokens)

    def _kernels(self) -> ModuleType | None:
        """The kernels that read the state where it lies in memory; None if they may not."""
        stacked = self._stacked
        readable = stacked.is_contiguous() and type(stacked) is Tensor and transforms.is_undisturbed()
        return table.kernels(self._backend) if self._backend is not None and readable else None


def state_of(columns: tuple[Column, ...], stacked: Tensor, backend: str | None = None) -> State:
    """The state in ``stacked`` [columns, B, H, Q]."""
    if torch.compiler.is_compiling():
        return dict(zip(columns, stacked.unbind(0), strict=True))
    return LazyState(columns, stacked, backend)


def detach(state: State) -> State:
    """The same state outside the autograd graph."""
    if isinstance(state, LazyState):
        return state.detach()
    return {column: value.detach() for column, value in state.items()}


def round_to(state: State, dtype: torch.dtype) -> State:
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
