"""``attemper.watch``: attention statistics while a model trains or runs, beside its own attention, on sampled steps."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

from torch import Tensor, nn

from attemper.backends.table import check_backend
from attemper.checks import MOST, index_of
from attemper.distributed.data_parallel import is_sharded, words_of_ranks
from attemper.distributed.merged_recorder import MergedRecorder
from attemper.distributed.reduction import reduction_of
from attemper.errors import InputError
from attemper.monitor.checked_model import check_model, device_of, provenance, unseen_normalizers
from attemper.monitor.hooks import RefusedError, call_of, note, quietly
from attemper.monitor.options import WatchOptions
from attemper.monitor.passes import Passes
from attemper.monitor.recorder import Recorder
from attemper.monitor.sampled_steps import LATE_STEP
from attemper.monitor.shadow import lacking
from attemper.monitor.snapshot import SampleReadings
from attemper.readings.limits import AlarmLimits
from attemper.readings.reading import FEWEST_KEYS, Alarm, Reading, SiteReading
from attemper.results.scan import Scan
from attemper.sites import tap_buffers
from attemper.sites.names import missing_question
from attemper.store.store import Store
from attemper.text import count, date_of, first_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from attemper.readings.history import History, Trend
    from attemper.results.run import Run

logger = logging.getLogger("attemper")

UNHELD = (
    "attemper: a watch of %s has ended before a pass, because nothing refers to it. Keep a reference: "
    "watch = attemper.watch(...)."
)


def watch(
    model: nn.Module,
    *,
    every: int = 1,
    rows: int | None = None,
    stats: str | Iterable[str] = "all",
    sites: Iterable[str] | None = None,
    store: Store | str | os.PathLike[str] | None = None,
    observe: str = "auto",
    backend: str = "auto",
    limits: AlarmLimits | Mapping[str, Any] | None = None,
    fewest_keys: int = FEWEST_KEYS,
    on_alarm: Callable[[Alarm], object] | None = None,
    reduce: str | ProcessGroup | DeviceMesh | None = None,
    shadow_batch: int | None = None,
) -> Watch:
    """Watches every attention of ``model`` while you train or run it. It changes no bit of what the
    model computes.

    On sampled steps the statistics of each attention call are computed beside it, from its queries and keys; on
    other steps nothing happens. Outputs, gradients and random numbers are bit-identical with and without (one
    exception: nn.TransformerEncoderLayer leaves its fast path while it is measured, within 2e-6). It holds no graph
    and does not wait for the device. A failure of ours never reaches the training step: it is reported once, and
    counted in ``.failures``. Keep the watch in a variable: it ends with ``close()``, and when nobody holds it any more.

    ::

        with attemper.watch(model, every=50, rows=128, store="runs/a") as watch:
            for batch in loader:
                ...  # your own step
                watch.step()
        print(watch.table())
        watch.history("entropy", site="layers.3.attention", head=2).values

    Args:
        model: any module, also one that is compiled, as a whole or in part, before or after this call.
        every: sample one step in so many, the first one included. A step is what ends with ``.step()``; without such a
            call each forward pass of ``model`` is one. Which it is, the first ``.step()`` tells: the passes before it,
            up to 16, are all measured and held back from store and alarms, and then become the first step. Otherwise
            they become steps of their own: with the 17th pass, or when the watch is closed.
        rows: measure only this many query rows of each sequence; ``max_logit`` is then a lower bound.
        stats: as in :func:`attemper.scan`, but ``span_mass``: a watch sees calls of the model, whose texts change from
            step to step, and not the batch that says where their spans are. Scan a few texts at checkpoints.
        sites: names of modules to watch, with all below them and all their calls, or of single calls of a pass
            (``layer#2``), or of taps; None for all. A tap is known once it runs, so a name that matches nothing is no
            error: the first step warns of it, and ``.skipped`` lists it.
        store: the folder of a run, or ``attemper.Store(...)``: every sample is kept there, of every head, and
            ``attemper.open`` reads it, also meanwhile. A run that is there already goes on; an open watch of this
            process that writes it is closed first. None keeps a history in memory, thinned with age where it would
            take more than 64 MB.
        observe: "auto" is "beside" the model's own attention where it runs eagerly, and where it runs compiled
            "shadow": before a sampled pass the same module runs once more as it was written, without gradients, and is
            read there; random numbers, buffers and attributes are put back. "beside" alone sees only taps
            (``attemper.tap``) in compiled code. "replace": models of transformers' registry attend here on sampled
            passes, output and statistics in one pass; with attention dropout, beside.
        backend: as in :func:`attemper.attention`.
        limits: of alarms: :class:`attemper.AlarmLimits`, or a mapping of its names. A watch has a history, and so
            alarms on change: growth of logits, fall of entropy against the first samples, drift, dead heads. Each
            sample is judged as it ends.
        fewest_keys: as in :func:`attemper.scan`.
        on_alarm: called in the training thread with each alarm that begins, if it is a warning or worse. Such alarms
            also go to ``logging``, as warnings of the logger "attemper".
        reduce: in training on many ranks, "data" makes the samples of data-parallel ranks one, by two collectives after
            each sampled step; a process group or a DeviceMesh names these ranks. All of them watch with the same
            options and call ``.step()``; the first one writes and judges. None reads this rank alone.
        shadow_batch: how many sequences of a batch run in a shadow pass; None for all. Where memory runs out, the pass
            is given up, and the next ones run half as many.

    Raises:
        InputError: an argument has no meaning here, or the data-parallel ranks cannot be told.
        BackendError: the named backend is missing.
    """
    return Watch(**locals())


class Watch(Passes):
    """A running watch; see :func:`watch`. A context manager; ``close`` ends it, once, whatever happens."""

    def __init__(self, model: nn.Module, *, start: int | None = None, **given: Any) -> None:
        """
        Args:
            start: the number of the step that begins, where the loop knows it before the step ends.
            given: the options of :func:`watch`.
        """
        self._open, self._closed = ExitStack(), False
        options = WatchOptions(**given)
        check_model("watch", model)
        device = device_of(model)
        check_backend(options.backend, None if device is None else device.type)
        ranks = reduction_of(model, options.reduce, options.fewest_keys)
        recorder = Recorder if ranks is None else partial(MergedRecorder, reduction=ranks)
        super().__init__(model, options, start, recorder)
        self._recorder.at_end(self._hand_over, self.close)
        self._attach()
        tap_buffers.subscribe(self)
        # The first step is sampled, whatever decides on those that follow.
        tap_buffers.raise_flag(self, self._start())

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if error is not None:  # a pass that failed shows nothing
            self._told, self._updates = True, None
        self.close()

    def close(self) -> None:
        """Removes every hook from the model and ends the store. Samples stay readable."""
        self._closed = True
        warned: Warning | None = None
        for part in (
            partial(self._end_pass, commit=False),
            self._open.close,
            partial(tap_buffers.unsubscribe, self),
            self._record,
            partial(self._look_for_updates, due=True),
            self._keep_passes,
            partial(self._tell, due=self.passes > 0, stored=True),
            self._recorder.close,
        ):
            try:
                part()
            except Warning as warning:  # a filter of the user's makes errors of warnings
                warned = warning
            except Exception as error:  # the others have their turn
                note(self, error)
        if warned is not None:
            raise warned

    def __del__(self) -> None:
        if not hasattr(self, "_recorder") or self._closed:
            return
        with suppress(Exception):  # in the middle of somebody's code, or as Python ends
            self._drop_interrupted()
            if call_of(self.model) is None:  # else torch goes through these hooks now
                self._open.close()
        if not (self.passes or self.steps):
            logger.warning(UNHELD, self.title)
        held = self._first.waiting if self._first is not None else 0
        self._recorder.forget(held + int(self._due and self._keeps))

    def step(
        self,
        step: SupportsIndex | None = None,
        *,
        loss: float | Tensor | None = None,
        grad_norm: float | Tensor | None = None,
        **numbers: float | Tensor | None,
    ) -> None:
        """Ends a training step: all forward passes since the last one, up to 16 where it is the first. The next
        ``every``-th step is sampled. Without this call, forward passes are the steps.

        Args:
            step: the loop's own number of the step that ends; None to go on counting, from 0 or after the last step of
                the store. A number that is not above the last one replaces the history from there on. Where training
                goes on from a checkpoint, call it once before the loop with the number of the checkpoint's last step.
            loss: of this step, a number or a tensor of one element on any device. It is detached, and not waited for.
                It is kept of every step, not only of sampled ones: ``watch.history("loss")``.
            grad_norm: the norm of its gradient, likewise.
            numbers: others by names of your choice, at most 32 names in a run; None where a step has none.

        Raises:
            InputError: ``step`` is not a whole number; a number of the step is none, or has the name of a statistic; or
                after the first sampled step: the ranks that ``reduce=`` is to merge do not hold the same part of it.
        """
        number = None if step is None else index_of(step)
        if step is not None:
            if number is None or abs(number) > MOST:
                raise InputError(
                    f"watch.step(step) must be an int of 64 bits, the loop's own number of a step, got {step!r:.60}."
                    + ("" if number is not None else " For the loss: watch.step(loss=loss).")
                )
            step = number
        given = self._recorder.scalars.check({"loss": loss, "grad_norm": grad_norm, **numbers})
        if not self._stepping and self._first is None:
            warnings.warn(LATE_STEP.format(self.passes), stacklevel=2)
        try:
            period = self._collector.period
            self._end_step(number)
            if isinstance(self._recorder, MergedRecorder) and self._schedule.kept:
                here = self._schedule.number - 1, period, self._failures, self.note_failure
                given = self._recorder.add_merged(*here, given)
                self._record()
            self._recorder.note(self._schedule.number - 1, given)
            known = len(self._wrappers)
            if not self._told and not self._collector.seen_sites and self._find_compiled():
                self._schedule.again()
                if (name := next(filter(None, map(missing_question, self._wrappers[known:])), None)) is not None:
                    seen = "The first step was not seen; the second is sampled instead."
                    warnings.warn(f"attemper: {lacking(name)}. {seen}", stacklevel=2)
            else:
                self._tell(due=self._schedule.sampled and (self.passes > 0 or self.steps > 1))
        except (InputError, Warning):
            raise
        except Exception as error:  # whatever it is, it must not end somebody's training run
            note(self, error)

    @property
    def _is_sharded(self) -> bool:
        return is_sharded(self.model)

    def _is_shared(self) -> bool:
        if not self._is_sharded:
            return True
        words = words_of_ranks("shadow passes", self._schedule.plan) or {}
        if len(words) > 1:
            said = "; ".join(f"rank {first_of(list(map(str, ranks)), 8)}: {plan}" for plan, ranks in words.items())
            raise RefusedError(
                f"watch: ranks do not sample the same steps of {self.title} ({said}), and a shadow pass of a sharded "
                "model waits for all of them. Give every rank the same every=, and the same run if one goes on."
            )
        return bool(words)

    @quietly
    def _end_step(self, step: int | None) -> None:
        told = not self._stepping and self.passes > 0  # as a pass
        if not self._stepping:
            # The passes so far were of the step that ends.
            self._schedule.restart()
        number = self._schedule.end(step)
        if told:
            self._sampled_number = number
        self._stepping = True
        self.steps += 1
        self._drop_interrupted()
        self._collector.commit()
        tap_buffers.deliver()
        self._tapped = self._tapped and not told
        self._begin_step(number)
        self.end_pass()
        self._record()

    @quietly
    def end_sample(self) -> None:
        """Ends a sample that runs between two steps. It counts for the last step."""
        self._drop_interrupted()
        self._collector.commit()
        tap_buffers.deliver()
        self._begin_step(self._schedule.number - 1)
        self._add_due(kept=True)
        self._recorder.settle()

    def table(self) -> Scan:
        """The latest sample, as a table: ``.sites``, ``.skipped``, ``.alarms``, ``.to_json()``, ``.to_pandas()``.

        Raises:
            InputError: nothing was sampled, or no attention was seen.
        """
        found = self._readings()
        if self._sees_taps_alone:
            found = replace(found, skipped=(*found.skipped, *unseen_normalizers(self.model, found.sites)))
        if not found.sites:
            raise InputError(self._why_nothing(found.skipped))
        judge = self._recorder.judge_now(self._sampled_number, apart=self._holding)
        reading = Reading(
            self.title,
            found.tokens,
            found.backend,
            found.sites,
            found.skipped,
            judge.standing,
            sampled_rows=self.rows,
            fewest_keys=self._collector.scope.fewest_keys,
            untrained_heads=judge.held_back,
            **provenance(self.model, None if self._date is None else date_of(self._date)),
        )
        return Scan(reading, dict(found.last), judge.notes)

    def _readings(self) -> SampleReadings:
        """The latest sample with what the passes so far have shown. Waits for the device."""
        self._drop_interrupted()
        tap_buffers.deliver()
        self._collector.commit()
        return self._recorder.readings

    @property
    def current(self) -> tuple[SiteReading, ...]:
        """The sample of the running step so far; empty if it is not sampled."""
        found = self._readings()
        return found.sites if found.period == self._collector.period else ()

    @property
    def run(self) -> Run:
        """Every sample so far, as a run that ``attemper.open`` returns."""
        self._record()
        if self._first is not None:
            self._first.give()
        return self._recorder.run

    def history(self, statistic: str, site: Any = None, head: int | None = None, **options: Any) -> History:
        """A statistic at every sampled step, or the loss at every step; see ``Run.history``."""
        return self.run.history(statistic, site, head, **options)

    def mean(self, statistic: str, site: Any = None, head: int | None = None, **options: Any) -> Any:
        """The mean of a statistic over the sampled steps; see ``Run.mean``."""
        return self.run.mean(statistic, site, head, **options)

    def std(self, statistic: str, site: Any = None, head: int | None = None, **options: Any) -> Any:
        """Its standard deviation over the sampled steps; see ``Run.std``."""
        return self.run.std(statistic, site, head, **options)

    def trend(self, statistic: str, site: Any = None, head: int | None = None, **options: Any) -> Trend:
        """Its slope per 1,000 steps with a 95% interval; see ``Run.trend``."""
        return self.run.trend(statistic, site, head, **options)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Writes the page of the run; see ``Run.to_html``.

        If this watch took the last sample, the page has its histograms and its entropy by visible keys, which no store
        keeps; where a run goes on and has no new sample yet, it has not.
        """
        return self.run.to_html(path, last=self.table().reading if self._readings().sites else None)

    def alarms(self) -> tuple[Alarm, ...]:
        """The current alarms, worst first, each with its first step (``since``)."""
        return self.table().alarms

    def to_pandas(self) -> Any:
        """The latest sample, one row per head."""
        return self.table().to_pandas()

    def __repr__(self) -> str:
        held = f", {count(len(self._first), 'pass', 'passes')} held until the first step" if self._first else ""
        return f"Watch({self.title!r}: {self._recorder.summary(self.sampled)}{held})"
