"""Requests that were checked before: a program makes the same calls again and again, and checking one takes as long as
attention over some tens of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attemper.backends import table
from attemper.call import autograd, transforms
from attemper.call.request import Options, Request, request_of
from attemper.call.result import facts_of
from attemper.call.temperature import row_multiplier


class KnownRequest:
    """A request without the tensors of its call; with its multiplier, unless it ``keeps`` none."""

    def __init__(self, request: Request, keeps: bool = True) -> None:
        nothing = request.problem.query.new_empty(0)
        value = None if request.problem.value is None else nothing
        multiplier = request.problem.multiplier if keeps else nothing
        self.request = _with_tensors(request, query=nothing, key=nothing, value=value, multiplier=multiplier)
        self.facts = facts_of(request)
        self._again: Any = None
        # Where nothing stands between the call and its kernels (call/autograd.py), it need not even be described again.
        self._direct = autograd.passes_dispatcher(request.problem) and not request.problem.rowwise

    def again(self, query: Tensor, key: Tensor, value: Tensor | None) -> Any:
        """The forward pass by the kernels themselves (``native/repeated_call.py``); None where it takes more."""
        if not self._direct or not transforms.stand_in_memory((query, key, value)):
            return None
        if torch.is_grad_enabled() and (
            query.requires_grad or key.requires_grad or (value is not None and value.requires_grad)
        ):
            return None
        if self._again is None:
            problem = self.with_tensors(query, key, value).problem
            self._again = table.kernels(problem.backend).Again(problem, self.request.names)
        return self._again

    def with_tensors(self, query: Tensor, key: Tensor, value: Tensor | None, **multiplier: Tensor) -> Request:
        """The request of other tensors, of the same shapes, strides and types."""
        return _with_tensors(self.request, query=query, key=key, value=value, **multiplier)


class KnownRequests:
    """Requests of calls without a mask, by the shapes, strides and types of their tensors and by their options.

    Args:
        keeps: whether the multiplier of a request is kept, a tensor. A call that is made inside of what CUDA graphs are
            made of must leave no tensor behind: its memory is the graph's.
    """

    MOST = 256

    def __init__(self, *, keeps: bool = True) -> None:
        self._keeps = keeps
        self._known: dict[Any, KnownRequest] = {}

    def request(
        self, where: str, query: Tensor, key: Tensor, value: Tensor | None, mask: Tensor | None, options: Options
    ) -> Request:
        """``request_of`` these, checked once for each combination. What was refused is checked, and refused, again."""
        found = self.find(where, query, key, value, mask, options)
        if isinstance(found, Request):
            return found
        if self._keeps:
            return found.with_tensors(query, key, value)
        multiplier = row_multiplier(where, query, options.scale, options.temperature)
        return found.with_tensors(query, key, value, multiplier=multiplier)

    def find(
        self, where: str, query: Tensor, key: Tensor, value: Tensor | None, mask: Tensor | None, options: Options
    ) -> Request | KnownRequest:
        """What is known of such a call; its request where that had to be made."""
        place = None if mask is not None else _place_of(query, key, value, options)
        if place is None:
            return request_of(where, query, key, value, mask, options)
        known = self._known.get(place)
        if known is not None:
            return known
        request = request_of(where, query, key, value, None, options)
        self._keep(place, request)
        return request

    def _keep(self, place: tuple[Any, ...], request: Request) -> None:
        problem = request.problem
        if table.by_name(problem.backend).devices not in ("any", problem.query.device.type):
            return  # kernels that are interpreted, for as long as the environment says so
        if len(self._known) >= self.MOST:
            self._known.clear()
        self._known[place] = KnownRequest(request, self._keeps)


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
    given_value = () if value is None else (value.shape, value.stride())
    shapes = query.shape, query.stride(), key.shape, key.stride(), given_value
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


def _with_tensors(request: Request, **tensors: Tensor | None) -> Request:
    made = object.__new__(Request)
    vars(made).update(vars(request), problem=request.problem.with_fields(**tensors))
    return made


KNOWN = KnownRequests()
"""Those of the public functions."""
