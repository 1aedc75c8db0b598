"""Requests that were checked before: a program makes the same calls again and again, and checking one takes as long as
attention over some tens of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attemper.backends import table
from attemper.backends.contract import Problem
from attemper.call import transforms
from attemper.call.options import Options, Request, request_of


class KnownRequests:
    """Requests of calls without a mask, by the shapes and types of their tensors and by their options."""

    MOST = 256

    def __init__(self) -> None:
        self._known: dict[Any, Request] = {}

    def request(
        self, where: str, query: Tensor, key: Tensor, value: Tensor | None, mask: Tensor | None, options: Options
    ) -> Request:
        """``request_of`` these, checked once for each combination. What was refused is checked, and refused, again."""
        place = None if mask is not None else _place_of(query, key, value, options)
        if place is None:
            return request_of(where, query, key, value, mask, options)
        request = self._known.get(place)
        if request is None:
            request = request_of(where, query, key, value, None, options)
            self._keep(place, request)
            return request
        return _with_tensors(request, query, key, value)

    def _keep(self, place: tuple[Any, ...], request: Request) -> None:
        problem = request.problem
        if table.by_name(problem.backend).devices not in ("any", problem.query.device.type):
            return  # kernels that are interpreted, for as long as the environment says so
        if len(self._known) >= self.MOST:
            self._known.clear()
        nothing = problem.query.new_empty(0)
        self._known[place] = _with_tensors(request, nothing, nothing, None if problem.value is None else nothing)


def _place_of(query: Any, key: Any, value: Any, options: Options) -> tuple[Any, ...] | None:
    """All that the request of a call follows from; None where that is more than can be told apart here."""
    if not transforms.is_undisturbed() or not _are_plain(query, key, query if value is None else value):
        return None
    given = tuple(vars(options).values())
    kinds = tuple(map(type, given))
    # Objects may change, and generators can be read once.
    if not _FIXED.issuperset(kinds) or kinds[_NORMALIZER] is not str or not _is_fixed(options):
        return None
    # 1, 1.0 and True are equal, and not all of them are a scale: the types are told apart, too. The multiplier that is
    # kept with a request of inference mode is of no use to autograd.
    shapes = query.shape, key.shape, None if value is None else value.shape
    return *shapes, query.dtype, query.device, torch.is_inference_mode_enabled(), given, kinds


def _are_plain(query: Any, *others: Any) -> bool:
    """Whether tensors are of torch's own class, none of them nested, all of one type on one device."""
    if type(query) is not Tensor or query.is_nested:
        return False
    dtype, device = query.dtype, query.device
    for part in others:
        if type(part) is not Tensor or part.dtype is not dtype or part.device != device or part.is_nested:
            return False
    return True


def _is_fixed(options: Options) -> bool:
    """Whether what is in the tuples among these options cannot be mistaken for what equals it."""
    stats, window = options.stats, options.window_size
    named = type(stats) is str or (type(stats) is tuple and {*map(type, stats)} <= {str})
    return named and options.spans is None and type(window) is tuple and {*map(type, window)} == {int}


_FIXED = frozenset((float, int, str, bool, tuple, type(None)))
_NORMALIZER = list(Options.__dataclass_fields__).index("normalizer")


def _with_tensors(request: Request, query: Tensor, key: Tensor, value: Tensor | None) -> Request:
    """``request`` of other tensors, of the same shapes and types."""
    # dataclasses.replace takes as long as all the rest of this file.
    problem, made = object.__new__(Problem), object.__new__(Request)
    vars(problem).update(vars(request.problem), query=query, key=key, value=value)
    vars(made).update(vars(request), problem=problem)
    return made


KNOWN = KnownRequests()
"""Those of the public functions."""
