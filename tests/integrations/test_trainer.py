"""``AttemperCallback`` in transformers' Trainer: what it reads and sends, and that training does not notice."""

from __future__ import annotations

import gc
import logging
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import attemper
from attemper import InputError

tf = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers.modelcard import parse_log_history  # noqa: E402

from attemper.integrations.training import Losses  # noqa: E402
from attemper.integrations.transformers import AttemperCallback, Lent, _take_output  # noqa: E402

STEPS, TOKENS = 20, 40
SITES = ["model.layers.0.self_attn", "model.layers.1.self_attn"]


def tiny(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return tf.LlamaForCausalLM(tf.LlamaConfig(**(sizes | heads | options)))


def data(count: int = 80) -> Any:
    ids = torch.randint(0, 64, (count, TOKENS), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def trainer(folder: Path, model: Any = None, callbacks: Any = (), **options: Any) -> Any:
    """Twenty steps of two micro-batches of two sequences, evaluated every four steps."""
    arguments: dict[str, Any] = {
        "max_steps": STEPS, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "logging_steps": 5,
        "eval_strategy": "steps", "eval_steps": 4, "use_cpu": True, "report_to": "none", "save_strategy": "no",
        "disable_tqdm": True, "learning_rate": 1e-2, "dataloader_pin_memory": False,
    }  # fmt: skip
    args = tf.TrainingArguments(str(folder), **(arguments | options))
    return tf.Trainer(
        tiny(attention_dropout=0.1) if model is None else model,
        args, train_dataset=data(), eval_dataset=data(8), callbacks=list(callbacks),
    )  # fmt: skip


def hooks(model: nn.Module) -> int:
    return sum(len(part._forward_pre_hooks) + len(part._forward_hooks) for part in model.modules())


class Recorder:
    """A tracker; and how the model was when it was called."""

    def __init__(self) -> None:
        self.got: dict[int, dict[str, float]] = {}

    def log(self, values: dict[str, float], step: int) -> None:
        assert step not in self.got
        self.got[step] = values


def test_losses_parameters_and_random_numbers_are_bit_identical_with_and_without(tmp_path: Path) -> None:
    def run(callbacks: list[Any]) -> tuple[list[float], list[Tensor]]:
        one = trainer(tmp_path, callbacks=callbacks, logging_steps=1)
        one.train()
        losses = [entry["loss"] for entry in one.state.log_history if "loss" in entry]
        losses += [entry["eval_loss"] for entry in one.state.log_history if "eval_loss" in entry]
        return losses, [*(p.detach() for p in one.model.parameters()), torch.get_rng_state()]

    callback = AttemperCallback(every=3, rows=7)
    (plain, tensors), (watched, same) = run([]), run([callback])
    assert len(plain) == STEPS + 5
    assert plain == watched
    assert all(map(torch.equal, tensors, same))
    assert callback.watch is not None
    assert (callback.watch.sampled, callback.watch.failures) == (7, 0)


def test_a_sample_holds_all_micro_batches_of_a_step_and_no_evaluation_and_hooks_go(tmp_path: Path) -> None:
    tracker = Recorder()
    callback = AttemperCallback(every=1, rows=None, trackers=[tracker])
    one = trainer(tmp_path, callbacks=[callback], max_steps=6)
    before = hooks(one.model)
    one.train()
    assert hooks(one.model) == before
    assert callback.last is not None
    assert callback.watch is not None
    assert callback.last.tokens == 2 * 2 * TOKENS
    assert [(site.name, site.mode) for site in callback.last.sites] == [(name, "train") for name in SITES]
    assert callback.watch.sampled == 6
    assert sorted(tracker.got) == list(range(1, 7))


def test_the_history_and_printed_logs_hold_the_numbers_of_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = trainer(tmp_path, callbacks=[AttemperCallback(every=5)])
    one.train()
    entries = [entry for entry in one.state.log_history if "attention/max_logit/max" in entry]
    assert [entry["step"] for entry in entries] == [1, 6, 11, 16]
    assert not any("head" in name for entry in entries for name in entry)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{'loss'")]
    assert ["attention/max_logit/max" in line for line in lines] == [True] * 4
    parse_log_history(one.state.log_history)
    assert not any("attention" in name for name in one.evaluate())


@pytest.mark.slow("takes a second")
def test_a_trainer_among_the_trackers_lends_those_it_reports_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    one = trainer(tmp_path, report_to=["tensorboard"])
    callback = AttemperCallback(every=5, trackers=[one], max_keys=200, picture_every=2)
    one.add_callback(callback)
    one.train()
    assert callback.failures == 0
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    found = board.Scalars("train/attention/model.layers.1.self_attn/head3/max_logit")
    assert [event.step for event in found] == [1, 6, 11, 16]
    assert [event.step for event in board.Scalars("train/loss")] == [5, 10, 15, 20]
    assert callback.last is not None
    assert found[-1].value == pytest.approx(callback.last.sites[1].heads[3].max_logit, rel=1e-6)  # stored in float32
    pictures = board.Images("train/attention/map/normalized_entropy")
    assert [(image.step, image.width, image.height) for image in pictures] == [(1, 64, 32), (11, 64, 32)]


class Package:
    """Weights & Biases or trackio, as transformers' callback has it: it counts steps itself."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def Image(self, pixels: Any) -> Any:
        return "image", pixels.shape

    def log(self, values: dict[str, Any]) -> None:
        self.got.append(values)


@pytest.mark.parametrize("place", ["_wandb", "_trackio"])
def test_a_package_that_counts_steps_itself_gets_the_trainers_step_as_a_number(place: str) -> None:
    package = Package()
    lent = Lent(SimpleNamespace(), SimpleNamespace(**{place: package}))
    lent.log_image(np.zeros((2, 2, 3), np.uint8), "map", 7)
    assert package.got == [{"train/map": ("image", (2, 2, 3)), "train/global_step": 7}]


def test_trackers_that_cannot_be_reached_are_told_with_the_way_to_reach_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("tensorboard")
    one = trainer(tmp_path, callbacks=[AttemperCallback()], report_to=["tensorboard"], max_steps=1)
    with caplog.at_level(logging.WARNING, "attemper"):
        one.train()
    assert "cannot reach the trackers tensorboard of its Trainer" in caplog.text
    assert "trackers=[trainer]" in caplog.text


class Broken(tf.TrainerCallback):
    """Ends training at its third step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            raise RuntimeError("no more")


@pytest.mark.slow("takes many seconds")
def test_hooks_of_training_that_raised_go_with_close_a_with_block_a_new_run_or_the_callback(tmp_path: Path) -> None:
    model = tiny()
    before = hooks(model)

    def fail(callback: AttemperCallback) -> None:
        with pytest.raises(RuntimeError, match="no more"):
            trainer(tmp_path, model, [callback, Broken()]).train()

    def fail_again(callback: AttemperCallback) -> None:
        with pytest.warns(UserWarning, match="no longer shown: this training starts again at step 1"):
            fail(callback)

    callback = AttemperCallback()
    fail(callback)
    one_run = hooks(model)
    assert one_run > before
    assert callback.last is not None
    fail_again(callback)
    assert hooks(model) == one_run
    callback.close()
    assert hooks(model) == before
    with callback:
        fail_again(callback)
    assert hooks(model) == before
    fail_again(AttemperCallback())
    gc.collect()
    assert hooks(model) == before


def test_alarms_are_told_once_to_the_log_and_to_a_function(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    alarms: list[Any] = []
    callback = AttemperCallback(every=1, on_alarm=alarms.append, limits={"logits": -1e9, "diffuse": 2.0})
    with caplog.at_level(logging.WARNING, "attemper"):
        trainer(tmp_path, callbacks=[callback], max_steps=6).train()
    logits = [(alarm.site, alarm.head) for alarm in alarms if alarm.kind == "logits"]
    assert logits == [(site, head) for site in SITES for head in range(4)]
    assert {alarm.step for alarm in alarms if alarm.kind == "logits"} == {1}
    (line,) = [record.getMessage() for record in caplog.records if record.name == "attemper"]
    assert line.startswith("attemper: step 1: warning logits: model.layers.")
    assert "and 5 more. Logits this large saturate" in line


@pytest.mark.slow("trains")
def test_a_fresh_model_is_one_line_of_log_and_no_alarm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    alarms: list[Any] = []
    callback = AttemperCallback(every=1, on_alarm=alarms.append, limits={"diffuse": 0.0}, fewest_keys=2)
    with caplog.at_level(logging.INFO, "attemper"):
        trainer(tmp_path, callbacks=[callback], max_steps=6).train()
    assert alarms == []
    (line,) = [record.getMessage() for record in caplog.records if record.name == "attemper"]
    assert line.startswith("step 1: the model looks untrained: 8 of 8 heads are near uniform")


def test_what_on_alarm_raises_ends_training(tmp_path: Path) -> None:
    def stop(alarm: Any) -> None:
        raise KeyboardInterrupt(alarm.kind)

    with AttemperCallback(on_alarm=stop, limits={"logits": -1e9}) as callback:
        one = trainer(tmp_path, callbacks=[callback])
        with pytest.raises(KeyboardInterrupt):
            one.train()
    assert one.state.global_step == 1


def test_a_model_without_attention_that_can_be_seen_is_told_once_and_trains(tmp_path: Path) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(64, 64)

        def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
            logits = self.table(input_ids)
            return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    one = trainer(tmp_path, Plain(), [AttemperCallback(every=1)], eval_strategy="no", max_steps=4)
    with pytest.warns(
        UserWarning, match=r"nothing was measured in the first step\. watch saw no attention in Plain"
    ) as told:
        one.train()
    assert len(told) == 1
    assert one.state.global_step == 4


@pytest.mark.slow("takes many seconds")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("implementation", ["sdpa", "attemper"])
def test_a_compiled_model_is_watched_without_a_word(implementation: str, tmp_path: Path) -> None:
    """By taps in its graph where it is set to attemper; and its losses are those without a watch."""
    losses = []
    for callbacks in ([], [AttemperCallback(every=2, rows=None)]):
        torch._dynamo.reset()
        model = tiny()
        model.set_attn_implementation(implementation)
        one = trainer(
            tmp_path, model, callbacks, torch_compile=True, torch_compile_backend="aot_eager", max_steps=4,
            eval_strategy="no",
        )  # fmt: skip
        losses.append(one.train().training_loss)
    assert losses[0] == losses[1]
    [callback] = callbacks
    assert callback.last is not None
    assert callback.watch is not None
    assert [site.name for site in callback.last.sites] == SITES
    assert callback.last.sites[0].heads[0].rows == 2 * 2 * TOKENS
    assert (callback.watch.sampled, callback.watch.failures) == (2, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, r"watch\(every=\.\.\.\) must be an int of at least 1, got 0"),
        ({"observe": "aside"}, "must be one of 'auto', 'beside', 'shadow', 'replace'"),
        ({"stats": ["sharpness"]}, "stats must be one of 'entropy_nats'"),
        ({"trackers": print}, "trackers must be a list, got builtin_function_or_method"),
        ({"trackers": [3]}, "int is not a known tracker"),
        ({"picture_every": 0}, "picture_every must be an int of at least 1, or None for no pictures, got 0"),
        ({"max_keys": 0}, "max_keys must be an int of at least 1"),
        ({"on_alarm": 3}, "on_alarm must be a function of an Alarm, got int"),
    ],
)
def test_mistakes_are_told_before_training(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        AttemperCallback(**arguments)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.quick("True")
def test_the_loss_of_every_step_is_kept_as_the_trainer_reports_it(tmp_path: Path, named: bool) -> None:
    one = trainer(tmp_path, max_steps=10)
    watched = AttemperCallback(every=50, trackers=[one] if named else None)
    one.add_callback(watched)
    one.train()
    assert watched.watch is not None
    found = watched.watch.history("loss")
    assert found.steps.tolist() == [*range(1, 11)]
    reported = [entry["loss"] for entry in one.state.log_history if "loss" in entry]
    assert found.values.reshape(2, 5).mean(1).tolist() == pytest.approx(reported, abs=2e-4)
    assert "training_step" not in vars(one)
    logged = {entry["step"]: entry["attention/loss"] for entry in one.state.log_history if "attention/loss" in entry}
    assert logged == {1: pytest.approx(float(found.values[0]))}


def test_losses_of_a_model_that_is_not_told_the_tokens_of_a_step_are_their_mean() -> None:
    losses, model = Losses(), nn.Linear(1, 1)
    for loss in (1.0, 3.0):
        _take_output(losses, 2, model, (), {}, {"loss": torch.tensor(loss)})
    assert losses.of_step() == 2.0
    for loss in (0.25, 0.75):
        _take_output(losses, 2, model, (), {"num_items_in_batch": 7}, {"loss": torch.tensor([loss])})
    assert losses.of_step() == 2.0
    for output in ((torch.tensor(1.0),), {"logits": 1.0}, {"loss": torch.ones(2)}, None):
        _take_output(losses, 1, model, (), {}, output)
    _take_output(losses, 1, model.eval(), (), {}, {"loss": torch.tensor(1.0)})
    assert losses.of_step() is None


def test_a_training_that_starts_again_in_the_folder_of_a_run_says_that_it_hides_it(tmp_path: Path) -> None:
    for steps in (4, 2):
        told = pytest.warns(
            UserWarning, match="run holds steps 1 to 4, which are no longer shown: this training starts"
        )
        callback = AttemperCallback(every=1, store=tmp_path / "run")
        with told if steps == 2 else nullcontext():
            trainer(tmp_path, callbacks=[callback], max_steps=steps, eval_strategy="no").train()
    run = attemper.open(tmp_path / "run")
    assert (run.steps.tolist(), len(run.segments)) == ([1, 2], 2)
