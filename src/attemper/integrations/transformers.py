"""transformers: the attention implementation ``attemper``, and a callback for its Trainer.

::

    import attemper.integrations.transformers

    model.set_attn_implementation("attemper")  # before torch.compile: a tap in the graph of every attention

Importing this module registers the implementation. It needs the extra ``transformers``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from attemper.errors import needs
from attemper.integrations.trackers import draw_method
from attemper.integrations.training import Losses, Monitor
from attemper.monitor.hooks import set_for_now
from attemper.sites.transformers import NAME, register

register()

with needs("AttemperCallback", "transformers", "transformers"):
    from transformers import TrainerCallback

logger = logging.getLogger("attemper")


class AttemperCallback(Monitor, TrainerCallback):
    """Watches attention while a transformers Trainer trains, without changing a bit of what it computes.

    One optimizer step in ``every`` is sampled, all its micro-batches together; evaluation is read on request. The loss
    of every step is kept: as the Trainer reports it if it is among ``trackers``, else as the model gives it. Of many
    ranks all watch, and after each sampled step two collectives make their samples one; the main process reports. ::

        trainer = Trainer(model, args, train_dataset=data)
        trainer.add_callback(AttemperCallback(every=50, trackers=[trainer]))
        trainer.train()

    A callback cannot see its Trainer: named among ``trackers``, it lends every tracker of its ``report_to``. Numbers of
    the whole model (mean, min and max over heads, alarms) also go to ``state.log_history`` and, if the callback was
    given to ``Trainer(callbacks=[...])``, into the log lines that are printed.

    If training raises, the hooks stay until ``close()``, the next ``train()``, the end of a ``with`` block around it,
    or the end of the callback itself.

    Args:
        every: sample one optimizer step in so many, the first one included.
        rows: query rows measured of each sequence, None for all; ``max_logit`` is then a lower bound.
        stats: what is logged, of ``integrations.metrics.STATISTICS``; everything is measured and in ``last``.
        trackers: a list of Trainers and of whatever :func:`attemper.integrations.trackers.sink` takes.
        max_keys: None for the names of the whole model and of every site, however many; those of heads by ``filter``.
            A number is the most names that are sent to trackers at a step: the model's first, then the sites', then the
            heads', each level with all its names or not at all. A warning of the log says what is left out.
        filter: a function of a name, or glob patterns: which names are sent, heads among them.
        picture_every: one sample in so many is also sent as a picture of every head, for each of ``stats``, to trackers
            that take pictures, or as a table to those that take only tables; None for never.
        store: where the history of every head is kept: True for ``attemper`` in the Trainer's ``output_dir``; the path
            of a folder, or ``attemper.Store(...)``; None or False for a bounded history in memory. Training that is
            resumed goes on with it.
        evaluation: whether passes of evaluations are read and stored, too, as a sample of mode "eval" at the step that
            they follow. What is read of training does not change.
        on_alarm: called with each ``Alarm`` that begins, if it is a warning or worse. What it raises ends training.
        options: of :func:`attemper.watch`: sites, observe, backend, limits, fewest_keys, and reduce: "data" unless told
            otherwise, where the data-parallel ranks can be told; with None the main process alone watches its share of
            each batch. Evaluation is always its share.

    Attributes:
        watch: the running ``Watch``, or the last one; None before training and in processes that do not watch.
        last: the latest reading, a ``Scan``; None before the first.

    Raises:
        InputError: an argument has no meaning.
        BackendError: the named backend is missing.
    """

    _unprinted: Mapping[str, float] = MappingProxyType({})
    """Scalars that are not in a printed line of log yet."""

    def _own_trackers(self, trackers: list[Any]) -> list[Any]:
        self._trainers, self._silent = [tracker for tracker in trackers if _is_trainer(tracker)], not trackers
        return [tracker for tracker in trackers if not _is_trainer(tracker)]

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
        main = state.is_world_process_zero
        if main and self._silent and args.report_to:
            self._silent = False
            logger.warning(
                f"A callback cannot reach the trackers {', '.join(args.report_to)} of its Trainer. Add it "
                "with trainer.add_callback(AttemperCallback(..., trackers=[trainer]))."
            )
        lent = [tracker for trainer in self._trainers for tracker in _integrations(trainer)]
        opened = self.begin(
            model,
            step=state.global_step + 1,
            folder=Path(args.output_dir),
            compiled=args.torch_compile,
            trackers=lent,
            main=main,
        )
        if self.watch is not None:
            self._take_losses(opened, model, args)

    def _take_losses(self, opened: ExitStack, model: Any, args: Any) -> None:
        """Until ``opened`` is closed, takes the loss of each micro-batch: as the Trainer reports it, where the callback
        knows its Trainer; else from the outputs of the model, which a compiler would trace.
        """
        for trainer in self._trainers:
            if trainer.model is model:
                step = partial(_with_loss, trainer.training_step, self._losses)
                set_for_now(opened, vars(trainer), "training_step", step)
                return
        if not args.torch_compile and args.n_gpu <= 1:
            across = args.world_size if getattr(args, "average_tokens_across_devices", False) else 1
            hook = partial(_take_output, self._losses, across)
            opened.callback(model.register_forward_hook(hook, with_kwargs=True).remove)

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.watch is not None:
            self.watch.end_pass()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        found = self.step(state.global_step)
        if found:
            state.log_history.append({**found, "epoch": state.epoch, "step": state.global_step})
            self._unprinted = found

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.end_evaluation()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        # Trackers have had these logs already; what prints them comes after. The metrics of an evaluation, which reach
        # this too, are given to the user as they are.
        if logs is not None and "loss" in logs:
            logs.update(self._unprinted)
            self._unprinted = {}

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.close()


def _with_loss(training_step: Callable[..., Any], losses: Losses, *args: Any, **kwargs: Any) -> Any:
    loss = training_step(*args, **kwargs)
    losses.add(loss)
    return loss


def _take_output(losses: Losses, across: int, model: Any, _: Any, kwargs: Mapping[str, Any], output: Any) -> None:
    """Of a forward in training. A model that is told how many tokens the step has gives its part of their mean."""
    loss = output.get("loss") if isinstance(output, Mapping) and model.training else None
    if loss is not None:
        of_all = kwargs.get("num_items_in_batch") is not None
        losses.add(loss * across if of_all else loss, is_mean=not of_all)


def _is_trainer(tracker: Any) -> bool:
    library = sys.modules.get("transformers.trainer")
    return library is not None and isinstance(tracker, library.Trainer)


def _integrations(trainer: Any) -> Iterator[Callable[[dict[str, float], int], None]]:
    """The trackers of a Trainer's ``report_to``, each through the method that it logs with."""
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    kinds = tuple(INTEGRATION_TO_CALLBACK.values())
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, kinds):
            yield Lent(trainer, callback)


PICTURES_OF = ("tb_writer", "_ml_flow", "_experiment", "_swanlab")
"""Where transformers' callbacks keep what takes a picture at a step."""
PICTURES_OF_COUNTERS = ("_wandb", "_trackio")
"""Where they keep packages that count steps themselves: transformers logs the Trainer's step to them as a number."""


class Lent:
    """A callback of transformers that logs to a tracker, as a function of values and a step."""

    def __init__(self, trainer: Any, callback: Any) -> None:
        self.trainer, self.callback = trainer, callback

    def __call__(self, values: dict[str, float], step: int) -> None:
        trainer = self.trainer
        self.callback.on_log(trainer.args, trainer.state, trainer.control, logs=dict(values), model=trainer.model)

    def log_image(self, image: np.ndarray, key: str, step: int) -> None:
        """Sends a picture to the tracker, if it takes pictures, under the name that transformers gives a number."""
        key = f"train/{key}"
        for name in PICTURES_OF_COUNTERS:
            if (package := getattr(self.callback, name, None)) is not None:
                package.log({key: package.Image(image), "train/global_step": step})
        for name in PICTURES_OF:
            draw = draw_method(getattr(self.callback, name, None))
            if draw is not None:
                draw(key, image, step)


__all__ = ["NAME", "AttemperCallback", "register"]
