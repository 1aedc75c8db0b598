"""``attemper.watch``: attention statistics while a model trains or runs, beside its own attention, on sampled steps."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, SupportsIndex

from torch import Tensor, nn

from attemper.backends.table import check_backend
from attemper.checks import MOST, index_of
from attemper.distributed.data_parallel import is_sharded, say_the_same
from attemper.distributed.merged_recorder import MergedRecorder
from attemper.distributed.reduction import reduction_of
from attemper.errors import InputError
from attemper.monitor.checked_model import NOT_RUN, check_model, device_of, provenance, unseen_normalizers, why_not_all
from attemper.monitor.collector import Collector
from attemper.monitor.first_passes import LATE_STEP, MOST_PASSES, FirstPasses
from attemper.monitor.hooks import (
    CompiledCall,
    Door,
    WrapperCall,
    call_of,
    is_running,
    note,
    quietly,
    weakly,
)
from attemper.monitor.model_state import ObstacleError
from attemper.monitor.options import NO_ALARMS, Schedule, WatchOptions
from attemper.monitor.recorder import UNSEEN, Recorder, about
from attemper.monitor.shadow import Shadow, compiled_modules, free_memory, is_out_of_memory, wrappers_of
from attemper.monitor.snapshot import SampleReadings
from attemper.monitor.tap_receiver import TapReceiver
from attemper.readings.labels import JOINED
from attemper.readings.limits import AlarmLimits
from attemper.readings.reading import FEWEST_KEYS, Alarm, Reading, SiteReading, Skipped
from attemper.results.scan import Scan
from attemper.sites import tap, tap_buffers
from attemper.sites import transformers as registry
from attemper.sites.names import COMPILED, Wrapper, class_name, compiled_parts, is_compiled, names_of, unwrap
from attemper.sites.observation import in_shadow, observing
from attemper.sites.padding import CallContext, enter_compiled, tracking
from attemper.sites.ways import reading
from attemper.store.store import Store
from attemper.text import clean, count, date_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from attemper.readings.history import History, Trend
    from attemper.results.run import Run

logger = logging.getLogger("attemper")

UNHELD = (
    "attemper: a watch of %s has ended before a pass: nobody holds it any more. Keep it as long as it is to measure: "
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
    """Watches every attention of ``model`` while you train or run it, without changing a bit of what it computes.

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
            (``layer#2``); None for all.
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


class Watch(TapReceiver):
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
        self.model, self.every, self.rows = model, options.every, options.rows
        device = device_of(model)
        check_backend(options.backend, None if device is None else device.type)
        self.title = class_name(unwrap(model))
        self._failures = 0
        self.passes = self.steps = self.sampled = 0
        self._due, self._first = False, None
        """Whether a sample has ended that is not recorded yet."""
        self._stepping, self._fresh = options.reduce is not None, False
        self._told = options.limits is NO_ALARMS
        """Whether it was told what the first step does not show. Nobody asked a watch that another part keeps."""
        self._date: float | None = None
        """When the latest sample began; None where only taps in compiled code were seen."""
        self._tapped = False
        """Whether taps may have run on their device in this step."""
        self._context = CallContext()
        self._collector = Collector(model, self._context, options.scope, quiet=weakly(self.note_failure))
        self._reduction = reduction_of(model, options.reduce, options.fewest_keys)
        kept, ranks = (self._collector, options, about(model, options), start), self._reduction
        self._recorder = Recorder(*kept) if ranks is None else MergedRecorder(*kept, ranks)
        self._schedule = Schedule(options.every, self._recorder.first_step, self._recorder.last_step, start)
        self._sampled_number = self._schedule.number
        """Of the step that was sampled last."""
        self._first = FirstPasses(self._collector, self._recorder, self._sampled_number)
        self._pass: ExitStack | None = None
        self._raising: BaseException | None = None
        self._call: FrameType | None = None
        self._inside = False
        self._nested = 0
        """Calls of the model inside its own forward."""
        self._wrappers: list[nn.Module] = []
        """What torch.compile has made of the model, where it is called in its place."""
        self._compiled, self._always = any(map(is_compiled, model.modules())), options.observe == "shadow"
        self._parts: dict[nn.Module, Shadow] = {}
        """The compiled parts of a model of which only a method is called: each runs beside itself."""
        self._most = options.shadow_batch
        whole_step = isinstance(model, Wrapper) and is_compiled(unwrap(model))  # compiled, and nothing to run beside it
        shadows = options.observe in ("auto", "shadow") and not whole_step
        self._shadow = Shadow(model, self._collector, self._most) if shadows else None
        self._agreed: bool | None = None
        """Whether all ranks that a shadow pass waits for run it, too."""
        self._shadowed: Shadow | None = None
        """What has read the pass that runs beside itself."""
        unseen = compiled_parts(names_of(model))
        shown = () if self._shadow is None else (COMPILED,)
        self._collector.refuse({name: why for name, why in unseen.items() if why not in shown})
        self._recorder.at_end(self._hand_over, self.close)
        self._attach()

    def _attach(self) -> None:
        """Hooks on the model itself only: what a sampled pass needs is put in place when it begins. They hold no watch:
        one that nobody else holds ends.
        """
        tap.remember(self.model)
        self._doors = self._open.enter_context(ExitStack())
        self._open_doors(self.model, self._doors)
        if self._shadow is not None:
            self._open.callback(WrapperCall(self.model, self._learn_of).remove)
        self._find_compiled()
        for taps in (tap, tap_buffers):
            taps.subscribe(self)
        # The first step is sampled, whatever decides on those that follow.
        tap_buffers.raise_flag(self, self._start())

    def _open_doors(self, module: nn.Module, stack: ExitStack) -> None:
        before = module.register_forward_pre_hook(Door(self._enter), with_kwargs=True)
        after = module.register_forward_hook(Door(self._leave), always_call=True)
        stack.callback(before.remove)
        stack.callback(after.remove)

    def _find_compiled(self) -> bool:
        """Whether the model is compiled, and called, in a way that this has not known: it watches such calls, too."""
        if self._shadow is None:
            return False
        known = {*self._wrappers, *self.model.modules()}
        found = [wrapper for wrapper in wrappers_of(self.model) if wrapper not in known]
        for wrapper in found:
            self._add_wrapper(wrapper)
        call = self.model._compiled_call_impl
        if call is None or isinstance(call, CompiledCall):
            return bool(found)
        self._doors.close()  # in there they would be traced
        self._open.callback(CompiledCall(self.model, Door(self._enter), Door(self._leave)).remove)
        self._compiled = True
        return True

    def _add_wrapper(self, wrapper: nn.Module) -> None:
        self._wrappers.append(wrapper)
        self._compiled = True
        self._open_doors(wrapper, self._open)

    @quietly
    def _learn_of(self, wrapper: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A compiled wrapper that was made of the model since is being called."""
        if wrapper in self._wrappers:
            return
        self._add_wrapper(wrapper)
        # Its doors open with the next call: torch has looked for hooks already.
        fields, leave = vars(wrapper), Door(self._leave)
        forward = fields["_forward"]

        def once(*given: Any, **named: Any) -> Any:
            fields["_forward"] = forward
            try:
                return forward(*given, **named)
            finally:
                leave(wrapper)

        fields["_forward"] = once
        self._enter(wrapper, args, kwargs)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        self._told = self._told or error is not None  # a pass that failed shows nothing
        self.close()

    def close(self) -> None:
        """Takes every hook off the model, and ends the store. What was read stays readable."""
        self._closed = True
        warned: Warning | None = None
        for part in (
            partial(Watch._end_pass, self, commit=False),
            self._open.close,
            partial(tap.unsubscribe, self),
            partial(tap_buffers.unsubscribe, self),
            self._record,
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
            if not self._told and not self._collector.seen_sites and self._find_compiled():
                self._schedule.again()
            else:
                self._tell(due=self._schedule.sampled and (self.passes > 0 or self.steps > 1))
        except (InputError, Warning):
            raise
        except Exception as error:  # whatever it is, it must not end somebody's training run
            note(self, error)

    def _tell(self, *, due: bool, stored: bool = False) -> None:
        """Says once what the first sampled step does not show (``due``: also if that is all), and that a run goes
        on without numbers of the loop. ``stored``: only of a run that outlives the process.
        """
        if stored and not self._recorder.is_stored:
            return
        for said in (self._unseen(due), quietly(lambda _: self._recorder.note_no_numbers(self._schedule))(self)):
            if said is not None:
                warnings.warn(f"attemper: {said}", stacklevel=3)

    @quietly
    def _unseen(self, due: bool) -> str | None:
        seen = self._collector.seen_sites
        if self._told or not (seen or due):
            return None
        self._told = True
        skipped = self._recorder.unread(seen)
        if not seen:
            why = self._why_nothing(self._collector.skips(seen))
            self._recorder.note_unmeasured(why, "train" if self.model.training else "eval")
            return f"nothing was measured in the first step. {why}"
        # Which modules hold the taps of a compiled model is not known. What calls are one site was measured.
        hidden = UNSEEN if self._sees_taps_alone else None
        skipped = {name: why for name, why in skipped.items() if why != hidden and not name.endswith(JOINED)}
        return why_not_all(self.model, skipped) if skipped else None

    def _why_nothing(self, skipped: tuple[Skipped, ...]) -> str:
        ran = self.passes if self._compiled or self._always else 0
        if self.sampled or self._tapped or ran or (self._sees_taps_alone and self.steps):
            return self._collector.why_nothing(skipped, compiled=self._sees_taps_alone)
        return NOT_RUN

    @property
    def _sees_taps_alone(self) -> bool:
        return self._compiled and (self._shadow is None or self._shadow.only_taps)

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
    def end_pass(self) -> None:
        """Tells that no forward pass is running: needed only between the passes of one step of a model that is called
        inside a compiled wrapper, where no hook of ours can see them begin.
        """
        if self._pass is None:
            self._context.reset()

    def _drop_interrupted(self) -> None:
        """Ends a pass that was interrupted where no hook runs (KeyboardInterrupt): what it staged is not read."""
        if (self._pass is not None or self._shadowed) and not is_running(self._call):
            self._end_shadow(commit=False)
            self._end_pass(commit=False)

    @property
    def measures(self) -> bool:
        """Whether a pass of the model is being measured, which sees taps itself."""
        return self._pass is not None or in_shadow.get() is not None

    def _begin_step(self, ended: int) -> None:
        """Begins a step, or a pass where passes are the steps: what comes is another sample than that of ``ended``."""
        if self._tapped and not self._fresh:
            self.sampled += not self._holding or self._schedule.sampled
        if self._tapped or self._fresh:
            self._sampled_number, self._due = ended, True
        self._switch_taps()
        self._tapped = self._fresh = False
        self._collector.period += 1

    def begin_sample(self) -> None:
        """Begins a new sample, unless one has begun in this step."""
        if not self._fresh:
            if self._due:
                self._record()
            self._collector.commit()
            self._collector.forget()
            # By the place in the run, so that a run that was resumed samples the rows that it would have sampled.
            self._collector.generator.manual_seed(self._schedule.place)
            self._fresh, self._date = True, time.time()
            self.sampled += not self._holding or self._schedule.sampling
            self._sampled_number = self._schedule.number

    @quietly
    def end_sample(self) -> None:
        """Ends the sample that has begun, if any, between two steps: it is of the step that ended last."""
        self._drop_interrupted()
        self._collector.commit()
        tap_buffers.deliver()
        self._begin_step(self._schedule.number - 1)
        self._add_due(kept=True)
        self._recorder.settle()

    @quietly
    def _record(self) -> None:
        """Takes the sample that has ended. A pass is taken when the next one begins: both may be of one step."""
        self._add_due(kept=self._keeps)
        self._recorder.settle()

    @property
    def _keeps(self) -> bool:
        """Whether what has ended is kept: what ranks merge is kept by ``step``, on all of them."""
        return self._schedule.kept and self._reduction is None

    def _add_due(self, *, kept: bool) -> None:
        """A signal that ends the process in between adds it once more, which changes nothing."""
        first = self._first
        try:
            if first is not None and self._due and (self._holding or first):
                first.hold(self._sampled_number, self._collector.period - 1, self._schedule)
            if first is not None and self._holding:
                self._sampled_number = first.shown
            elif first:
                first.join()
                self._due, self.sampled = True, 1
            if self._due and kept and not self._holding:
                self._recorder.add(self._sampled_number)
        finally:
            self._due = False
            self._first = first if self._holding else None

    @quietly
    def _keep_passes(self) -> None:
        """Makes passes the steps: no step has come in time."""
        if self._first is not None:
            self._first.give()
            self._first = None
            self._recorder.settle()

    @quietly
    def _hand_over(self, until: float) -> None:
        """Before the process ends: keeps what has ended and is not recorded, until ``until`` (monotonic)."""
        self._add_due(kept=self._keeps)
        if self._first is not None:
            self._first.give()
        self._recorder.hand_over(until)

    @quietly
    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # nn.DataParallel runs copies of the model that share its hooks, each in a thread of its own.
        if tap.in_backward() or not (module is self.model or module in self._wrappers):
            return
        # What is captured into a CUDA graph is not a pass: taps inside are seen when it is replayed.
        if tap_buffers.is_capturing():
            self._inside = True
            return
        self._drop_interrupted()
        if self._pass is not None or self._shadowed:
            self._nested += 1
            return
        if self._due:
            self._record()
        if self._holding and self.passes >= MOST_PASSES:
            self._keep_passes()
            self._tell(due=True)
        self._inside, self._raising = True, sys.exc_info()[1]
        if module is not self.model:
            self._doors.close()  # no compiler is to find them
        if tap_buffers.is_raised(self) != self.sampling:
            self._switch_taps()
        if self.sampling and self._shadow is not None:
            self._compiled = self._compiled or any(map(is_compiled, self.model.modules()))
            if self._compiled or self._always:
                self._run_shadow(module, args, kwargs)
        if self._compiled or (self.sampling and not self._always):
            self._begin_pass(args, kwargs)

    @quietly
    def _run_shadow(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Reads the pass that begins beside itself, before it runs."""
        assert self._shadow is not None
        if isinstance(self.model, Wrapper):  # it runs somebody's step, which has to run once
            self._open_parts()
        elif not self._shadow.only_taps:
            self._read_beside(self._shadow, module, args, kwargs)

    def _open_parts(self) -> None:
        """Puts a door before each outermost compiled part that has none."""
        for part in compiled_modules(self.model):
            if part not in self._parts:
                self._parts[part] = Shadow(part, self._collector, self._most)
                if part._compiled_call_impl is None:
                    self._open.callback(part.register_forward_pre_hook(Door(self._enter_part), with_kwargs=True).remove)
                else:
                    self._open.callback(CompiledCall(part, Door(self._enter_part)).remove)

    @quietly
    def _enter_part(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A compiled part of what runs is called."""
        if self.sampling and self._inside and not (self._shadowed or tap.in_backward()):
            self._read_beside(self._parts[part], part, args, kwargs)
            self._end_shadow(commit=True)

    def _read_beside(self, shadow: Shadow, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        spent = None
        try:
            self._agree()
            shadow.read(args, kwargs, self.begin_sample)
            self._shadowed, self._call, self._collector.shadowed = shadow, call_of(module), not shadow.only_taps
        except ObstacleError as error:
            self._leave_out(str(error))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            spent = f"a shadow pass ran out of memory; {shadow.shrink(args, kwargs)}"
        if spent is not None:  # outside: the error holds what the pass had made
            free_memory(self.model)
            self.note_failure(self.title, MemoryError(spent))

    def _agree(self) -> None:
        """Before the first shadow pass of a model whose forward waits for other ranks.

        Raises:
            ObstacleError: not all of them will run the same passes.
        """
        if self._agreed is None:
            word = f"every={self.every}, step {self._schedule.place}"
            self._agreed = not is_sharded(self.model) or say_the_same("shadow passes", word)
        if not self._agreed:
            raise ObstacleError(
                "its forward gathers weights of other ranks, and not all ranks watch it on the same steps: open the "
                "watch on every rank, with the same every= and step()"
            )

    def _leave_out(self, reason: str) -> None:
        """Tells once why a sample has no shadow pass."""
        reason = f"it cannot run a second time beside itself: {reason}"
        if reason not in self._collector.refused:
            self._collector.refuse({"": reason})
            if self._told:
                warnings.warn(clean(f"attemper: {self.title} was left out of a sample: {reason}."), stacklevel=2)

    def _begin_pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Puts in place what a sampled pass needs; taken away again if any of it fails."""
        if self._compiled:
            # No hook inside a compiled model tells masks, or counts the calls of a pass.
            enter_compiled(self._context, unwrap(self.model), args, kwargs)
            tokens = self._context.tokens.own
            if tokens is not None and self.sampling and tap_buffers.has_graphs(tokens.device):
                self._collector.tapped.note_padding(tokens, self._collector.period)
            return
        self.begin_sample()
        self._collector.begin()
        with ExitStack() as stack:
            models = registry.pretrained_models(self.model)
            if self._collector.replace:
                self._collector.refuse(registry.outside_registry(self.model))
            # A wrapper's own arguments have no names: the masks of the model inside it count.
            own = models or [unwrap(self.model)]
            stack.enter_context(tracking(self._context, self.model, own, (args, kwargs)))
            stack.enter_context(observing(self._collector))
            stack.enter_context(reading(self.model))
            self._collector.shadowed = False
            self._call = call_of(self.model)
            self._pass = stack.pop_all()

    @quietly
    def _leave(self, module: nn.Module, *_: Any) -> None:
        if module is not self.model and module not in self._wrappers:
            return
        if tap_buffers.is_capturing():
            self._inside = False
            return
        if self._nested:
            self._nested -= 1
            return
        if module is not self.model and self.model._compiled_call_impl is None:
            self._open_doors(self.model, self._doors)
        ended = self._pass is not None
        raised = sys.exc_info()[1]
        went_through = raised is None or raised is self._raising
        self._end_shadow(commit=went_through)
        self._end_pass(commit=went_through)
        if self._collector.calls and went_through:  # of taps in a compiled model
            self._collector.commit()
        if self._inside or not tap.in_backward():
            self._inside = False
            tap_buffers.deliver()
            self.passes += 1
            if not self._stepping:
                self._begin_step(self._schedule.end(None))
            if self._holding:
                self._add_due(kept=False)
        if self._compiled and not ended:
            self._context.reset()

    def _end_shadow(self, *, commit: bool) -> None:
        if (shadow := self._shadowed) is not None:
            self._shadowed, self._call, self._nested = None, None, 0
            (shadow.commit if commit else self._collector.begin)()

    def _end_pass(self, *, commit: bool) -> None:
        if self._pass is None:
            return
        stack, self._pass, self._call, self._nested = self._pass, None, None, 0
        try:
            stack.close()
            (self._collector.commit if commit else self._collector.begin)()
        finally:
            self._collector.context.reset()

    @property
    def failures(self) -> int:
        """How often something of ours failed: calls that could not be measured, and samples that the store lost."""
        return self._failures + self._recorder.dropped

    def note_failure(self, where: str, error: Exception) -> None:
        """Counts a failure of ours; the first one is told, none reaches the training step."""
        self._failures += 1
        self._collector.skipped[where] = str(error)
        if self._failures == 1:
            warnings.warn(clean(f"attemper: {where} could not be measured: {error}. Training goes on."), stacklevel=2)

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
        """What the step that is running has shown so far; nothing where no attention of it was sampled."""
        found = self._readings()
        return found.sites if found.period == self._collector.period else ()

    @property
    def run(self) -> Run:
        """Every sample so far, as ``attemper.open`` gives them."""
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
        """The alarms that stand now, the worst first, each with the step at which it began (``since``)."""
        return self.table().alarms

    def to_pandas(self) -> Any:
        """The latest sample, one row per head."""
        return self.table().to_pandas()

    def __repr__(self) -> str:
        held = f", {count(len(self._first), 'pass', 'passes')} held until the first step" if self._first else ""
        return f"Watch({self.title!r}: {self._recorder.summary(self.sampled)}{held})"
