"""What controls of a model share: how they end (``remove()``, or the end of a ``with``), and one warning that names the
sites on which they cannot act.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Self

from attemper.sites.find import Site
from attemper.text import clean, count, cut, first_of


class Handle:
    """Something that acts on a model until ``remove()``. A context manager, too."""

    def remove(self) -> None:
        """Takes it off the model."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def former_close(handle: Handle) -> None:
    """``remove()``, under its name before attemper 0.3."""
    warnings.warn(
        f"{type(handle).__name__}.close() goes in attemper 0.4; write .remove().", DeprecationWarning, stacklevel=2
    )
    handle.remove()


NAMED = 4
"""So many sites are named in a warning; the others are counted."""


class IdleSites:
    """Warns once about a step in which no site ran, and once about sites that have not run so far."""

    def __init__(self, where: str, sites: Sequence[Site]) -> None:
        """``where``: the control, for messages."""
        self._where, self._sites = where, sites
        self._told: set[bool] = set()
        """Whether the warnings given so far were about all sites."""
        self._ran: set[str] = set()

    def note(self, ran: Collection[str]) -> None:
        """Takes the names of the sites that ran in the step that ends."""
        self._ran |= set(ran)
        idle = [site for site in self._sites if site.name not in (self._ran if ran else ran)]
        if not idle or (not ran) in self._told:
            return
        self._told.add(not ran)
        lead = f"{count(len(idle), 'site')} had no effect {'so far' if ran else 'in this step'}"
        reasons = {site.name: "did not run" if site.module.training else "is in eval mode" for site in idle}
        warn_idle(self._where, lead, reasons)


def warn_idle(where: str, lead: str, reasons: Mapping[str, str]) -> None:
    named = first_of([f"{clean(name)}: {cut(clean(reason), 200)}" for name, reason in reasons.items()], NAMED, "; ")
    advice = ["Leave sites out with sites= if this is meant."]
    if "is in eval mode" in reasons.values():
        advice.insert(0, "Only training counts: call model.train() before the forward pass.")
    warnings.warn(f"{where}: {lead} ({named}). {' '.join(advice)}", stacklevel=4)
