"""What tells the sites of a model from each other where their whole names are too long."""

from __future__ import annotations

import re
from collections.abc import Iterable

from attemper.records import SiteReading


def pattern_of(name: str) -> str:
    """A site's name with its numbers starred: what the sites of a stack share."""
    return re.sub(r"\d+", "*", name)


def label_of(name: str) -> str:
    """The numbers that tell a site from the others of its stack; a dash if its name has none.

    Example:
        >>> label_of("encoder.block.3.layer.0.SelfAttention")
        '3.0'
        >>> label_of("attention"), label_of("attention#2"), label_of("blocks.1.attention#2")
        ('–', '#2', '1#2')
    """
    name, call, number = name.partition("#")
    numbers = ".".join(re.findall(r"\d+", name))
    return f"{numbers}{call}{number}" or "–"


def column_of(sites: Iterable[SiteReading]) -> str:
    """The title of a column of ``labels_of``."""
    return "layer" if _has_layers(tuple(sites)) else "site"


def labels_of(sites: Iterable[SiteReading]) -> tuple[str, ...]:
    """What tells the sites of a stack from each other: their layers; else the numbers of their names, where no two
    share them; else their places in it, from 0.
    """
    sites = tuple(sites)
    if _has_layers(sites):
        return tuple(str(site.layer) for site in sites)
    labels = tuple(label_of(site.name) for site in sites)
    return labels if len(set(labels)) == len(labels) else tuple(map(str, range(len(sites))))


def _has_layers(sites: tuple[SiteReading, ...]) -> bool:
    """Whether every site has a layer that is its own."""
    layers = {site.layer for site in sites}
    return None not in layers and len(layers) == len(sites)
