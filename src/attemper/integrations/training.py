"""What the callbacks of all training frameworks share: a watch over training steps, its scalars, its alarms."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from torch import nn

from attemper.errors import InputError
from attemper.integrations.metrics import Keep, budget, check_statistics, scalars
from attemper.integrations.trackers import Trackers
from attemper.monitor.watch import Watch, watch
from attemper.readings.alarms import SEVERITIES
from attemper.readings.reading import Alarm, Reading
from attemper.readings.scan import Scan
from attemper.sites.names import unwrap
from attemper.statistics import SHOWN_BY_NAME, STATISTIC_OF
from attemper.text import clean

logger = logging.getLogger("attemper")

DEFAULT_STATS = ("normalized_entropy", "max_logit")


class TrainingWatch(Watch):
    """Samples optimizer steps, from the first on, and in them only passes of a model that is in training mode."""

    def __init__(self, model: nn.Module, *, compiled: bool, **given: Any) -> None:
        super().__init__(model, **given)
        self._stepping = True
        self._trained = unwrap(model)
        self._compiled = self._compiled or compiled

    @property
    def sampling(self) -> bool:
        return self._trained.training and super().sampling


class Monitor:
    """Base of the callbacks. It watches a model through one run of training after another: ``begin``, a ``step`` for
    each optimizer step, ``close``. The arguments are those of every callback.

    Attributes:
        watch: the running watch, or the last one; None before the first step and in processes that do not watch.
        last: the latest reading, or None.
    """

    def __init__(
        self,
        every: int = 50,
        rows: int | None = 128,
        stats: str | Iterable[str] = DEFAULT_STATS,
        trackers: Iterable[Any] | None = None,
        max_keys: int | None = None,
        filter: Keep | str | Iterable[str] | None = None,
        picture_every: int | None = 10,
        on_alarm: Callable[[Alarm], Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._stats = check_statistics(stats)
        self._budget = budget(max_keys, filter)
        self._picture_every = _check_every("picture_every", picture_every)
        if trackers is not None and not isinstance(trackers, list | tuple):
            raise InputError(f"trackers must be a list, got {type(trackers).__name__}.")
        self._trackers = self._own_trackers(list(trackers or ()))
        self._all_trackers = Trackers(self._trackers)
        if on_alarm is not None and not callable(on_alarm):
            raise InputError(f"on_alarm must be a function of an Alarm, got {type(on_alarm).__name__}.")
        self._on_alarm = on_alarm
        extra = [STATISTIC_OF[name] for name in self._stats if name in SHOWN_BY_NAME]
        self._options = {"every": every, "rows": rows, "stats": ["all", *extra], **options}
        watch(nn.Identity(), **self._options).close()  # mistakes are raised here, not when training begins
        self._open = ExitStack()
        self._seen: set[tuple[str, str, int | None]] = set()
        self._sampled = 0
        self._warned_of_nothing = self._logged_untrained = self._logged_notes = False
        self.watch: Watch | None = None
        self.last: Scan | None = None

    @property
    def failures(self) -> int:
        """Calls of trackers that raised."""
        return self._all_trackers.failures

    def begin(self, model: nn.Module, *, compiled: bool = False, trackers: Iterable[Any] = ()) -> ExitStack:
        """Starts watching ``model``; what ran before is closed.

        Args:
            compiled: whether a compiler runs around or inside the model where its modules do not show it.
            trackers: beside those that the user gave.

        Returns:
            What is undone by ``close``; more may be entered.
        """
        self.close()
        self._all_trackers = Trackers([*self._trackers, *trackers])
        running = TrainingWatch(model, compiled=compiled, **self._options)
        self.watch, self.last, self._sampled = running, None, 0
        self._warned_of_nothing = self._logged_untrained = self._logged_notes = False
        self._seen.clear()
        self._open.callback(running.close)
        # No framework calls every callback when training raises: the hooks go when the callback is garbage-collected.
        forgotten = weakref.finalize(self, self._open.close)
        forgotten.atexit = False
        self._open.callback(forgotten.detach)
        return self._open

    def close(self) -> None:
        """Takes every hook off the model, also after training that raised. What was read stays; trackers stay open."""
        self._open.close()
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _own_trackers(self, trackers: list[Any]) -> list[Any]:
        """The trackers that are sent to directly; a framework's callback may leave some out."""
        return trackers

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
            self._warn_of_nothing(error)
            return {}
        except Exception as error:  # whatever it is, it must not end somebody's training run
            self.watch.note_failure(self.watch.title, error)
            return {}
        self._all_trackers.write(self._budget.choose(levels), step)
        if self._picture_every is not None and (self._sampled - 1) % self._picture_every == 0:
            self._all_trackers.write_map(self.last, self._stats, step)
        self._log_notes(self.last.reading, step)
        self._report_alarms(self.last.alarms, step)
        return {name: value for name, value in levels["model"].items() if self._budget.keep(name)}

    def _warn_of_nothing(self, error: InputError) -> None:
        """Warns once that no attention is seen: that must not end training."""
        if not self._warned_of_nothing:
            self._warned_of_nothing = True
            warnings.warn(f"attemper: nothing is logged. {clean(error)}", stacklevel=3)

    def _log_notes(self, reading: Reading, step: int) -> None:
        """Logs once what is not judged: without it, no alarm would look like a healthy model. That a model looks
        untrained is no warning, and stands in the place of an alarm for each head.
        """
        untrained = reading.untrained_note
        for note in () if self._logged_notes else reading.notes:
            if note != untrained:
                self._logged_notes = True
                logger.warning(f"step {step}: {clean(note)}")
        if untrained is not None and not self._logged_untrained:
            self._logged_untrained = True
            logger.info(f"step {step}: {untrained}")

    def _report_alarms(self, alarms: Iterable[Alarm], step: int) -> None:
        """Reports each alarm once: a line of log for each kind, a call of ``on_alarm`` for each head."""
        new = [alarm for alarm in alarms if (alarm.kind, alarm.site, alarm.head) not in self._seen]
        self._seen |= {(alarm.kind, alarm.site, alarm.head) for alarm in new}
        for kind in dict.fromkeys(alarm.kind for alarm in new):
            of_kind = [alarm for alarm in new if alarm.kind == kind]
            heard = SEVERITIES.index(of_kind[0].severity) >= SEVERITIES.index("warning")
            more = f" and {len(of_kind) - 3} more" if len(of_kind) > 3 else ""
            where = "; ".join(clean(alarm.message) for alarm in of_kind[:3])
            logger.log(
                logging.WARNING if heard else logging.INFO,
                f"step {step}: {of_kind[0].severity} {kind}: {where}{more}. {of_kind[0].advice}",
            )
        if self._on_alarm is not None:
            for alarm in new:
                self._on_alarm(alarm)


def _check_every(name: str, every: int | None) -> int | None:
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
        raise InputError(f"{name} must be an int of at least 1, or None for no pictures, got {every!r}.")
    return every
