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
    """
    return ".".join(re.findall(r"\d+", name)) or "–"


def labels_of(sites: Iterable[SiteReading]) -> tuple[str, ...]:
    """What tells the sites of a stack from each other: their layers, or ``label_of`` where two share one."""
    sites = tuple(sites)
    layers = {site.layer for site in sites}
    alone = None not in layers and len(layers) == len(sites)
    return tuple(str(site.layer) if alone else label_of(site.name) for site in sites)
