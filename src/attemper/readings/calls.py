"""Calls of one module as sites, and where they are one site: in parts that were read apart (ranks, blocks of texts,
files) and in readings of earlier versions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeAlias

from attemper.readings.labels import JOINED, layer_of
from attemper.readings.reading import SiteReading
from attemper.readings.sample import SiteKey, SiteLabel
from attemper.text import call_of

Modules: TypeAlias = frozenset[tuple[str, str]]
"""(Name, mode) of modules, or taps."""


def first_call(name: str, kind: str, mode: str) -> SiteKey:
    """The site of the first call of a module; of all of them, where they are one site."""
    return call_of(name)[0], kind, mode


def apart(sites: Iterable[SiteLabel | SiteReading]) -> set[SiteKey]:
    """First calls of modules each of whose forwards is a site: those have a layer by the order of calls."""
    later = (site for site in sites if call_of(site.name)[1] > 1 and site.layer != layer_of(site.name))
    return {first_call(site.name, site.kind, site.mode) for site in later}


def uneven(parts: Iterable[Iterable[SiteLabel]]) -> Modules:
    """Modules that ran several times, and in some part another number of times than in another."""
    several: set[SiteKey] = set()
    calls: dict[SiteKey, set[frozenset[str]]] = {}
    for part in map(tuple, parts):
        several |= apart(part)
        here: dict[SiteKey, set[str]] = {}
        for label in part:
            here.setdefault(first_call(*label.key), set()).add(label.name)
        for key, names in here.items():
            calls.setdefault(key, set()).add(frozenset(names))
    return frozenset((key[0], key[2]) for key in several if len(calls[key]) > 1)


def joint_label(label: SiteLabel, modules: Modules) -> SiteLabel:
    """The site that a call is a part of, where the calls of ``modules`` are one site each."""
    name = call_of(label.name)[0]
    return replace(label, name=name, layer=layer_of(name)) if (name, label.mode) in modules else label


def reasons(modules: Modules, where: str) -> dict[str, str]:
    """``name#*`` -> why the calls of these modules are one site. ``where``: in which other part they differ."""
    why = f"it attended another number of times {where}: the site {{0}} is the mean over its calls"
    return {f"{name}{JOINED}": why.format(name) for name, _ in modules}
