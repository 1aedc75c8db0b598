"""Sites on which a control cannot act: one warning names them, with the reason and what to do."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence

from attemper.sites.find import Site
from attemper.text import clean, count, cut, first_of

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
    """Warns of sites, by name, that have no effect for these reasons."""
    named = first_of([f"{clean(name)}: {cut(clean(reason), 200)}" for name, reason in reasons.items()], NAMED, "; ")
    advice = ["Leave sites out with sites= if this is meant."]
    if "is in eval mode" in reasons.values():
        advice.insert(0, "Only training counts: call model.train() before the forward pass.")
    warnings.warn(f"{where}: {lead} ({named}). {' '.join(advice)}", stacklevel=4)
