"""A callback for Lightning's Trainer, ``lightning`` or ``pytorch_lightning``. It needs the extra ``lightning``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import TYPE_CHECKING, Any

from torch import nn

from attemper.errors import MissingExtraError
from attemper.integrations.training import Monitor
from attemper.sites.names import Wrapper

if TYPE_CHECKING:
    from lightning.pytorch import Callback
elif "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
    from pytorch_lightning import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ImportError as error:
        raise MissingExtraError("AttemperCallback", "lightning", "lightning") from error


class AttemperCallback(Monitor, Callback):
    """Watches attention while a Lightning Trainer fits, without changing a bit of what it computes.

    One optimizer step in ``every`` is sampled: everything that ``training_step`` calls, all accumulated batches
    together. Validation and the sanity check are never read. Only the main process watches (its share of each batch),
    so no process waits for another. Scalars go to every logger of the Trainer, at the step at which ``self.log``
    writes. ::

        trainer = Trainer(callbacks=[AttemperCallback(every=50)])
        trainer.fit(module, loader)

    All hooks are gone when fitting ends, also when it raises.

    Args:
        every: sample one optimizer step in so many, the first one included.
        rows: query rows measured of each sequence, None for all; ``max_logit`` is then a lower bound.
        stats: what is logged, of ``integrations.metrics.STATISTICS``; everything is measured and in ``last``.
        trackers: beside the Trainer's loggers: a list of whatever :func:`attemper.integrations.sinks.sink` takes.
        max_keys: None for the names of the whole model and of every site, however many; those of heads by ``filter``.
            A number is the most names that are logged at a step: the model's first, then the sites', then the
            heads', each level with all its names or not at all. A warning of the log says what is left out.
        filter: a function of a name, or glob patterns: which names are logged, heads among them.
        picture_every: one sample in so many is also sent as a picture of every head, for each of ``stats``, to trackers
            that take pictures, or as a table to those that take only tables; None for never.
        on_alarm: called with each ``Alarm`` the first time it is seen. What it raises ends training.
        options: of :func:`attemper.watch`: sites, observe, backend, limits, fewest_keys.

    Attributes:
        watch: the running ``Watch``, or the last one; None before training and in processes that do not watch.
        last: the latest reading, a ``Scan``; None before the first.

    Raises:
        InputError: an argument has no meaning.
        BackendError: the named backend is missing.
    """

    _global_step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._global_step = trainer.global_step
        if not trainer.is_global_zero:
            self.close()
            return
        compiled = getattr(pl_module, "_compiler_ctx", None) is not None
        step = _TrainingStep(pl_module)
        step.put(self.begin(step, compiled=compiled, trackers=trainer.loggers))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._global_step:
            return  # gradients accumulate
        self._global_step = trainer.global_step
        # Where the rows of self.log are: global_step is one ahead here. Lightning's own callbacks read it there, too.
        self.step(trainer.fit_loop.epoch_loop._batches_that_stepped)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.close()


class _TrainingStep(Wrapper):
    """``training_step`` as a module: a pass of the model is whatever that calls, be it ``self`` or a part of it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.original: Callable[..., Any] = module.training_step  # type: ignore[assignment]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs)

    def put(self, stack: ExitStack) -> None:
        """Makes Lightning call the original through this module, until ``stack`` is closed."""

        @wraps(self.original)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        own, before = vars(self.module), vars(self.module).get("training_step")

        def restore() -> None:
            if before is None:
                own.pop("training_step", None)
            else:
                own["training_step"] = before

        own["training_step"] = training_step
        stack.callback(restore)


__all__ = ["AttemperCallback"]
