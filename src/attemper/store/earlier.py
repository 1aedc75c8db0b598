"""What a folder held before: whether it is a run of the model that is written there now."""

from __future__ import annotations

import json
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass

from attemper.readings.sample import SiteLabel
from attemper.store.schema import Tables
from attemper.text import clean_name, count


@dataclass(frozen=True)
class Earlier:
    """The run that a fragment held when it was opened to be written."""

    model: str
    heads: Mapping[tuple[str, str], int]
    """(name, kind) of its sites -> how many heads they have."""
    known: frozenset[str] | None
    """Names of modules that attend, read or not; None where only some were watched."""
    last_step: int

    @classmethod
    def of(cls, tables: Tables, last_step: int) -> Earlier:
        about = {name: json.loads(value) for name, value in tables.rows("SELECT name, value FROM about")}
        heads = {(name, kind): heads for name, kind, heads in tables.rows("SELECT name, kind, heads FROM site")}
        expected = {_module(name) for (name,) in tables.rows("SELECT name FROM coverage")}
        known = None if about.get("sites") else frozenset(expected | {_module(name) for name, _ in heads})
        return cls(str(about.get("model") or ""), heads, known, last_step)

    def is_of(self, model: str, sites: Sequence[SiteLabel], modules: Container[str]) -> bool:
        """Whether it was a run of the same model, as far as can be told.

        Args:
            model: class of the model that is watched now.
            sites: what was seen of it in a sample.
            modules: names of all of its modules.
        """
        if self.model not in ("", model):
            return False
        if any(self.heads.get((site.name, site.kind), site.heads) != site.heads for site in sites):
            return False
        seen = {_module(site.name) for site in sites}
        gone = [name for name, _ in self.heads if _module(name) not in seen and _module(name) not in modules]
        return not gone and (self.known is None or seen <= self.known)

    def warning(self, folder: str, model: str, sites: Sequence[SiteLabel], step: int) -> str:
        """What to say where it was a run of another model."""
        before, now = _description(self.model, self.heads.values()), _description(model, [one.heads for one in sites])
        return (
            f"attemper: {clean_name(folder)} holds a run of another model: {before}, up to step {self.last_step}. This "
            f"one is of {now}. Both are kept in its file, but of the earlier one only steps below {step} are shown. "
            f"Give each run a folder of its own, as in attemper.watch(model, store='runs/b')."
        )


def _module(site: str) -> str:
    """Name of a site without the number of the call."""
    return site.partition("#")[0]


def _description(model: str, heads: Collection[int]) -> str:
    return f"{clean_name(model) or 'a model'} with {count(len(heads), 'site')} and {count(sum(heads), 'head')}"
