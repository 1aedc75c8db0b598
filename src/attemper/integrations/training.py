"""What the callbacks of all training frameworks share: a watch over training steps, its scalars, its alarms."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch import nn

from attemper.errors import InputError
from attemper.integrations.metrics import Keep, budget, checked_statistics, scalars
from attemper.integrations.sinks import Sinks
from attemper.monitor.result import Scan
from attemper.monitor.watch import Watch, watch
from attemper.readings.alarms import SEVERITIES
from attemper.readings.reading import BY_NAME, Alarm
from attemper.sites.names import unwrapped
from attemper.text import shown

logger = logging.getLogger("attemper")

DEFAULT_STATS = ("normalized_entropy", "max_logit")


class TrainingWatch(Watch):
    """Samples optimizer steps, from the first on, and in them only passes of a model that is in training mode."""

    def __init__(self, model: nn.Module, *, compiled: bool, **options: Any) -> None:
        super().__init__(model, **options)
        self._stepping = True
        self._trained = unwrapped(model)
        self._compiled = self._compiled or compiled

    @property
    def sampling(self) -> bool:
        return self._trained.training and super().sampling


class Monitor:
    """Watches a model through one run of training after another: ``begin``, a ``step`` for each optimizer
    step, ``close``.

    Attributes:
        watch: the running watch, or the last one; None before the first step and in processes that do not watch.
        last: the latest reading, or None.
    """

    def __init__(
        self, *, every: int, rows: int | None, stats: str | Iterable[str], trackers: Iterable[Any] | None,
        max_keys: int | None, filter: Keep | str | Iterable[str] | None, on_alarm: Callable[[Alarm], Any] | None,
        **options: Any,
    ) -> None:  # fmt: skip
        self._stats = checked_statistics(stats)
        self._budget = budget(max_keys, filter)
        if trackers is not None and not isinstance(trackers, list | tuple):
            raise InputError(f"trackers must be a list, got {type(trackers).__name__}.")
        self._trackers = list(trackers or ())
        self._sinks = Sinks(self._trackers)
        if on_alarm is not None and not callable(on_alarm):
            raise InputError(f"on_alarm must be a function of an Alarm, got {type(on_alarm).__name__}.")
        self._on_alarm = on_alarm
        extra = [name.removesuffix("_nats") for name in self._stats if name in BY_NAME]
        self._options = {"every": every, "rows": rows, "stats": ["all", *extra], **options}
        watch(nn.Identity(), **self._options).close()  # mistakes are told here, not when training begins
        self._open = ExitStack()
        self._seen: set[tuple[str, str, int | None]] = set()
        self._sampled = 0
        self._told_nothing = self._told_untrained = self._told_notes = False
        self.watch: Watch | None = None
        self.last: Scan | None = None

    @property
    def failures(self) -> int:
        """Calls of trackers that raised."""
        return self._sinks.failures

    def begin(self, model: nn.Module, *, compiled: bool = False, trackers: Iterable[Any] = ()) -> ExitStack:
        """Starts watching ``model``; what ran before is closed.

        Args:
            compiled: whether a compiler runs around or inside the model where its modules do not show it.
            trackers: beside those that the user gave.

        Returns:
            What is undone by ``close``; more may be entered.
        """
        self.close()
        options = {"sites": None, "store": None, "observe": "beside", "backend": "auto", "limits": None}
        self._sinks = Sinks([*self._trackers, *trackers])
        running = TrainingWatch(model, compiled=compiled, **(options | self._options))
        self.watch, self.last, self._sampled = running, None, 0
        self._told_nothing = self._told_untrained = self._told_notes = False
        self._seen.clear()
        self._open.callback(running.close)
        # No framework tells every callback that training raised: whoever drops the callback drops the hooks.
        forgotten = weakref.finalize(self, self._open.close)
        forgotten.atexit = False
        self._open.callback(forgotten.detach)
        return self._open

    def close(self) -> None:
        """Takes every hook off the model. What was read stays readable; trackers stay open."""
        self._open.close()
        self._open = ExitStack()

    def step(self, step: int) -> dict[str, float]:
        """Ends an optimizer step. Of a sampled one, scalars go to the trackers under ``step``, new alarms to the log.

        Returns:
            The scalars of the whole model that pass the filter; none if the step was not sampled.
        """
        if self.watch is None:
            return {}
        self.watch.step(step)
        if self.watch.sampled == self._sampled:
            return {}
        self._sampled = self.watch.sampled
        try:
            self.last = self.watch.table()
            levels = scalars(self.last, self._stats)
        except InputError as error:
            self._tell_nothing(error)
            return {}
        except Exception as error:  # whatever it is, it must not end somebody's training run
            self.watch.report(self.watch.title, error)
            return {}
        self._sinks.write(self._budget.chosen(levels), step)
        # That a model looks untrained is no warning: it has a line of its own, below.
        self._tell_notes(replace(self.last.reading, untrained_heads=None).notes, step)
        self._tell_alarms(self.last.alarms, step)
        self._tell_untrained(step)
        return {name: value for name, value in levels["model"].items() if self._budget.keep(name)}

    def _tell_nothing(self, error: InputError) -> None:
        """A model without attention that can be seen must not end training; it must be told, once."""
        if not self._told_nothing:
            self._told_nothing = True
            warnings.warn(f"attemper: nothing is logged. {shown(error)}", stacklevel=3)

    def _tell_untrained(self, step: int) -> None:
        """One line in the place of an alarm for each head."""
        assert self.watch is not None
        baseline = self.watch.baseline
        if baseline.untrained and baseline.near_uniform and not self._told_untrained:
            self._told_untrained = True
            logger.info(
                f"step {step}: {baseline.near_uniform} of {baseline.judged} heads are near uniform, as in a model that "
                "is not trained yet. They are told one by one once it is not so."
            )

    def _tell_notes(self, notes: Iterable[str], step: int) -> None:
        """Tells once what is not judged: without it, no alarm would look like a healthy model."""
        for note in () if self._told_notes else notes:
            self._told_notes = True
            logger.warning(f"step {step}: {shown(note)}")

    def _tell_alarms(self, alarms: Iterable[Alarm], step: int) -> None:
        """Tells each alarm once: a line of log for each kind, a call of ``on_alarm`` for each head."""
        new = [alarm for alarm in alarms if (alarm.kind, alarm.site, alarm.head) not in self._seen]
        self._seen |= {(alarm.kind, alarm.site, alarm.head) for alarm in new}
        for kind in dict.fromkeys(alarm.kind for alarm in new):
            of_kind = [alarm for alarm in new if alarm.kind == kind]
            heard = SEVERITIES.index(of_kind[0].severity) >= SEVERITIES.index("warning")
            more = f" and {len(of_kind) - 3} more" if len(of_kind) > 3 else ""
            where = "; ".join(shown(alarm.message) for alarm in of_kind[:3])
            logger.log(
                logging.WARNING if heard else logging.INFO,
                f"step {step}: {of_kind[0].severity} {kind}: {where}{more}. {of_kind[0].advice}",
            )
        if self._on_alarm is not None:
            for alarm in new:
                self._on_alarm(alarm)
