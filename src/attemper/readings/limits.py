"""When alarms ring: limits of all kinds, everywhere and by site; and the alarms of one reading by them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from inspect import Parameter, Signature
from typing import Any, TypeAlias

from attemper.checks import one_of, whole_number
from attemper.errors import InputError
from attemper.readings.alarms import ALARMS, DEFAULT_LIMITS, KINDS
from attemper.readings.reading import FEWEST_KEYS, Alarm, HeadReading, SiteReading
from attemper.readings.roles import SHARP

Limits: TypeAlias = Mapping[str, float | None]


@dataclass(frozen=True, init=False, repr=False)
class AlarmLimits:
    """Limits at which alarms start, by kind, for all sites or some. What is not named keeps its default::

        attemper.watch(model, limits=AlarmLimits(logits=50, drift=None, sites={"*.layers.0.*": {"first_token": 0.95}}))

    Args:
        sites: pattern of site names (``*``, ``?``, ``[...]``) -> limits there. Of several that match the last counts.
        limits: a number for each kind, None if it is never to ring:
    """

    everywhere: Limits
    """Name -> limit, of all kinds that have one."""
    sites: Mapping[str, Limits]

    def __init__(self, *, sites: Mapping[str, Limits] | None = None, **limits: float | None) -> None:
        object.__setattr__(self, "everywhere", DEFAULT_LIMITS | _check("limits", limits))
        by_glob = {str(glob): _check(f"limits.sites[{glob!r}]", given) for glob, given in _mappings(sites).items()}
        object.__setattr__(self, "sites", by_glob)

    @classmethod
    def of(
        cls, limits: AlarmLimits | Mapping[str, Any] | None, known: Mapping[str, float] = DEFAULT_LIMITS
    ) -> AlarmLimits:
        """Makes limits from a record, a mapping of names (and ``sites``), or None.

        Raises:
            InputError: a name that is none of ``known``, or a value that is not a number.
        """
        if isinstance(limits, AlarmLimits):
            return limits
        if not isinstance(limits, Mapping | None):
            raise InputError(f"limits must be attemper.AlarmLimits or a mapping, got {type(limits).__name__}.")
        given = dict(limits or {})
        sites = _mappings(given.pop("sites", None))
        for names in (given, *sites.values()):
            for name in names:
                one_of("limits", name, known)
        return cls(sites=sites, **given)

    def at(self, site: str) -> dict[str, float | None]:
        """Name -> limit at the site of this name."""
        found = dict(self.everywhere)
        for glob, limits in self.sites.items():
            if fnmatchcase(site, glob):
                found |= limits
        return found

    def to_dict(self) -> dict[str, Any]:
        """A document from which :meth:`of` makes the same limits."""
        return {**self.everywhere, "sites": {glob: dict(limits) for glob, limits in self.sites.items()}}

    def __getattr__(self, name: str) -> float | None:
        # Only names that are no field arrive here. A copy that is being made has no fields yet.
        if name in self.__dict__.get("everywhere", {}):
            return self.everywhere[name]
        raise AttributeError(f"AlarmLimits has no limit {name!r}. There are {', '.join(DEFAULT_LIMITS)}.")

    def __repr__(self) -> str:
        changed = {name: value for name, value in self.everywhere.items() if value != DEFAULT_LIMITS[name]}
        parts = {**changed, "sites": self.sites} if self.sites else changed
        return f"AlarmLimits({', '.join(f'{name}={value!r}' for name, value in parts.items())})"


AlarmLimits.__doc__ = (
    f"{AlarmLimits.__doc__}".rstrip()
    + "\n\n"
    + "\n".join(f"            - {name} ({limit:g} {KINDS[name].unit})" for name, limit in DEFAULT_LIMITS.items())
)
AlarmLimits.__signature__ = Signature(  # type: ignore[attr-defined]
    [Parameter(name, Parameter.KEYWORD_ONLY, default=one) for name, one in ({"sites": None} | DEFAULT_LIMITS).items()]
)


def _mappings(sites: Any) -> Mapping[str, Limits]:
    """Raises InputError if it is not None, and no mapping of mappings."""
    found = {} if sites is None else sites
    if not isinstance(found, Mapping) or not all(isinstance(one, Mapping) for one in found.values()):
        raise InputError(f"limits['sites'] must map patterns of site names to limits, got {sites!r:.80}.")
    return found


def _check(where: str, limits: Limits) -> dict[str, float | None]:
    """Raises InputError for a name that is no limit, or a value that is neither a number nor None."""
    for name, value in limits.items():
        one_of(where, name, DEFAULT_LIMITS)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value != value):
            raise InputError(f"{where}[{name!r}] must be a number, or None if it is never to ring; got {value!r}.")
    return {name: None if value is None else float(value) for name, value in limits.items()}


def check_fewest_keys(where: str, fewest_keys: int) -> int:
    """``fewest_keys`` if it is a whole number of at least 2."""
    why = (
        f" It is how many keys a row must see before its sharpness is judged ({FEWEST_KEYS} unless told); a row with "
        "one key has none."
    )
    return whole_number(f"{where}(fewest_keys=...)", fewest_keys, why, least=2)


def alarms(
    sites: tuple[SiteReading, ...], limits: AlarmLimits | Limits | None = None, fewest_keys: int = FEWEST_KEYS
) -> tuple[Alarm, ...]:
    """Alarms of a scan. Sharpness is a notice: only a history or a baseline tells trouble from a healthy sharp head.

    Args:
        sites: their buckets by visible keys have an edge at ``fewest_keys``.
        limits: of kinds; those that need a history ring in no scan.
        fewest_keys: rows that see fewer say nothing about sharpness or first tokens.
    """
    checked = AlarmLimits.of(limits)
    at = [(site, checked.at(site.name)) for site in sites]
    of_sites = [alarm for site, own in at for alarm in _of_heads(site, site.heads, own, fewest_keys, whole=True)]
    of_heads = (_of_heads(site, (head,), own, fewest_keys) for site, own in at for head in site.heads)
    return (*of_sites, *(alarm for found in of_heads for alarm in found))


_OF_SCANS = tuple(kind for kind in ALARMS if not kind.needs_history)


def _of_heads(
    site: SiteReading, heads: tuple[HeadReading, ...], limits: Limits, fewest_keys: int, *, whole: bool = False
) -> Iterator[Alarm]:
    """Alarms of one head, or with ``whole`` of a site, by that of its heads which is farthest beyond."""
    for kind in _OF_SCANS:
        values = [(one, head) for head in heads if (one := kind.value(head, fewest_keys)) is not None]
        limit = limits.get(kind.name, kind.limit)
        if kind.whole is not whole or not values or (limit is None and kind.limit is not None):
            continue
        value, head = max(values, key=lambda one: one[0] if kind.side == "above" else -one[0])
        if kind.rings(value, limit):
            total = head.rows + head.empty_rows + head.nonfinite_rows
            role = head.role if kind.of_sharpness and head.role in SHARP else None
            place = site.name, None if whole else head.head
            yield kind.alarm(*place, value, limit, figures={"total": total}, role=role)
