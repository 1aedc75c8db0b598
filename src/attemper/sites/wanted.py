"""Which sites a caller names: modules (or taps), with everything below them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attemper.errors import InputError

Wanted = tuple[str, ...] | None
"""Names; None for every site."""


def checked_sites(where: str, sites: Any) -> Wanted:
    """``sites`` as names.

    Raises:
        InputError: it is no list of at least one name.
    """
    if sites is None:
        return None
    if isinstance(sites, str) or not isinstance(sites, Iterable):
        raise InputError(f"{where}(sites=...) must be a list of module or tap names, got {sites!r}: write [{sites!r}].")
    names = tuple(sites)
    if not names or not all(isinstance(name, str) for name in names):
        raise InputError(f"{where}(sites=...) must be a list of at least one name, got {list(names)!r}.")
    return names


def is_wanted(name: str, wanted: Wanted) -> bool:
    """Whether ``name`` is one of the wanted ones, or below one."""
    return wanted is None or any(name == w or name.startswith(f"{w}.") for w in wanted)
