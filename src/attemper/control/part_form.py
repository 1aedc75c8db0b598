"""A temperature or normalizer as JSON and tensors, and back: by a fixed list of kinds, so that a file names no code.

The form says what a module was made with; what it holds (numbers per head, weights, a step) are tensors. Sizes follow
from the tensors, which cannot claim more memory than the file has bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from attemper import nn as kinds
from attemper.errors import InputError
from attemper.nn.normalizers import MODULES, Normalizer
from attemper.nn.temperature import ProductTemperature, Temperature
from attemper.schedules import schedule_form, schedule_of

Form = dict[str, Any]
Tensors = Mapping[str, Tensor]
_DEEPEST = 8
"""Products within products."""

_OPTIONS: dict[str, tuple[str, ...]] = {
    "FixedTemperature": (),
    "LearnedTemperature": ("floor", "ceiling"),
    "ConditionalTemperature": ("pool", "floor", "ceiling"),
    "LengthTemperature": ("reference", "law"),
    "ScheduledTemperature": ("total_steps", "schedule"),
    "ProductTemperature": ("factors",),
    **{kind.__name__: kind.options for kind in MODULES},
}
"""What each kind is made with: names of its attributes. A tensor among them is none of the form's."""
NAMED = tuple(_OPTIONS)


def form_of(part: nn.Module) -> Form | None:
    """The form of a temperature or normalizer; None for a class that is not attemper's."""
    name = type(part).__name__
    if getattr(kinds, name, None) is not type(part) and not isinstance(part, ProductTemperature):
        return None
    if isinstance(part, ProductTemperature):
        factors = [form_of(factor) for factor in part.factors]
        return None if None in factors else {"kind": "ProductTemperature", "factors": factors}
    given = {option: getattr(part, option) for option in _OPTIONS[name]}
    if "schedule" in given:
        given["schedule"] = schedule_form(given["schedule"])
    return {"kind": name, **{option: value for option, value in given.items() if not isinstance(value, Tensor)}}


def part_of(form: object, tensors: Tensors, depth: int = 0) -> Temperature | Normalizer:
    """The module of a form.

    Args:
        form: what ``form_of`` gave, or anything else that a file may hold.
        tensors: those of the module, by its own names for them.

    Raises:
        InputError: the form is of no known kind or has other options, or the tensors are not those of its kind.
    """
    if not isinstance(form, dict) or not isinstance(form.get("kind"), str) or form["kind"] not in _OPTIONS:
        kind = form.get("kind") if isinstance(form, dict) else form
        raise InputError(f"{kind!r:.80} is no temperature or normalizer of attemper; known are {', '.join(NAMED)}.")
    name, options = form["kind"], {option: value for option, value in form.items() if option != "kind"}
    if not set(options) <= set(_OPTIONS[name]) or depth > _DEEPEST:
        raise InputError(f"a {name} with the options {sorted(options)!r:.200} is not known.")
    try:
        part = _BUILD[name](options, tensors) if name != "ProductTemperature" else _product(options, tensors, depth)
        if any(tensor.dtype == torch.float64 for tensor in tensors.values()):
            part.double()
        part.load_state_dict(dict(tensors))
    except (KeyError, IndexError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
        raise InputError(f"a {name} cannot be made of {options!r:.200} and {_shapes(tensors)}: {error}") from error
    return part


def _product(options: Form, tensors: Tensors, depth: int) -> Temperature:
    factors = []
    for number, form in enumerate(options["factors"]):
        beginning = f"factors.{number}."
        own = {name.removeprefix(beginning): value for name, value in tensors.items() if name.startswith(beginning)}
        factors.append(part_of(form, own, depth + 1))
    return ProductTemperature(factors)


def _scheduled(options: Form, _: Tensors) -> Temperature:
    return kinds.ScheduledTemperature(schedule_of(options["schedule"]), options["total_steps"])


def _learned(options: Form, tensors: Tensors) -> Temperature:
    return kinds.LearnedTemperature(len(tensors["log_temperature"]), initial=options["floor"], **options)


def _conditional(options: Form, tensors: Tensors) -> Temperature:
    heads, dim = tensors["projection.weight"].shape
    return kinds.ConditionalTemperature(dim, heads, initial=options["floor"], **options)


_BUILD: dict[str, Callable[[Form, Tensors], Temperature | Normalizer]] = {
    "FixedTemperature": lambda _, tensors: kinds.FixedTemperature(tensors["value"]),
    "LearnedTemperature": _learned,
    "ConditionalTemperature": _conditional,
    "LengthTemperature": lambda options, _: kinds.LengthTemperature(**options),
    "ScheduledTemperature": _scheduled,
    **{kind.__name__: kind.from_form for kind in MODULES},
}


def _shapes(tensors: Tensors) -> str:
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in list(tensors.items())[:4]) or "no tensors"
