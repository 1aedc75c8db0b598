"""The forward passes of a watched model: where a watch stands before them, also before compiled ones, and how they are
read, as they run or beside themselves.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import ExitStack
from types import FrameType
from typing import Any

from torch import nn

from attemper.monitor.checked_model import NOT_RUN, why_not_all
from attemper.monitor.hooks import CompiledCall, Door, WrapperCall, call_of, is_running, quietly
from attemper.monitor.model_state import ObstacleError
from attemper.monitor.options import NO_ALARMS, WatchOptions
from attemper.monitor.recorder import UNSEEN
from attemper.monitor.sampled_steps import MOST_PASSES, NO_STEP, SampledSteps, Updates
from attemper.monitor.shadow import ShadowPasses, lacking, wrappers_of
from attemper.readings.labels import JOINED
from attemper.readings.reading import Skipped
from attemper.sites import tap, tap_buffers
from attemper.sites import transformers as registry
from attemper.sites.entry_points import reading
from attemper.sites.names import (
    COMPILED,
    Wrapper,
    compiled_call,
    compiled_parts,
    is_compiled,
    missing_door,
    names_of,
    unwrap,
)
from attemper.sites.observation import in_shadow, observing
from attemper.sites.padding import enter_compiled, tracking
from attemper.text import clean


class Passes(SampledSteps):
    """The part of a watch that sees passes begin and end."""

    _open: ExitStack
    """What is undone when the watch ends."""
    _closed: bool

    def __init__(self, model: nn.Module, options: WatchOptions, *given: Any) -> None:
        super().__init__(model, options, *given)
        self._told = options.limits is NO_ALARMS
        """Whether it was told what the first step does not show. Nobody asked a watch that another part keeps."""
        self._updates = None if options.limits is NO_ALARMS else Updates(model)
        """What tells a training whose steps are not."""
        self._pass: ExitStack | None = None
        self._raising: BaseException | None = None
        self._call: FrameType | None = None
        self._inside = False
        self._nested = 0
        """Calls of the model inside its own forward."""
        self._left_out: str | None = None
        """Why the latest sample without a shadow pass has none."""
        self._wrappers: list[nn.Module] = []
        """What torch.compile has made of the model, where it is called in its place."""
        self._compiled, self._always = any(map(is_compiled, model.modules())), options.observe == "shadow"
        whole_step = isinstance(model, Wrapper) and is_compiled(unwrap(model))  # compiled, and nothing to run beside it
        shadows = options.observe in ("auto", "shadow") and not whole_step
        self._shadows = ShadowPasses(model, self._collector, options.shadow_batch) if shadows else None
        unseen = compiled_parts(names_of(model))
        shown = () if self._shadows is None else (COMPILED,)
        self._collector.refuse({name: why for name, why in unseen.items() if why not in shown})

    def _attach(self) -> None:
        """Hooks on the model itself only: what a sampled pass needs is put in place when it begins. They hold no watch:
        one that nobody else holds ends.
        """
        tap.remember(self.model)
        self._doors = self._open.enter_context(ExitStack())
        self._open_doors(self.model, self._doors)
        if self._shadows is not None:
            self._open.callback(WrapperCall(self.model, self._learn_of).remove)
        self._find_compiled()

    def _open_doors(self, module: nn.Module, stack: ExitStack) -> None:
        before = module.register_forward_pre_hook(Door(self._enter), with_kwargs=True)
        after = module.register_forward_hook(Door(self._leave), always_call=True)
        stack.callback(before.remove)
        stack.callback(after.remove)

    def _find_compiled(self) -> bool:
        """Whether the model is compiled, and called, in a way that this has not known: it watches such calls, too."""
        if self._shadows is None:
            return False
        known = {*self._wrappers, *self.model.modules()}
        found = [wrapper for wrapper in wrappers_of(self.model) if wrapper not in known]
        for wrapper in found:
            self._add_wrapper(wrapper)
        call = compiled_call(self.model)
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
        if wrapper in self._wrappers or "_forward" not in vars(wrapper):  # where torch renames it, ``step`` finds it
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
        if self._reads:
            self._nested += 1
            return
        if self._due:
            self._record()
        if self._holding and self.passes >= MOST_PASSES:
            self._keep_passes()
            self._tell(due=True)
        self._look_for_updates(due=not self._holding)
        self._inside, self._raising = True, sys.exc_info()[1]
        if module is not self.model:
            self._doors.close()  # no compiler is to find them
        if tap_buffers.is_raised(self) != self.sampling:
            self._switch_taps()
        if self.sampling and self._shadows is not None:
            self._compiled = self._compiled or any(map(is_compiled, self.model.modules()))
            if self._compiled or self._always:
                self._run_shadow(module, args, kwargs)
        if self._compiled or (self.sampling and not self._always):
            self._begin_pass(args, kwargs)

    @quietly
    def _look_for_updates(self, due: bool) -> None:
        """Says once what to write where a model is trained and no step is told. Not before it is ``due``: up to 16
        passes may be of one step.
        """
        if not self._stepping and self._updates is not None and self._updates.look() and due:
            self._updates = None
            warnings.warn(NO_STEP, stacklevel=4)

    @quietly
    def _run_shadow(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Reads the pass that begins beside itself, before it runs."""
        assert self._shadows is not None
        if not isinstance(self.model, Wrapper):
            if not self._shadows.whole.only_taps:
                self._read_beside(module, args, kwargs)
            return
        # It runs somebody's step, which has to run once: each outermost compiled part gets a door.
        for part in self._shadows.new_parts():
            if compiled_call(part) is None:
                self._open.callback(part.register_forward_pre_hook(Door(self._enter_part), with_kwargs=True).remove)
            else:
                self._open.callback(CompiledCall(part, Door(self._enter_part)).remove)

    @quietly
    def _enter_part(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A compiled part of what runs is called."""
        if self.sampling and self._inside and not (self._reads or tap.in_backward()):
            self._read_beside(part, args, kwargs)
            self._end_pass(commit=True)

    def _read_beside(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self._shadows is not None
        try:
            self._shadows.read(module, args, kwargs, self.begin_sample, self._is_shared)
            self._call = call_of(module)
            if self._closed:  # by the model's own code
                self._end_pass(commit=False)
        except ObstacleError as error:
            self._leave_out(str(error))

    @property
    def _is_sharded(self) -> bool:
        """Whether a shadow pass waits for other ranks."""
        raise NotImplementedError

    def _is_shared(self) -> bool:
        """Whether all ranks that a shadow pass waits for run it, too."""
        raise NotImplementedError

    @property
    def _reads(self) -> bool:
        """Whether the pass that runs is read, or was beside itself."""
        return self._pass is not None or (self._shadows is not None and self._shadows.read_by is not None)

    def _leave_out(self, reason: str) -> None:
        """Tells once why a sample has no shadow pass."""
        reason = f"it cannot run a second time beside itself: {reason}"
        if reason not in self._collector.refused:
            self._left_out = reason
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
                period = self._collector.period
                self._collector.change_taps(lambda taps: taps.with_padding(tokens, period))
            return
        self.begin_sample()
        self._collector.begin()
        with ExitStack() as stack:
            if self._collector.replace:
                self._collector.refuse(registry.outside_registry(self.model))
            stack.enter_context(tracking(self._context, self.model, (args, kwargs)))
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
        if module is not self.model and compiled_call(self.model) is None:
            self._open_doors(self.model, self._doors)
        ended = self._pass is not None
        raised = sys.exc_info()[1]
        went_through = raised is None or raised is self._raising
        if self._compiled and self.sampling and went_through and self._shadows is not None and not self._is_sharded:
            self._shadows.whole.note_taps(self._collector.calls)
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

    def _end_pass(self, *, commit: bool) -> None:
        """Ends the pass that is read, as it runs or beside itself; without ``commit`` what it staged is forgotten."""
        if not self._reads:
            return
        stack, self._pass, self._call, self._nested = self._pass, None, None, 0
        if self._shadows is not None:
            self._shadows.end(commit=commit)
        if stack is None:
            return
        try:
            stack.close()
            (self._collector.commit if commit else self._collector.begin)()
        finally:
            self._collector.context.reset()

    @quietly
    def end_pass(self) -> None:
        """Tells that no forward pass is running: needed only between the passes of one step of a model that is called
        inside a compiled wrapper, where no hook of ours can see them begin.
        """
        if self._pass is None:
            self._context.reset()

    def _drop_interrupted(self) -> None:
        """Ends a pass that was interrupted where no hook runs (KeyboardInterrupt): what it staged is not read."""
        if self._reads and not is_running(self._call):
            self._end_pass(commit=False)

    @property
    def measures(self) -> bool:
        """Whether a pass of the model is being measured, which sees taps itself."""
        return self._pass is not None or in_shadow.get() is not None

    def _tell(self, *, due: bool, stored: bool = False) -> None:
        """Says once what the first sampled step does not show (``due``: also if that is all), and how a stored
        run goes on. ``stored``: only of a run that outlives the process.
        """
        if stored and not self._recorder.is_stored:
            return
        for said in (self._unseen(due), quietly(lambda _: self._recorder.note_restart(self._schedule))(self)):
            if said is not None:
                warnings.warn(f"attemper: {said}", stacklevel=3)

    @quietly
    def _unseen(self, due: bool) -> str | None:
        seen = self._collector.seen_sites
        if self._told or not (seen or due):
            return None
        if not seen and self._shadows is not None and (door := missing_door()) is not None:
            self._leave_out(lacking(door))  # what is compiled in place may not be known for it
        self._told = True
        skipped = self._recorder.unread(seen)
        if not seen:
            why = self._why_nothing(self._collector.skips(seen))
            self._recorder.note_unmeasured(why, "train" if self.model.training else "eval")
            return f"nothing was measured in the first step. {why}"
        # Which modules hold the taps of compiled code is not known. What calls are one site was measured.
        hidden = UNSEEN if self._sees_taps_alone or not self.passes else None
        skipped |= {self.title: self._left_out} if self._left_out is not None else {}
        skipped = {name: why for name, why in skipped.items() if why != hidden and not name.endswith(JOINED)}
        return why_not_all(self.model, skipped) if skipped else None

    def _why_nothing(self, skipped: tuple[Skipped, ...]) -> str:
        ran = self.passes if self._compiled or self._always else 0
        if self.sampled or self._tapped or ran or (self._sees_taps_alone and self.steps):
            return self._collector.why_nothing(skipped, compiled=self._sees_taps_alone)
        return NOT_RUN

    @property
    def _sees_taps_alone(self) -> bool:
        return self._compiled and (self._shadows is None or self._shadows.whole.only_taps)
