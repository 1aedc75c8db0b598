"""One sample of a watched model as arrays: all heads of all sites side by side. What alarms judge and a store keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from attemper.checks import one_of
from attemper.errors import InputError
from attemper.statistics import SHOWN, STATISTIC_OF, Reduction

if TYPE_CHECKING:
    import numpy as np

SITE_KINDS = ("self", "cross")
MODES = ("train", "eval")
ATTENTIONS = ("full", "window", "cross", "mla", "sparse", "sink")
"""Types of attention that a label names."""

MOST_EXACT = 2**24
"""Whole numbers up to this one are exact in float32."""

SiteKey = tuple[str, str, str]
"""(name, kind, mode): what tells a site from all others of a run."""


@dataclass(frozen=True)
class SiteLabel:
    """What is known of a site beside its numbers."""

    name: str
    kind: str
    """One of ``SITE_KINDS``."""
    mode: str
    """One of ``MODES``."""
    layer: int | None
    """The block that it is in; see ``layer_of``."""
    attention: str
    """One of ``ATTENTIONS``."""
    normalizer: str
    heads: int
    """How many query heads it has here."""
    first_head: int = 0
    """The number of the first of them in the whole model: under tensor parallelism each rank has some of the heads."""

    @property
    def key(self) -> SiteKey:
        return self.name, self.kind, self.mode

    @property
    def head_numbers(self) -> range:
        return range(self.first_head, self.first_head + self.heads)


@dataclass(frozen=True)
class Quantity:
    """One number per head that a sample may hold."""

    name: str
    unit: str
    exact: bool = False
    """Whether a store keeps all its bits: counts."""


_COUNTS = {
    "rows": "rows",
    "empty_rows": "rows",
    "nonfinite_rows": "rows",
    "queries": "queries",
    "keys": "keys",
    "judged_rows": "rows",
}
JUDGED = ("normalized_entropy", "first_token_mass")
"""Statistics that alarms judge over the rows that see at least ``fewest_keys`` keys, ``judged_rows`` of them."""

RANK_DIFFERENCE, FARTHEST_RANK = "rank_difference", "farthest_rank"
"""Of a site, in the merged history of several ranks: the largest distance of a rank's mean normalised entropy from the
mean of all ranks, and the number of that rank. The same for all heads.
"""

SURPLUS = "surplus_keys"
"""Of a sample: visible keys less those that are expected, or less the most that were seen at like lengths before."""

QUANTITIES: dict[str, Quantity] = {
    **{name: Quantity(name, shown.unit) for name, shown in SHOWN.items()},
    **{name: Quantity(name, unit, exact=True) for name, unit in _COUNTS.items()},
    **{f"judged_{name}": Quantity(f"judged_{name}", SHOWN[name].unit) for name in JUDGED},
    RANK_DIFFERENCE: Quantity(RANK_DIFFERENCE, "of log n"),
    FARTHEST_RANK: Quantity(FARTHEST_RANK, "rank", exact=True),
    SURPLUS: Quantity(SURPLUS, "keys"),
}
"""Name -> quantity: the fields of ``HeadReading`` that show statistics, counts, and what alarms judge."""

_ALIASES = {STATISTIC_OF[name]: name for name, one in SHOWN.items() if one.reduction is not Reduction.ROOT_OF_MEAN}
"""Statistic -> the field that shows it, where that is the same number: ``logit_std`` is a root."""


def quantity(name: str) -> str:
    """The name in ``QUANTITIES`` that is meant by a statistic's name or by a field of ``HeadReading``.

    Raises:
        InputError: there is none.

    Example:
        >>> quantity("entropy"), quantity("max_logit"), quantity("rows")
        ('entropy_nats', 'max_logit', 'rows')
    """
    roots = {STATISTIC_OF[name]: name for name in SHOWN if STATISTIC_OF[name] not in _ALIASES}
    if name in roots:
        raise InputError(f"statistic {name!r} is kept as {roots[name]!r}, the root of its mean: ask for that.")
    valid = dict.fromkeys((*QUANTITIES, *_ALIASES))
    return _ALIASES.get(name, name if name in QUANTITIES else one_of("statistic", name, valid))


@dataclass(frozen=True, eq=False)
class Sample:
    """Numbers of every head at one step. Several forwards of one step are one sample."""

    step: int
    time: float
    """Seconds since 1970, UTC."""
    sites: tuple[SiteLabel, ...]
    quantities: tuple[str, ...]
    """Names of ``QUANTITIES``, one for each row of ``values``."""
    values: np.ndarray
    """[quantities, heads of all sites one after another] float32, NaN where a number is missing; float64 where a count
    is above ``MOST_EXACT``.
    """
    tokens: int = 0
    """Real tokens read: padding left out."""

    def __post_init__(self) -> None:
        expected = len(self.quantities), sum(site.heads for site in self.sites)
        assert self.values.shape == expected, f"values are {self.values.shape}, expected {expected}"

    @cached_property
    def places(self) -> dict[SiteKey, slice]:
        """Where the heads of each site stand in a row of ``values``."""
        return places_of(self.sites)

    def of(self, name: str) -> np.ndarray:
        """[heads] of one quantity; NaN if the sample does not hold it."""
        if name in self.quantities:
            return self.values[self.quantities.index(name)]
        import numpy as np

        return np.full(self.values.shape[1], np.nan, np.float32)

    def plus(self, names: tuple[str, ...], rows: np.ndarray) -> Sample:
        """The same sample with more quantities, [names, heads]."""
        import numpy as np

        values = np.concatenate([self.values, rows.astype(self.values.dtype)])
        return replace(self, quantities=(*self.quantities, *names), values=values)


class Samples(NamedTuple):
    """Neighbouring samples of the same sites and quantities."""

    steps: list[int]
    times: list[float]
    tokens: list[int]
    sites: tuple[SiteLabel, ...]
    quantities: tuple[str, ...]
    values: np.ndarray
    """[quantities, samples, heads]"""

    @classmethod
    def of(cls, sample: Sample) -> Samples:
        times = [sample.step], [sample.time], [sample.tokens]
        return cls(*times, sample.sites, sample.quantities, sample.values[:, None])

    def cut(self, start: int, end: int) -> Samples:
        here = slice(start, end)
        times = self.steps[here], self.times[here], self.tokens[here]
        return Samples(*times, self.sites, self.quantities, self.values[:, here])

    def each(self) -> Iterator[Sample]:
        """One after another."""
        for row, (step, time, tokens) in enumerate(zip(self.steps, self.times, self.tokens, strict=True)):
            yield Sample(step, time, self.sites, self.quantities, self.values[:, row], tokens)


def places_of(sites: tuple[SiteLabel, ...]) -> dict[SiteKey, slice]:
    """Where the heads of each site stand, where those of all stand one after another."""
    ends = accumulate(site.heads for site in sites)
    return {site.key: slice(end - site.heads, end) for site, end in zip(sites, ends, strict=True)}
