"""Functions that a compiler asks once, while it traces, and whose answer it keeps in the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def constant_in_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` with the mark of ``torch.compiler.assume_constant_result``.

    PyTorch's own decorator imports the whole compiler, ``torch._dynamo``, for this one attribute: more than a second of
    the first call of everybody who compiles nothing.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function
