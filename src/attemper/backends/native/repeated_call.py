"""A call that is made again and again: described once, for other tensors of the same shapes and strides."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from attemper.backends.contract import Problem
from attemper.backends.native.arguments import STATISTICS, address, describe
from attemper.backends.native.library import check, library
from attemper.backends.native.rows import derivable, empty_statistics

_ADDRESSES = struct.Struct(f"@{6 + STATISTICS}q")
"""``Again`` of ``source/arguments.h``."""


class Results(NamedTuple):
    """Tensors for what a call gives, without numbers."""

    output: Tensor
    state: Tensor
    statistics: dict[str, Tensor]
    """Those that the kernel itself derives."""
    places: list[int]
    """Their addresses: ``Statistics`` of ``source/arguments.h``."""


class Again:
    """The forward pass of a call of softmax, for the tensors that change.

    Between two kernels Python finds none of its own code in the caches any more, and each step takes five to thirty
    times as long as by itself, the first of its kind most: describing a call took more time than what it describes
    saved. So all tensors are made in one way, and what is made of them is made before the kernel runs.
    """

    def __init__(self, problem: Problem, names: tuple[str, ...]) -> None:
        """``problem``: without mask and sink; its other tensors are those of every call. ``names``: of statistics."""
        output, state = empty_results(problem)
        self._output = output.shape, output.stride(), output.dtype
        self._state, self._rows = (state.shape, state.stride()), (state.shape[1:], state.stride()[1:])
        self._wanted = derivable(problem.columns, names)
        # Held: the library reads them at every call.
        self._call, self._held = describe(problem, output, state)
        self._run = library().attemper_forward_again

    def empty_results(self) -> Results:
        """What ``run`` fills."""
        shape, strides, dtype = self._output
        output = torch.empty_strided(shape, strides, dtype=dtype)
        state = torch.empty_strided(*self._state, dtype=torch.float32)
        return Results(output, state, *empty_statistics(self._wanted, *self._rows))

    def run(self, query: Tensor, key: Tensor, value: Tensor | None, results: Results) -> None:
        """Fills output and state, as ``forward`` does, and the statistics."""
        tensors = address(query), address(key), address(value), address(results.output), address(results.state)
        code = self._run(self._call, _ADDRESSES.pack(*tensors, torch.get_num_threads(), *results.places))
        if code:
            check("attemper_forward", code)


def empty_results(problem: Problem) -> tuple[Tensor, Tensor]:
    """Output [B, H, Q, E] and state [F, B, H, Q] of a call, without numbers.

    The output of softmax lies as [B, Q, H, E] in memory, as that of PyTorch's SDPA does:
    what joins heads next copies nothing.
    """
    batch, heads, rows, _ = problem.query.shape
    width = 0 if problem.value is None else problem.value.shape[3]
    new = problem.query.new_empty
    output = new((batch, heads, rows, width)) if problem.rowwise else new((batch, rows, heads, width)).transpose(1, 2)
    return output, torch.empty((len(problem.columns), batch, heads, rows), dtype=torch.float32)
