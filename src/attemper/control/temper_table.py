"""What stands at each site of a tempered model, as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from attemper.nn.normalizers import Normalizer
from attemper.nn.temperature import ProductTemperature, ScheduledTemperature, Temperature

_SHOWN = 16
"""Heads whose numbers are written out."""
_PER_HEAD = ("alpha", "value")
"""Attributes of a module that are its number, or its tensor [heads]."""


def lines(temperatures: Mapping[str, Temperature], normalizers: Mapping[str, Normalizer]) -> list[str]:
    """A line for each site: its name, its temperature, its normalizer."""
    names = list(dict.fromkeys((*temperatures, *normalizers)))
    width = max(map(len, names), default=0)
    found = []
    for name in names:
        parts = [part for part in (temperatures.get(name), normalizers.get(name)) if part is not None]
        found.append(f"  {name:{width}}  {'; '.join(description(part) for part in parts)}")
    return found


def description(part: nn.Module) -> str:
    """A temperature or normalizer with its numbers as they are now."""
    if isinstance(part, ProductTemperature):
        return " x ".join(description(factor) for factor in part.factors)
    name, given = type(part).__name__, _given(part)
    if not isinstance(given, Tensor):
        more = part.extra_repr()
        return f"{name}({more})" if more else name
    if isinstance(part, ScheduledTemperature):
        return f"{name} {_numbers(given)} at step {int(part.steps)} of {part.total_steps}"
    quantity = "alpha " if hasattr(part, "alpha") else ""
    return f"{name} {quantity}{_numbers(given)}"


def _given(part: nn.Module) -> Any:
    """The tensor that a module holds, whether it is an attribute or a method's result; None for one of another kind."""
    given: Any = next((getattr(part, name) for name in _PER_HEAD if hasattr(part, name)), None)
    return given() if callable(given) and not isinstance(given, Tensor) else given


def _numbers(given: Tensor) -> str:
    values = given.detach().double().flatten().tolist()
    if len(values) > 1 and len(set(values)) == 1:
        return f"{values[0]:.4g} ({len(values)} heads)"
    shown = " ".join(f"{value:.4g}" for value in values[:_SHOWN])
    if len(values) <= _SHOWN:
        return shown
    return f"{shown} ... ({len(values)} heads, {min(values):.4g} to {max(values):.4g})"
