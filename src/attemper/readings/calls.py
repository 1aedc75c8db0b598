"""Calls of one module in parts that were read apart: by ranks, in blocks of texts, in files. Where a module ran another
number of times in some of them, its calls are one site in all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from attemper.readings.labels import JOINED, call_of, is_later_layer, layer_of
from attemper.readings.sample import SiteLabel

Uneven = Mapping[tuple[str, str], int]
"""(Name, mode) of modules -> how many calls of one forward are told apart all the same."""


def uneven(parts: Iterable[Iterable[SiteLabel]]) -> Uneven:
    """Modules with other calls in some part than in another that has any of them.

    Calls within one forward of a module are told apart in any case. They are in one layer, those of several are not.
    """
    seen: dict[tuple[str, str], set[frozenset[int]]] = {}
    repeated: dict[tuple[str, str], set[frozenset[int]]] = {}
    for part in parts:
        calls: dict[tuple[str, str], list[SiteLabel]] = {}
        for label in part:
            calls.setdefault((call_of(label.name)[0], label.mode), []).append(label)
        for at, labels in calls.items():
            numbers = frozenset(call_of(label.name)[1] for label in labels)
            seen.setdefault(at, set()).add(numbers)
            if any(is_later_layer(label.name, label.layer) for label in labels):
                repeated.setdefault(at, set()).add(numbers)
    return {
        at: max((max(numbers) for numbers in several - repeated[at]), default=1)
        for at, several in seen.items()
        if len(several) > 1 and at in repeated
    }


def joined(name: str, mode: str, modules: Uneven) -> str:
    """The site that a call is a part of; itself where it is of none of ``modules``."""
    module, call = call_of(name)
    number = (call - 1) % modules.get((module, mode), call) + 1
    return module if number == 1 else f"{module}#{number}"


def joined_label(label: SiteLabel, modules: Uneven) -> SiteLabel:
    """The same of a label."""
    name = joined(label.name, label.mode, modules)
    is_mean = (call_of(name)[0], label.mode) in modules
    return replace(label, name=name, layer=layer_of(name) if is_mean else label.layer)


def reasons(modules: Uneven, where: str) -> dict[str, str]:
    """Why the calls of these modules are one site, by name. ``where``: in which other part they differ."""
    return {
        f"{name}{JOINED}": f"it attended another number of times {where}: the site {name} is the mean over its calls"
        for name, _ in modules
    }
