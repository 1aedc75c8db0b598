"""A temperature or normalizer as JSON and tensors, and back: by a fixed list of kinds, so that a file names no code.

The form says what a module was made with; what it holds (numbers per head, weights, a step) are tensors. Sizes follow
from the tensors, which cannot claim more memory than the file has bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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


class Kind(NamedTuple):
    """How a temperature or normalizer of one class is written and made again."""

    options: tuple[str, ...]
    """Names of the attributes that it was made with. A tensor among them is not part of the form."""
    build: Callable[[Form, Tensors, int], Temperature | Normalizer]
    """From options, tensors and the depth of products around it."""


def form_of(part: nn.Module) -> Form | None:
    """The form of a temperature or normalizer; None for a class that is not attemper's."""
    name = type(part).__name__
    if getattr(kinds, name, None) is not type(part) and not isinstance(part, ProductTemperature):
        return None
    if isinstance(part, ProductTemperature):
        factors = [form_of(factor) for factor in part.factors]
        return None if None in factors else {"kind": "ProductTemperature", "factors": factors}
    given = {option: getattr(part, option) for option in KINDS[name].options}
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
    if not isinstance(form, dict) or not isinstance(form.get("kind"), str) or form["kind"] not in KINDS:
        kind = form.get("kind") if isinstance(form, dict) else form
        raise InputError(f"{kind!r:.80} is not a temperature or normalizer of attemper. Known: {', '.join(KINDS)}.")
    name, options = form["kind"], {option: value for option, value in form.items() if option != "kind"}
    if not set(options) <= set(KINDS[name].options) or depth > _DEEPEST:
        raise InputError(f"a {name} with the options {sorted(options)!r:.200} is not known.")
    try:
        part = KINDS[name].build(options, tensors, depth)
        if any(tensor.dtype == torch.float64 for tensor in tensors.values()):
            part.double()
        part.load_state_dict(dict(tensors))
    except (KeyError, IndexError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
        raise InputError(
            f"a {name} cannot be made of {options!r:.200} and {_shapes(tensors)}: {' '.join(str(error).split())}"
        ) from error
    return part


def _product(options: Form, tensors: Tensors, depth: int) -> Temperature:
    factors = []
    for number, form in enumerate(options["factors"]):
        beginning = f"factors.{number}."
        own = {name.removeprefix(beginning): value for name, value in tensors.items() if name.startswith(beginning)}
        factors.append(part_of(form, own, depth + 1))
    return ProductTemperature(factors)


def _learned_temperature(options: Form, tensors: Tensors, _: int) -> Temperature:
    return kinds.LearnedTemperature(len(tensors["log_temperature"]), initial=options["floor"], **options)


def _conditional(options: Form, tensors: Tensors, _: int) -> Temperature:
    heads, dim = tensors["projection.weight"].shape
    return kinds.ConditionalTemperature(dim, heads, initial=options["floor"], **options)


KINDS = {
    "FixedTemperature": Kind((), lambda _, tensors, __: kinds.FixedTemperature(tensors["value"])),
    "LearnedTemperature": Kind(("floor", "ceiling"), _learned_temperature),
    "ConditionalTemperature": Kind(("pool", "floor", "ceiling"), _conditional),
    "LengthTemperature": Kind(("reference", "law"), lambda options, *_: kinds.LengthTemperature(**options)),
    "ScheduledTemperature": Kind(
        ("total_steps", "schedule"),
        lambda options, *_: kinds.ScheduledTemperature(schedule_of(options["schedule"]), options["total_steps"]),
    ),
    "ProductTemperature": Kind(("factors",), _product),
    **{kind.__name__: Kind(kind.options, lambda *given, kind=kind: kind.from_form(*given[:2])) for kind in MODULES},
}
"""Every temperature and normalizer that a file may name."""


def _shapes(tensors: Tensors) -> str:
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in list(tensors.items())[:4]) or "no tensors"
