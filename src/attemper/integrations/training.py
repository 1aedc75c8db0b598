"""What the callbacks of all training frameworks share: a watch over training steps, its scalars, its alarms."""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from attemper.checks import whole_number
from attemper.distributed.data_parallel import check_reduce, is_distributed, words_of_ranks
from attemper.errors import InputError
from attemper.integrations.metrics import Keep, budget, check_statistics, scalars
from attemper.integrations.trackers import Trackers
from attemper.monitor.checked_model import NOT_TRAINED
from attemper.monitor.options import WatchOptions
from attemper.monitor.watch import Watch, watch
from attemper.readings.reading import Alarm, Reading, Skipped
from attemper.results.scan import Scan
from attemper.sites.names import unwrap
from attemper.statistics import SHOWN_BY_NAME, STATISTIC_OF
from attemper.store.store import Store
from attemper.text import clean

logger = logging.getLogger("attemper")

FOLDER = "attemper"
"""Of the history, in the folder of a training."""
DEFAULT: Any = object()
"""Of ``reduce``: "data" where its ranks can be told and all of them watch, else the main process alone."""
DEFAULT_STATS = ("normalized_entropy", "max_logit")


class TrainingWatch(Watch):
    """Samples optimizer steps, and in them only passes of a model that is in training mode.

    The passes of an evaluation, if they are to be read, are a sample of their own at the step that they follow. They
    change nothing of what is read of training.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        compiled: bool = False,
        evaluation: bool = False,
        start: int | None = None,
        **given: Any,
    ) -> None:
        """
        Args:
            compiled: whether a compiler runs around or inside the model where its modules do not show it.
            evaluation: whether passes in eval mode are read.
            start: the number of the step that begins.
            given: options of ``watch``.
        """
        super().__init__(model, start=start, **given)
        self._stepping = True
        self._trained = unwrap(model)
        self._compiled = self._compiled or compiled
        self._evaluation = evaluation
        self._evaluating = False
        """Whether the sample that has begun is of an evaluation."""

    @property
    def sampling(self) -> bool:
        if self._trained.training:
            return super().sampling
        # Between two micro-batches of a sampled step there is a sample already, which is of training.
        return self._evaluation and (self._evaluating or not self._fresh)

    def begin_sample(self) -> None:
        if self._trained.training:
            self.end_evaluation()
        else:
            self._evaluating = True
        super().begin_sample()

    def _why_nothing(self, skipped: tuple[Skipped, ...]) -> str:
        eval_alone = self.passes and not self.sampled and not self._trained.training
        return NOT_TRAINED if eval_alone else super()._why_nothing(skipped)

    def numbers_at(self, step: int) -> dict[str, float]:
        """Finite numbers that the loop gave with this step, if it ended last. Waits for the device."""
        latest, numbers = self._recorder.latest_scalars()
        return {name: value for name, value in numbers.items() if latest == step and math.isfinite(value)}

    def end_evaluation(self) -> None:
        """Ends the sample of an evaluation, if one has begun, at the step that ended last."""
        if self._evaluating:
            self._evaluating = False
            self.end_sample()


class Losses:
    """The losses of the micro-batches of an optimizer step, on their device."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []
        self._are_means = False

    def add(self, loss: Any, *, is_mean: bool = False) -> None:
        """Takes the loss of a micro-batch, if it is one number. ``is_mean``: whether that of the step is the mean of
        these; else their sum.
        """
        if isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex():
            self._parts.append(loss.detach().reshape(()).float())
            self._are_means = is_mean

    def of_step(self) -> Tensor | None:
        """The loss of the step that ends; None where none was seen. Waits for no device."""
        parts, self._parts = self._parts, []
        total = torch.stack(parts).sum() if parts else None
        return total / len(parts) if total is not None and self._are_means else total


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
        store: Store | str | os.PathLike[str] | bool | None = True,
        evaluation: bool = False,
        on_alarm: Callable[[Alarm], Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._stats = check_statistics(stats)
        self._budget = budget(max_keys, filter)
        self._picture_every = picture_every
        if picture_every is not None:
            self._picture_every = whole_number("picture_every", picture_every, none=", or None for no pictures")
        if trackers is not None and not isinstance(trackers, list | tuple):
            raise InputError(f"trackers must be a list, got {type(trackers).__name__}.")
        self._trackers = self._own_trackers(list(trackers or ()))
        self._all_trackers = Trackers(self._trackers)
        if on_alarm is not None and not callable(on_alarm):
            raise InputError(f"on_alarm must be a function of an Alarm, got {type(on_alarm).__name__}.")
        self._on_alarm = on_alarm
        self._losses = Losses()
        self._begun: list[Alarm] = []
        """Alarms that have begun and that ``on_alarm`` does not know yet."""
        self._store, self._evaluation = store, evaluation
        if not isinstance(store, bool | None):
            WatchOptions(store=store)
        extra = [STATISTIC_OF[name] for name in self._stats if name in SHOWN_BY_NAME]
        self._reduce = options.pop("reduce", DEFAULT)
        check_reduce("data" if self._reduce is DEFAULT else self._reduce)
        self._options = {"every": every, "rows": rows, "stats": ["all", *extra], **options}
        watch(nn.Identity(), **self._options).close()  # mistakes are raised here, not when training begins
        self._open = ExitStack()
        self._main = True
        self._sampled = self._readings = 0
        self._logged_untrained = self._logged_notes = False
        self.watch: TrainingWatch | None = None
        self.last: Scan | None = None

    @property
    def failures(self) -> int:
        """Calls of trackers that raised."""
        return self._all_trackers.failures

    def begin(
        self,
        model: nn.Module,
        *,
        step: int | None = None,
        folder: Path | None = None,
        compiled: bool = False,
        trackers: Iterable[Any] = (),
        main: bool = True,
    ) -> ExitStack:
        """Starts watching ``model``; what ran before is closed.

        Args:
            step: the number of the step that begins, if it is known.
            folder: of the training; its history goes into ``attemper`` there, if the user named no store. None: memory.
            compiled: whether a compiler runs around or inside the model where its modules do not show it.
            trackers: beside those that the user gave.
            main: whether this is the main process of training, which reports. Others watch only to be merged with it.

        Returns:
            What is undone by ``close``; more may be entered.
        """
        self.close()
        self._all_trackers = Trackers([*self._trackers, *trackers] if main else [])
        self._main, self.watch, self.last = main, None, None
        self._logged_untrained = self._logged_notes = False
        options = {"compiled": compiled, "evaluation": self._evaluation, "start": step, **self._options}
        self._new_watch = partial(
            TrainingWatch, model, store=self._store_in(folder), on_alarm=self._begun.append, **options
        )
        self._watch_merged()
        # No framework calls every callback when training raises: the hooks go when the callback is garbage-collected.
        forgotten = weakref.finalize(self, self._open.close)
        forgotten.atexit = False
        self._open.callback(forgotten.detach)
        return self._open

    def _watch_merged(self) -> None:
        """Starts the watch, merged with those of other ranks if there are any and nothing speaks against it."""
        if self._reduce is not DEFAULT or not is_distributed():
            self._start(None if self._reduce is DEFAULT else self._reduce)
        elif words_of_ranks("callbacks") is None:
            self._watch_alone("Not all ranks have the callback.")
        else:
            try:
                self._start("data")
            except InputError as error:
                self._watch_alone(str(error))

    def _watch_alone(self, reason: str) -> None:
        """Goes on, or starts, with the main process alone: nobody has asked for more."""
        if self.watch is not None:
            self.watch.close()
        self.watch = None
        if self._main:
            logger.warning("attemper: %s Only the main process is watched.", clean(reason))
        self._start(None)

    def _start(self, reduce: Any) -> None:
        if reduce is None and not self._main:
            return
        self.watch, self._sampled, self._readings = self._new_watch(reduce=reduce), 0, 0
        self._begun.clear()
        self._open.callback(self.watch.close)

    def close(self) -> None:
        """Takes every hook off the model, also after training that raised. What was read stays; trackers stay open."""
        self._open.close()
        self._open = ExitStack()

    def _store_in(self, folder: Path | None) -> Store | str | os.PathLike[str] | None:
        """Where the history goes in a training of this folder; None for memory."""
        if not isinstance(self._store, bool):
            return self._store
        return folder / FOLDER if self._store and folder is not None else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _own_trackers(self, trackers: list[Any]) -> list[Any]:
        """The trackers that are sent to directly; a framework's callback may leave some out."""
        return trackers

    def step(self, step: int, row: int | None = None) -> dict[str, float]:
        """Ends an optimizer step. Of a sampled one, scalars go to the trackers.

        Args:
            step: its number.
            row: the number under which trackers have it, if that is another.

        Returns:
            The scalars of the whole model that pass the filter; none if the step was not sampled.
        """
        loss = self._losses.of_step()
        if self.watch is None:
            return {}
        try:
            self.watch.step(step, loss=loss)
        except InputError as error:  # the ranks hold different parts of the model
            if self._reduce is not DEFAULT:
                raise
            self._watch_alone(str(error))
            return {}
        self._report_alarms()
        if self.watch.sampled == self._sampled or not self._main:
            return {}
        self._sampled, self._readings = self.watch.sampled, self._readings + 1
        try:
            self.last = self.watch.table()
            levels = scalars(self.last, self._stats)
            levels["model"] |= {f"attention/{name}": value for name, value in self.watch.numbers_at(step).items()}
        except InputError as error:
            if self.last is not None:  # else the watch has told at its first step that it sees nothing
                self.watch.note_failure(self.watch.title, error)
            return {}
        except Exception as error:  # whatever it is, it must not end somebody's training run
            self.watch.note_failure(self.watch.title, error)
            return {}
        row = step if row is None else row
        self._all_trackers.write(self._budget.choose(levels), row)
        if self._picture_every is not None and (self._readings - 1) % self._picture_every == 0:
            self._all_trackers.write_map(self.last, self._stats, row)
        self._log_notes(self.last.reading, step)
        return {name: value for name, value in levels["model"].items() if self._budget.keep(name)}

    def end_evaluation(self) -> None:
        if self.watch is not None:
            self.watch.end_evaluation()
            self._sampled = self.watch.sampled
            self._report_alarms()

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

    def _report_alarms(self) -> None:
        """Calls ``on_alarm`` for each alarm that has begun. What it raises ends training."""
        begun = self._begun.copy()
        self._begun.clear()
        if self._on_alarm is not None:
            for alarm in begun:
                self._on_alarm(alarm)
