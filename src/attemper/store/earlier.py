"""What a folder held before: whether it is a run of the model that is written there now."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass

from attemper.readings.calls import apart
from attemper.readings.labels import JOINED
from attemper.readings.sample import SiteLabel
from attemper.store.schema import Tables, read_about
from attemper.text import call_of, clean_name, count


@dataclass(frozen=True)
class Earlier:
    """The run that a fragment held when it was opened to be written."""

    model: str
    heads: Mapping[tuple[str, str], int]
    """(name, kind) of its sites -> how many heads they have."""
    known: frozenset[str] | None
    """Names of modules that attend, read or not; None where only some were watched."""
    last_step: int
    joined: Mapping[tuple[str, str], str]
    """(Name, mode) of modules whose calls were one site, and why."""

    @classmethod
    def of(cls, tables: Tables, last_step: int) -> Earlier:
        about = read_about(tables)
        heads = {(name, kind): heads for name, kind, heads in tables.rows("SELECT name, kind, heads FROM site")}
        covered = tables.rows("SELECT name, mode, reason FROM coverage")
        expected = {_module(name) for name, _, _ in covered}
        known = None if about.get("sites") else frozenset(expected | {_module(name) for name, _ in heads})
        joined = {(_module(name), mode): why for name, mode, why in covered if name.endswith(JOINED) and why}
        return cls(str(about.get("model") or ""), heads, known, last_step, joined)

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
        gone = (name for name, _ in self.heads if _module(name) not in seen and name not in modules)
        return all(_module(name) in modules for name in gone) and (self.known is None or seen <= self.known)

    def _means(self, sites: Sequence[SiteLabel]) -> list[str]:
        """Sites that were the mean over the calls of a module, each of which is a site now."""
        calls = {(name, kind) for name, kind, _ in apart(sites)}
        return [name for name, kind in self.heads if (name, kind) in calls and (f"{name}#2", kind) not in self.heads]

    def difference(self, model: str, sites: Sequence[SiteLabel], modules: Container[str], step: int) -> str | None:
        """What to say of it behind the name of its folder, where it was a run of another model, or where sites of it
        were means; else None. Arguments are those of ``is_of``, and the step of the sample.
        """
        if not self.is_of(model, sites, modules):
            now, before = _description(model, [one.heads for one in sites]), self.heads.values()
            return (
                f" holds a run of another model: {_description(self.model, before)}, up to step {self.last_step}. This "
                f"one is of {now}. Both are kept in its file, but of the earlier one only steps below {step} are "
                "shown. Give each run a folder of its own, as in attemper.watch(model, store='runs/b')."
            )
        if not (names := self._means(sites)):
            return None
        more = f" (and {count(len(names) - 1, 'more site')})" if len(names) > 1 else ""
        return (
            f": up to step {self.last_step} {clean_name(names[0])}{more} is the mean over all calls of its module. "
            f"From step {step} on it is the first call, the others are sites of their own (#2, ...), and alarms take "
            "it for a new site."
        )


def _module(site: str) -> str:
    """Name of a site without the number of the call."""
    return call_of(site.removesuffix(JOINED))[0]


def _description(model: str, heads: Collection[int]) -> str:
    return f"{clean_name(model) or 'a model'} with {count(len(heads), 'site')} and {count(sum(heads), 'head')}"
