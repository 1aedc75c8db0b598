"""Sites gathered into stacks: the like layers of one tower, which tables and pages show together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attemper.readings.labels import label_of, pattern_of
from attemper.readings.reading import HeadReading, Reading, SiteReading
from attemper.readings.roles import ROLES
from attemper.statistics import SHOWN, Reduction
from attemper.text import call_of, clean, count, counts, first_of


@dataclass(frozen=True)
class Stack:
    """Sites that differ only in the numbers of their names, all of one kind and mode."""

    pattern: str
    """What their names share; see ``pattern_of``."""
    kind: str
    mode: str
    sites: tuple[SiteReading, ...]
    places: tuple[int, ...]
    """Where each site stands among all sites of the reading."""

    @property
    def heads(self) -> int:
        return max(len(site.heads) for site in self.sites)

    @property
    def queries(self) -> int:
        return max(site.queries for site in self.sites)

    @property
    def keys(self) -> int:
        return max(site.keys for site in self.sites)

    @property
    def column(self) -> str:
        """The title of a column of ``labels``."""
        return "layer" if self._has_layers else "site"

    @property
    def labels(self) -> tuple[str, ...]:
        """What tells its sites from each other: their layers; else the numbers of their names, where no two share
        them; else their places in the stack, from 0.
        """
        if self._has_layers:
            return tuple(str(site.layer) for site in self.sites)
        labels = tuple(label_of(site.name) for site in self.sites)
        return labels if len(set(labels)) == len(labels) else tuple(map(str, range(len(labels))))

    @property
    def _has_layers(self) -> bool:
        layers = {site.layer for site in self.sites}
        return None not in layers and len(layers) == len(self.sites)


def stacks(sites: tuple[SiteReading, ...], *, equal_heads: bool = False) -> tuple[Stack, ...]:
    """Sites gathered by pattern, kind and mode, in the order in which each stack is first met.

    Sites that are not neighbours are gathered, too: a decoder's self and cross attention alternate. Calls of one module
    are of the stack of its first one where each is a layer.

    Args:
        equal_heads: whether sites of another number of heads are another stack.
    """
    layers: dict[tuple[str, str, str], list[int | None]] = {}
    for site in sites:
        layers.setdefault((pattern_of(call_of(site.name)[0]), site.kind, site.mode), []).append(site.layer)
    gathered: dict[tuple[str, str, str, int], list[int]] = {}
    for place, site in enumerate(sites):
        heads, pattern = len(site.heads) if equal_heads else 0, pattern_of(call_of(site.name)[0])
        known = layers[pattern, site.kind, site.mode]
        if None in known or len(set(known)) < len(known):
            pattern = pattern_of(site.name)
        gathered.setdefault((pattern, site.kind, site.mode, heads), []).append(place)
    return tuple(
        Stack(pattern, kind, mode, tuple(sites[place] for place in places), tuple(places))
        for (pattern, kind, mode, _), places in gathered.items()
    )


def size_of(reading: Reading) -> str:
    """How much a reading is of, in the words of tables."""
    rows = reading.sampled_rows
    sampled = "" if rows is None else f", {count(rows, 'row')} of each sequence (max logit is a lower bound)"
    size = counts(site=len(reading.sites), head=len(reading.heads), token=reading.tokens)
    return f"{size}, {clean(reading.backend)}{sampled}"


def heads_of_roles(reading: Reading, most: int) -> Iterator[tuple[str, int, str]]:
    """Of each role that heads have: its name, how many, and the ``most`` clearest as ``layer.head score``."""
    heads = [(site, head, head.roles) for site, head in reading.placed_heads if head.roles is not None]
    for role in ROLES:
        own = [(site, head, scores[role.name]) for site, head, scores in heads if head.role == role.name]
        own.sort(key=lambda one: -(one[2] or 0.0))
        places = (clean(site.name) if site.layer is None else str(site.layer) for site, *_ in own)
        named = [f"{place}.{head.head} {score:.2f}" for place, (_, head, score) in zip(places, own, strict=True)]
        if own:
            yield role.name, len(own), first_of(named, most)


def over_heads(heads: tuple[HeadReading, ...], name: str) -> float | None:
    """The mean of a number over heads; the largest if it is a largest itself. None if no head has it."""
    values = [value for head in heads if (value := getattr(head, name)) is not None]
    if not values:
        return None
    return max(values) if SHOWN[name].reduction is Reduction.LARGEST else sum(values) / len(values)
