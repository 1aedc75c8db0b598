"""What trainers and loops store: equal numbers of equal training, one history of a run that was resumed, collapse."""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from attemper.cli.arguments import TEXT
from attemper.lab.model import encode, windows

tf = pytest.importorskip("transformers")
L = pytest.importorskip("lightning.pytorch")
accelerate = pytest.importorskip("accelerate")

from attemper.integrations.lightning import AttemperCallback as LightningCallback  # noqa: E402
from attemper.integrations.transformers import AttemperCallback  # noqa: E402
from tests.integrations.test_trainer import tiny  # noqa: E402

pytestmark = [
    # Lightning's own, about this machine and its use of torch.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
    pytest.mark.filterwarnings("ignore:.*log_every_n_steps"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]

STEPS, TOKENS = 12, 40
WATCHED: dict[str, Any] = {"every": 2, "rows": 8, "fewest_keys": 4}
"""Fewer rows than a sequence has: which, is drawn at random."""


def sequences(count: int = 2 * STEPS) -> Tensor:
    return torch.randint(0, 64, (count, TOKENS), generator=torch.Generator().manual_seed(1))


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class InOrder(tf.Trainer):
    """Reads the data in its order, and computes the loss as a plain loop does."""

    def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(input_ids=inputs["input_ids"])
        loss = loss_of(outputs.logits, inputs["input_ids"])
        return (loss, outputs) if return_outputs else loss


def sgd(model: nn.Module, rate: Callable[[int], float] = lambda step: 1.0) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def trainer(folder: Path, model: Any, *callbacks: Any, data: Any = None, **options: Any) -> Any:
    ids = sequences() if data is None else data
    arguments = tf.TrainingArguments(
        str(folder),
        **{
            "max_steps": STEPS,
            "per_device_train_batch_size": 2,
            "max_grad_norm": 0.0,
            "use_cpu": True,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
            "logging_steps": 1000,
            "dataloader_pin_memory": False,
            **options,
        },
    )
    rows = [{"input_ids": row, "labels": row} for row in ids]
    return InOrder(
        model, arguments, train_dataset=rows, eval_dataset=rows[:2], optimizers=sgd(model), callbacks=list(callbacks)
    )


class Module(L.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net = model

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return loss_of(self.net(input_ids=batch).logits, batch)

    def validation_step(self, batch: Tensor, _: int) -> None:
        self.training_step(batch, _)

    def configure_optimizers(self) -> Any:
        return sgd(self.net)[0]


def fit(
    folder: Path, module: Any, *callbacks: Any, checkpoint: Path | None = None, data: Any = None, **options: Any
) -> Any:
    arguments: dict[str, Any] = {
        "accelerator": "cpu",
        "max_steps": STEPS,
        "default_root_dir": folder,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    one = L.Trainer(callbacks=list(callbacks), **(arguments | options))
    rows: Any = sequences() if data is None else data
    loader = torch.utils.data.DataLoader(rows, batch_size=2)
    # Lightning before 2.6 has no weights_only, and reads the whole checkpoint.
    whole = {"weights_only": False} if "weights_only" in inspect.signature(one.fit).parameters else {}
    one.fit(module, loader, loader, ckpt_path=checkpoint, **({} if checkpoint is None else whole))
    return one


def plain(folder: Path, model: Any) -> None:
    optimizer, _ = sgd(model)
    model.train()
    with attemper.watch(model, store=folder, **WATCHED) as watch:
        for batch in sequences().split(2):
            optimizer.zero_grad()
            loss_of(model(input_ids=batch).logits, batch).backward()
            optimizer.step()
            watch.step()


def accelerated(folder: Path, model: Any) -> None:
    """Two micro-batches of one sequence a step: other sums, but the same numbers of rows."""
    accelerator = accelerate.Accelerator(cpu=True)
    loader = torch.utils.data.DataLoader(sequences(), batch_size=2)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, sgd(model)[0], loader)
    model.train()
    with attemper.watch(model, store=folder, **WATCHED) as watch:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model(input_ids=batch).logits, batch))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                watch.step()


def numbers(folder: Path, **options: Any) -> Iterator[tuple[str, Any]]:
    """Every statistic of every head over all steps."""
    with attemper.open(folder) as run:
        for name in run.statistics:
            if name != "loss":  # which callbacks give by themselves
                yield name, run.history(name, **options).values


def assert_equal(one: Path, other: Path, **options: Any) -> None:
    for (name, values), (_, others) in zip(numbers(one, **options), numbers(other, **options), strict=True):
        np.testing.assert_array_equal(values, others, err_msg=name)


def test_trainers_and_loops_store_equal_numbers_of_equal_training(tmp_path: Path):
    trainer(tmp_path / "trainer", tiny(), AttemperCallback(**WATCHED)).train()
    fit(tmp_path / "lightning", Module(tiny()), LightningCallback(**WATCHED))
    plain(tmp_path / "plain", tiny())
    accelerated(tmp_path / "accelerate", tiny())
    for folder in ("trainer/attemper", "lightning/attemper", "accelerate"):
        assert_equal(tmp_path / folder, tmp_path / "plain")
    steps = {
        name: attemper.open(tmp_path / name).steps.tolist()
        for name in ("plain", "trainer/attemper", "lightning/attemper")
    }
    assert steps == {
        "plain": [0, 2, 4, 6, 8, 10],
        "trainer/attemper": [1, 3, 5, 7, 9, 11],
        "lightning/attemper": [0, 2, 4, 6, 8, 10],
    }


class Killed(BaseException):
    pass


class Dies(tf.TrainerCallback):
    """Ends training after so many steps."""

    def __init__(self, step: int, end: Callable[[], object]) -> None:
        self.step, self.end = step, end

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.end()


SAVED = {"save_strategy": "steps", "save_steps": 4}


def raise_killed() -> None:
    raise Killed


def train_until_killed(folder: Path) -> None:
    """In a process of its own, which ends in the middle of the seventh step."""
    torch.set_num_threads(1)
    die = Dies(7, lambda: os.kill(os.getpid(), signal.SIGKILL))
    trainer(folder, tiny(), AttemperCallback(**WATCHED), die, **SAVED).train()


@pytest.mark.parametrize(
    "by", ["exception", pytest.param("SIGKILL", marks=pytest.mark.slow("trains in a process of its own"))]
)
def test_a_trainer_that_was_killed_and_resumed_stores_the_history_of_one_that_was_not(tmp_path: Path, by: str):
    trainer(tmp_path / "whole", tiny(), AttemperCallback(**WATCHED), **SAVED).train()
    if by == "exception":
        callback = AttemperCallback(**WATCHED)
        with pytest.raises(Killed), callback:
            trainer(tmp_path / "killed", tiny(), callback, Dies(7, raise_killed), **SAVED).train()
    else:
        child = multiprocessing.get_context("spawn").Process(target=train_until_killed, args=(tmp_path / "killed",))
        child.start()
        child.join(120)
        assert child.exitcode == -signal.SIGKILL
    before = attemper.open(tmp_path / "killed" / "attemper").steps.tolist()
    assert before == [1, 3, 5, 7][: len(before)]
    assert len(before) >= 3  # the last may still have been in the queue
    torch.manual_seed(5)
    trainer(tmp_path / "killed", tiny(), AttemperCallback(**WATCHED), **SAVED).train(resume_from_checkpoint=True)
    whole, resumed = (attemper.open(tmp_path / name / "attemper") for name in ("whole", "killed"))
    assert resumed.steps.tolist() == whole.steps.tolist() == [1, 3, 5, 7, 9, 11]
    assert (len(whole.segments), len(resumed.segments)) == (1, 2)
    assert_equal(tmp_path / "killed" / "attemper", tmp_path / "whole" / "attemper")
    assert resumed.alarms() == whole.alarms()


@pytest.mark.slow("trains for seconds")
def test_a_lightning_run_goes_on_in_the_folder_of_its_checkpoint(tmp_path: Path):
    """Two epochs of six steps; what is killed in the second goes on from the end of the first."""
    half = sequences(STEPS)

    def run(folder: Path, *callbacks: Any, **options: Any) -> None:
        logger = L.loggers.CSVLogger(folder)
        fit(folder, Module(tiny()), LightningCallback(**WATCHED), *callbacks, data=half, logger=logger, **options)

    run(tmp_path / "whole")
    saving = L.callbacks.ModelCheckpoint(tmp_path / "saved", every_n_epochs=1, save_top_k=-1)
    run(tmp_path, saving, enable_checkpointing=True, max_steps=9)
    stored = tmp_path / "lightning_logs" / "version_0" / "attemper"
    assert attemper.open(stored).steps.tolist() == [0, 2, 4, 6, 8]
    run(tmp_path, checkpoint=tmp_path / "saved" / "epoch=0-step=6.ckpt")
    assert not (tmp_path / "lightning_logs" / "version_1" / "attemper").exists()
    assert attemper.open(stored).steps.tolist() == [0, 2, 4, 6, 8, 10]
    assert_equal(stored, tmp_path / "whole" / "lightning_logs" / "version_0" / "attemper")


@pytest.mark.slow("takes a second")
@pytest.mark.quick("trainer")
@pytest.mark.parametrize("framework", ["trainer", "lightning"])
def test_evaluation_is_stored_on_request_and_changes_nothing_of_training(tmp_path: Path, framework: str):
    for evaluation in (False, True):
        folder = tmp_path / str(evaluation)
        if framework == "trainer":
            callback = AttemperCallback(**WATCHED, evaluation=evaluation)
            trainer(folder, tiny(), callback, eval_strategy="steps", eval_steps=3).train()
        else:
            callback = LightningCallback(**WATCHED, evaluation=evaluation)
            fit(folder, Module(tiny()), callback, val_check_interval=3, limit_val_batches=2)
        assert callback.last is not None
        assert callback.watch is not None
        assert {site.mode for site in callback.last.sites} == {"train"}
        assert callback.watch.failures == 0
    run, without = (attemper.open(tmp_path / name / "attemper") for name in ("True", "False"))
    assert {site.mode for site in without.sites} == {"train"}
    for name in without.statistics:
        if name == "loss":  # of the whole step
            np.testing.assert_array_equal(run.history(name).values, without.history(name).values)
            continue
        steps, values = known(run, name, "train")
        np.testing.assert_array_equal(steps, without.steps)
        np.testing.assert_array_equal(values, without.history(name).values, err_msg=name)
    steps, _ = known(run, "entropy", "eval")
    assert steps.tolist() == ([3, 6, 9, 12] if framework == "trainer" else [2, 5, 8, 11])
    both = run.at(3 if framework == "trainer" else 2, alarms=False)
    assert {(site.name, site.mode) for site in both.sites} == {(label.name, label.mode) for label in run.sites}


def known(run: Any, name: str, mode: str) -> tuple[Any, Any]:
    """Steps and values at which sites in this mode were read."""
    found = run.history(name, mode=mode)
    seen = run.history("rows", mode=mode).values[:, 0, 0] > 0
    return found.steps[seen], found.values[seen]


def test_where_the_history_goes_can_be_said_and_none_is_memory(tmp_path: Path):
    for store in (None, False):
        callback = AttemperCallback(**WATCHED, store=store)
        trainer(tmp_path / "none", tiny(), callback, max_steps=4).train()
        assert not (tmp_path / "none" / "attemper").exists()
        assert callback.watch is not None
        assert callback.watch.run.steps.tolist() == [1, 3]
    trainer(
        tmp_path / "named",
        tiny(),
        AttemperCallback(**WATCHED, store=attemper.Store(tmp_path / "there", tags=("lr 0.5",))),
        max_steps=2,
    ).train()
    assert attemper.open(tmp_path / "there").tags == ("lr 0.5",)
    assert not (tmp_path / "named" / "attemper").exists()


class Told:
    """What a new user sees: the console, and what the run says afterwards."""

    def __init__(self, folder: Path, caplog: pytest.LogCaptureFixture, rate: float) -> None:
        """Trains a model of 12 heads for 40 steps on bytes, from the middle on at a learning rate of ``rate``."""
        caplog.set_level(logging.WARNING, "attemper")
        ids = encode(TEXT.read_text(encoding="utf-8"))
        data = windows(ids, 48, stride=len(ids) // (4 * 41))[: 4 * 40]
        model = tiny(vocab_size=256, hidden_size=96, num_attention_heads=12, num_key_value_heads=12)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        rates = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: rate if step >= 20 else 3e-3 * min(1, (step + 1) / 10)
        )
        one = trainer(folder, model, AttemperCallback(every=2), data=data, max_steps=40, per_device_train_batch_size=4)
        one.optimizer, one.lr_scheduler = optimizer, rates
        one.train()
        self.console = [record.getMessage() for record in caplog.records if record.name == "attemper"]
        self.alarms = attemper.open(folder / "attemper").alarms()


@pytest.mark.slow("takes many seconds")
def test_a_new_user_is_told_of_a_collapse_with_step_and_speed(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    told = Told(tmp_path, caplog, rate=0.3)
    fallen = [alarm for alarm in told.alarms if alarm.kind == "layer_fallen"]
    assert {alarm.site for alarm in fallen} == {"model.layers.0.self_attn", "model.layers.1.self_attn"}
    assert {alarm.severity for alarm in fallen} == {"warning"}
    assert min(alarm.since or 0 for alarm in fallen) in range(21, 28)
    growth = [alarm for alarm in told.alarms if alarm.kind == "logit_growth"]
    assert growth
    assert all("doubles in" in alarm.message and "steps" in alarm.message for alarm in growth)
    assert re.match(r"attemper: step 2[1-7]: warning", told.console[0])
    console = "\n".join(told.console)
    assert re.search(
        r"layer_fallen: .*entropy of all its heads has fallen, in the mean from .*\(it was .* at step \d+\)", console
    )
    assert re.search(r"logit_growth: .*largest logit \S+ doubles in \S+ steps", console)


@pytest.mark.slow("takes many seconds")
def test_a_fresh_model_that_trains_well_is_told_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    told = Told(tmp_path, caplog, rate=3e-3)
    assert told.console == []
    assert {alarm.severity for alarm in told.alarms} <= {"notice"}
