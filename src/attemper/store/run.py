"""Every head over a whole run, read from its files or beside the process that writes them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from attemper.checks import did_you_mean, index_of
from attemper.errors import InputError
from attemper.readings import history
from attemper.readings.history import History, Trend
from attemper.readings.judge import Judge
from attemper.readings.limits import AlarmLimits
from attemper.readings.reading import Alarm, Reading, Skipped
from attemper.readings.sample import SiteKey, SiteLabel, quantity
from attemper.store import export
from attemper.store.checksum import UNCHECKED
from attemper.store.ranks import Ranks, reading_of
from attemper.store.series import Lost, Segment
from attemper.store.store import SHADOWED, UNNUMBERED
from attemper.store.verdict import Verdict, why_unmeasured
from attemper.text import clean, clean_name, count, first_of

if TYPE_CHECKING:
    import pandas

Array = np.ndarray
Site = str | SiteLabel | SiteKey
"""How a site is asked for: its name, or (name, kind, mode) where one name has several."""


UNSAMPLED = "it was in no sample"


@dataclass(frozen=True)
class Unread:
    """A site that was expected in a run and is not in it, and why."""

    name: str
    kind: str
    mode: str
    reason: str


@dataclass(frozen=True)
class Coverage:
    """Which sites a run was to hold, which it holds, and which it does not."""

    expected: tuple[SiteKey, ...]
    seen: tuple[SiteKey, ...]
    skipped: tuple[Unread, ...]


class StoredRun:
    """What ``results.run.Run`` reads of a run; pages and tables are drawn of it."""

    def __init__(self, ranks: Ranks, path: PurePath | None = None, unreadable: Sequence[str] = ()) -> None:
        """
        Args:
            ranks: the fragments.
            path: where they are; None for a history in memory.
            unreadable: what is wrong with fragments that could not be opened.
        """
        self.path = path
        self.ranks = ranks
        self._unreadable = tuple(unreadable)
        self._verdict = Verdict(ranks)

    def close(self) -> None:
        """Closes the files. Without it they are closed when the run is no longer used."""
        self.ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what it is ---

    @property
    def about(self) -> Mapping[str, Any]:
        """What was noted of the run: the model and its configuration, how it was sampled, limits, versions."""
        return self.ranks.about

    @property
    def name(self) -> str:
        return str(self.about.get("name") or (self.path.name if self.path else "this run"))

    @property
    def _called(self) -> str:
        """What messages call it: a history in memory has no name of its own."""
        return "this run" if self.name == "this run" else f"the run {clean_name(self.name)!r}"

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(self.about.get("tags") or ())

    @property
    def notes(self) -> str:
        """What its user wrote about it."""
        return str(self.about.get("notes") or "")

    @property
    def live(self) -> bool:
        """Whether a process of this machine writes it now; of Parquet parts, whether the newest is so new that another
        may follow.
        """
        return any(reader.live for reader in self.ranks.readers)

    @property
    def steps(self) -> Array:
        """The steps that were sampled, ascending."""
        return self.ranks.steps()

    @property
    def sites(self) -> tuple[SiteLabel, ...]:
        """In the order in which they were first seen."""
        return tuple(self.ranks.sites.values())

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names that ``history`` takes: statistics, and what the loop gave of each step."""
        return (*self.ranks.statistics, *self.ranks.scalars)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """What each process wrote without going back; a resumed run has several."""
        return tuple(segment for reader in self.ranks.readers for segment in reader.segments)

    @property
    def lost(self) -> tuple[Lost, ...]:
        """Samples that could not be stored, and why."""
        return tuple(self.ranks.lost)

    @property
    def coverage(self) -> Coverage:
        expected, seen = self.ranks.coverage, self.ranks.sites
        skipped = [
            Unread(*key, UNSAMPLED if reason is None else reason) for key, reason in expected.items() if key not in seen
        ]
        return Coverage(tuple(dict.fromkeys((*expected, *seen))), tuple(seen), tuple(skipped))

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a reader of the numbers should know: what is lost, thinned, read twice or not readable."""
        found = list(self._unreadable)
        found += [UNCHECKED] if any(reader.unchecked for reader in self.ranks.readers) else []
        found += [f"{count(one.samples, 'sample is', 'samples are')} lost: {one.reason}" for one in self.lost]
        begun, unnumbered = {segment.first_step for segment in self.segments}, self.about.get(UNNUMBERED) or ()
        by = "without a step number: counting continues from the last step"
        found += [f"resumed at step {step:,} {by}" for step in unnumbered if step in begun]
        restarts = [step for reader in self.ranks.readers[:1] for step in reader.restarts]
        found += [f"started again at step {step:,}: earlier samples are not shown" for step in restarts[-1:]]
        found += [_way_from(**change) for change in self.about.get(SHADOWED) or ()]
        if thinned := self.about.get("thinned"):
            kept = f"up to step {thinned['until_step']:,} at least one sample in {thinned['largest_spacing']} is kept"
            found.append(f"thinned: {kept}, and alarms use only those")
        until = max(
            (one for reader in self.ranks.readers if (one := reader.scalars_thinned_until) is not None), default=None
        )
        if until is not None:
            found.append(f"numbers per step are thinned up to step {until:,}: the least and largest of eight are kept")
        if shared := self.ranks.shared_sites:
            what, one = count(len(shared), "site was", "sites were"), clean_name(shared[0][0])
            found.append(f"{what} written by several ranks, such as {one}: the first rank's numbers are shown")
        return tuple(found)

    # --- numbers over steps ---

    def history(
        self,
        statistic: str,
        site: Site | None = None,
        head: int | None = None,
        *,
        start: int | None = None,
        stop: int | None = None,
        mode: str | None = None,
    ) -> History:
        """A statistic at every sampled step, or what ``watch.step(loss=...)`` was given, at every step.

        Args:
            statistic: a name of ``statistics``, or that of the statistic behind it: "entropy" for "entropy_nats".
                A number of the loop, such as "loss", has no site and no head.
            site: a site; None for all.
            head: a head of it; None for all.
            start, stop: only steps from ``start`` on, and below ``stop``.
            mode: only sites in "train" or in "eval".

        Returns:
            A :class:`History` of values [steps] for one head of one site or a number of the loop, [steps, heads] for
            one site, [steps, sites, heads] for all; NaN where there is no number.

        Raises:
            InputError: no such statistic, site or head is in the run; or a name means several sites.
        """
        for end, step in (("start", start), ("stop", stop)):
            if step is not None and index_of(step) is None:
                raise InputError(f"history({end}=...) must be a step, a whole number, got {step!r}.")
        if (scalar := self.ranks.scalars.get(statistic)) is not None:
            if (site, head, mode) != (None, None, None):
                raise InputError(
                    f"{statistic!r} is a number of the whole step: ask for it without site, head and mode."
                )
            return History(statistic, *scalar.between(start, stop), ())
        name = self._statistic(statistic)
        with self.ranks.snapshot():
            labels = self._labels(site, mode)
            place = None if head is None else self._place(head, labels)
            steps = self.ranks.steps(start, stop)
            series = list(self.ranks.values(name, [label.key for label in labels], steps))
        values = _stack(series, max((label.heads for label in labels), default=0), len(steps))
        if site is not None:
            values = values[:, 0]
        if place is not None:
            values = values[..., place]
        asked = None if site is None else labels[0].name
        return History(name, steps, values, labels, asked, head)

    def mean(self, statistic: str, site: Site | None = None, head: int | None = None, **options: Any) -> Any:
        """The mean of a statistic over the sampled steps; arguments and errors as of ``history``.

        Returns:
            A number for one head, [heads] for one site, [sites, heads] for all, float64; NaN where there is none.
        """
        return history.mean(self.history(statistic, site, head, **options).values)

    def std(self, statistic: str, site: Site | None = None, head: int | None = None, **options: Any) -> Any:
        """Its standard deviation over the sampled steps, of the population; as ``mean``."""
        return history.std(self.history(statistic, site, head, **options).values)

    def trend(self, statistic: str, site: Site | None = None, head: int | None = None, **options: Any) -> Trend:
        """Its slope per 1,000 steps with a 95% interval, by Theil and Sen; arguments and errors as of ``history``.

        It is robust: a quarter of the samples may be wrong, in a row or spread at random. Of more than 200 samples it
        is taken from medians of neighbouring ones.
        """
        found = self.history(statistic, site, head, **options)
        return history.trend(found.steps, found.values)

    # --- alarms ---

    def alarms(self, limits: AlarmLimits | Mapping[str, Any] | None = None) -> list[Alarm]:
        """Every alarm of the run, in the order in which they began; ``ended`` is None for one that still stands.

        They follow from the numbers that are stored, with the bits that are stored. docs/alarms.md says in which cases
        they can differ from what the watch raised.

        Args:
            limits: other limits than those of the watch that wrote the run: :class:`attemper.AlarmLimits`, or a
                mapping of names.

        Raises:
            InputError: a limit is not one, or not a number.
        """
        verdict = self._verdict if limits is None else Verdict(self.ranks, limits)
        return list(verdict.judge().alarms)

    @property
    def judge(self) -> Judge:
        """The run judged by the limits of its watch: what stands, what is over, and what could not be judged."""
        return self._verdict.judge()

    # --- one step ---

    def reading_at(self, step: int, *, alarms: bool = True) -> tuple[Reading, tuple[str, ...]]:
        """What the watch showed at a step, as far as it was stored, and why alarms on history judge nothing yet.

        Raises:
            InputError: the step was not sampled; the message names the nearest that were.
        """
        steps = self.steps
        found = self._reading(_check_step(step, steps))
        if not alarms:
            return found, ()
        judge = self.judge if step == steps[-1] else Verdict(self.ranks, stop=step + 1).judge()
        return replace(found, alarms=judge.standing, untrained_heads=judge.held_back), tuple(judge.notes)

    @property
    def reading(self) -> Reading:
        """The last sample as a reading: what :func:`attemper.compare` takes of a run."""
        return self._reading(self._last_step)

    def _reading(self, step: int) -> Reading:
        with self.ranks.snapshot():
            skipped = [Skipped(one.name, one.reason) for one in self.coverage.skipped]
            return reading_of(self.ranks.sample(step), self.about, skipped)

    @property
    def _last_step(self) -> int:
        steps = self.steps
        if not len(steps):
            raise self._no_sample()
        return int(steps[-1])

    def _no_sample(self) -> InputError:
        why = clean(why_unmeasured(self.ranks))
        return InputError(f"{self._called} has no sample yet: nothing was measured. Why: {why}.")

    # --- for other programs ---

    def to_pandas(self) -> pandas.DataFrame:
        """A row for each step and head: step, site, layer, kind, mode, head, and every statistic.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return export.to_pandas(self.ranks)

    def to_parquet(self, path: str | os.PathLike[str]) -> Path:
        """Writes the rows of ``to_pandas`` as a Parquet file, a site at a time.

        Returns:
            Where the file is.

        Raises:
            MissingExtraError: pyarrow is not installed.
            InputError: no file can be written there.
        """
        export.to_parquet(self.ranks, path)
        return Path(path)

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        steps = self.steps
        where = f"steps {steps[0]} to {steps[-1]}" if len(steps) else "no sample yet"
        heads = sum(label.heads for label in self.sites)
        sites = f"{count(len(self.sites), 'site')}, {count(heads, 'head')}"
        return f"Run({self.name!r}: {count(len(steps), 'sample')}, {where}, {sites})"

    # --- what is asked for ---

    def _statistic(self, asked: str) -> str:
        name, known = quantity(asked), self.statistics
        if not known:
            raise self._no_sample()
        if name not in known:
            raise InputError(
                f"statistic {asked!r} is not in {self._called}. It has {', '.join(known)}.{did_you_mean(name, known)}"
            )
        return name

    def _labels(self, site: Site | None, mode: str | None) -> tuple[SiteLabel, ...]:
        """The sites that are meant: one if ``site`` is given."""
        known = {key: label for key, label in self.ranks.sites.items() if mode in (None, label.mode)}
        if mode is not None and not known:
            raise InputError(f"mode={mode!r}: {self._called} has no such site; modes are 'train' and 'eval'.")
        if site is None:
            return tuple(known.values())
        key = site.key if isinstance(site, SiteLabel) else site
        meant = [label for label in known.values() if key in (label.name, label.key)]
        if len(meant) == 1:
            return (meant[0],)
        if meant:
            ways = ", ".join(map(str, (label.key for label in meant)))
            raise InputError(f"site {site!r} was seen in several ways: {ways}. Name one of these, or say mode='train'.")
        names = tuple(dict.fromkeys(label.name for label in known.values()))
        has = first_of([*map(repr, names)], 3)
        raise InputError(f"site {site!r} is not in {self._called}. It has {has}.{did_you_mean(site, names)}")

    def _place(self, head: int, labels: Sequence[SiteLabel]) -> int:
        """Where a head stands among those of these sites."""
        first = min((label.first_head for label in labels), default=0)  # above 0 of one rank that has some of the heads
        most = max((label.heads for label in labels), default=0)
        if index_of(head) is None or not first <= head < first + most:
            where = f"{clean_name(labels[0].name)} has" if len(labels) == 1 else "the sites have at most"
            where = f"{where} {count(most, 'head')}"
            raise InputError(f"head must be a whole number from {first} to {first + most - 1}, got {head!r}: {where}.")
        return int(head) - first


def _stack(series: Sequence[Array], heads: int, steps: int) -> Array:
    """[steps, sites, heads] of each site's [steps, heads], padded with NaN. A site that lost heads keeps its most."""
    heads = max((heads, *(values.shape[1] for values in series)))
    if all(values.shape[1] == heads for values in series) and series:
        return np.stack(series, 1)
    found = np.full((steps, len(series), heads), np.nan, np.result_type(np.float32, *series))
    for place, values in enumerate(series):
        found[:, place, : values.shape[1]] = values
    return found


def _check_step(step: int, steps: Array) -> int:
    if index_of(step) is None:
        raise InputError(f"at(step) must be a whole number, got {step!r}.")
    if not len(steps):
        raise InputError(f"step {step} has no sample: the run has none yet.")
    place = int(np.searchsorted(steps, step))
    if place < len(steps) and steps[place] == step:
        return int(step)
    near = steps[max(place - 1, 0) : place + 1].tolist()
    raise InputError(
        f"step {step} has no sample. The nearest {'is' if len(near) == 1 else 'are'} {' and '.join(map(str, near))}."
    )


def _way_from(from_step: int, shadow: bool) -> str:
    """From which step on the model was read how."""
    if shadow:
        return f"from step {from_step:,} on the model ran compiled; its numbers come from uncompiled shadow passes"
    return f"from step {from_step:,} on the numbers come from the training passes themselves"
