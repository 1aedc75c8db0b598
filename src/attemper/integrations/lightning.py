"""A callback for Lightning's Trainer, ``lightning`` or ``pytorch_lightning``. It needs the extra ``lightning``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from attemper.errors import needs
from attemper.integrations.training import FOLDER, Monitor
from attemper.monitor.hooks import set_for_now
from attemper.sites.names import Wrapper

if TYPE_CHECKING:
    from lightning.pytorch import Callback
elif "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
    from pytorch_lightning import Callback
else:
    with needs("AttemperCallback", "lightning", "lightning"):
        from lightning.pytorch import Callback


class AttemperCallback(Monitor, Callback):
    """Watches attention while a Lightning Trainer fits, without changing a bit of what it computes.

    One optimizer step in ``every`` is sampled: everything that ``training_step`` calls, all accumulated batches
    together. The loss that ``training_step`` gives back is kept of every step. Validation is read on request, the
    sanity check never. Of many ranks all watch, and after each sampled step two collectives make their samples one; the
    main process reports. Scalars go to every logger of the Trainer, at the step at which ``self.log`` writes. ::

        trainer = Trainer(callbacks=[AttemperCallback(every=50)])
        trainer.fit(module, loader)

    All hooks are gone when fitting ends, also when it raises.

    Args:
        every: sample one optimizer step in so many, the first one included.
        rows: query rows measured of each sequence, None for all; ``max_logit`` is then a lower bound.
        stats: what is logged, of ``integrations.metrics.STATISTICS``; everything is measured and in ``last``.
        trackers: beside the Trainer's loggers: a list of whatever :func:`attemper.integrations.trackers.sink` takes.
        max_keys: None for the names of the whole model and of every site, however many; those of heads by ``filter``.
            A number is the most names that are logged at a step: the model's first, then the sites', then the
            heads', each level with all its names or not at all. A warning of the log says what is left out.
        filter: a function of a name, or glob patterns: which names are logged, heads among them.
        picture_every: one sample in so many is also sent as a picture of every head, for each of ``stats``, to trackers
            that take pictures, or as a table to those that take only tables; None for never.
        store: where the history of every head is kept: True for ``attemper`` in the Trainer's ``log_dir``, which is its
            ``default_root_dir`` where no logger has a folder; the path of a folder, or ``attemper.Store(...)``; None or
            False for a bounded history in memory. Training that is resumed from a checkpoint goes on with it.
        evaluation: whether what ``validation_step`` calls is read and stored, too, as a sample of mode "eval" at the
            step that it follows. What is read of training does not change.
        on_alarm: called with each ``Alarm`` that begins, if it is a warning or worse. What it raises ends training.
        options: of :func:`attemper.watch`: sites, observe, backend, limits, fewest_keys, and reduce: "data" unless told
            otherwise, where the data-parallel ranks can be told; with None the main process alone watches its share of
            each batch. Validation is always its share.

    Attributes:
        watch: the running ``Watch``, or the last one; None before training and in processes that do not watch.
        last: the latest reading, a ``Scan``; None before the first.

    Raises:
        InputError: an argument has no meaning.
        BackendError: the named backend is missing.
    """

    _global_step = 0
    _folder: str | None = None
    """Of the training, as it stands in checkpoints: relative to the Trainer's ``default_root_dir``."""
    _resumed: str | None = None
    """The same of the checkpoint that this training goes on from."""

    def state_dict(self) -> dict[str, Any]:
        return {} if self._folder is None else {"folder": self._folder}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = state_dict.get("folder")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._global_step = trainer.global_step
        folder = self._find_folder(trainer)  # all processes ask for it together
        steps = _Steps(pl_module, ("training_step", "validation_step") if self._evaluation else ("training_step",))
        opened = self.begin(
            steps,
            # Rows may be one more once a training was resumed; with several optimizers there is only their number.
            step=trainer.global_step if trainer.lightning_module.automatic_optimization else _row(trainer),
            folder=folder,
            compiled=getattr(pl_module, "_compiler_ctx", None) is not None,
            trackers=trainer.loggers,
            main=trainer.is_global_zero,
        )
        if self.watch is not None:
            steps.put(opened)

    def _find_folder(self, trainer: Any) -> Path:
        """The folder of the training that is resumed, if it is here; else that of this one, which loggers number."""
        root, resumed, self._resumed = Path(trainer.default_root_dir), self._resumed, None
        folder = Path(trainer.log_dir or root)
        if resumed is not None and (root / resumed / FOLDER).is_dir():
            folder = root / resumed
        with suppress(ValueError):  # on another drive there is no way from one to the other
            self._folder = os.path.relpath(folder, root)
        return folder

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not pl_module.automatic_optimization:
            self._losses.of_step()  # of several optimizers it is the loss that training_step gives back last
        self._losses.add(loss)  # Lightning divides it by the number of batches that accumulate
        if trainer.global_step == self._global_step:
            return  # gradients accumulate
        self._global_step = trainer.global_step
        ended = trainer.global_step - 1 if pl_module.automatic_optimization else _row(trainer)
        self.step(ended, row=_row(trainer))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.end_evaluation()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.close()


def _row(trainer: Any) -> int:
    """The step at which self.log writes the row of a batch that ends, as Lightning's own callbacks ask for it."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


class _Steps(Wrapper):
    """``training_step``, and perhaps ``validation_step``, as a module: a pass of the model is whatever they call, be it
    ``self`` or a part of it.
    """

    def __init__(self, module: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__(module)
        self.originals: dict[str, Callable[..., Any]] = {name: getattr(module, name) for name in names}

    def forward(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self.originals[name](*args, **kwargs)

    def put(self, stack: ExitStack) -> None:
        """Makes Lightning call the originals through this module, until ``stack`` is closed."""
        for name, original in self.originals.items():
            set_for_now(stack, vars(self.module), name, wraps(original)(partial(self, name)))


__all__ = ["AttemperCallback"]
