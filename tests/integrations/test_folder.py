"""A tempered model is saved with what stands at its sites, and comes back with it; what a folder says runs no code."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import attemper
from attemper import InputError
from attemper.integrations import pretrained
from attemper.nn import (
    ConditionalTemperature,
    Entmax,
    FixedTemperature,
    LearnedTemperature,
    LengthTemperature,
    Normalizer,
    ScalableSoftmax,
    ScheduledTemperature,
    Sigmoid,
    Sink,
    Softmax,
    Temperature,
    Threshold,
    TopK,
)
from attemper.schedules import constant, curriculum, piecewise, warmup_anneal
from tests.support import encoder
from tests.support.command import Run, run

tf = pytest.importorskip("transformers")
__all__ = ["run"]

IDS = torch.arange(24).view(2, 12)


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, **options,
    )  # fmt: skip
    model = tf.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(20)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def moved(model: Any, by: float = 0.3) -> None:
    """As if it had been trained: every number that is learned is another one."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "attemper" in name:
                parameter.add_(torch.linspace(-by, by, parameter.numel()).view_as(parameter))


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "a number": lambda: {"temperature": 0.5},
    "numbers of heads": lambda: {"temperature": torch.tensor([0.5, 1.0, 2.0, 3.0])},
    "learned": lambda: {"temperature": LearnedTemperature(4, initial=1.5, floor=0.5)},
    "conditional": lambda: {"temperature": ConditionalTemperature(32, 4, pool="mean", initial=1.5)},
    "length": lambda: {"temperature": LengthTemperature(4, "yarn")},
    "scheduled": lambda: {"temperature": ScheduledTemperature(curriculum(2.0, 0.5), 10)},
    "product": lambda: {"temperature": LengthTemperature(4) * LearnedTemperature(4) * 0.5},
    "one site": lambda: {"temperature": {"model.layers.1": FixedTemperature(0.3)}},
    "entmax15": lambda: {"normalizer": "entmax15"},
    "sparsemax": lambda: {"normalizer": "sparsemax"},
    "plus one": lambda: {"normalizer": "softmax_plus_one"},
    "softmax": lambda: {"normalizer": Softmax(), "temperature": 0.5},
    "learned entmax": lambda: {"normalizer": Entmax(1.5, learned=True, num_heads=4), "temperature": 0.5},
    "entmax": lambda: {"normalizer": Entmax(1.3)},
    "entmax of heads": lambda: {"normalizer": Entmax(torch.tensor([1.0, 1.3, 1.5, 2.0]))},
    "top-k": lambda: {"normalizer": TopK(3)},
    "threshold": lambda: {"normalizer": Threshold(0.05)},
    "sigmoid": lambda: {"normalizer": Sigmoid(-1.5)},
    "learned sigmoid": lambda: {"normalizer": Sigmoid(-1.5, learned=True, num_heads=4)},
    "sink": lambda: {"normalizer": Sink(4)},
    "scalable": lambda: {"normalizer": ScalableSoftmax(torch.tensor([0.4, 0.5, 0.6, 0.7]))},
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.turns(3)
def test_a_tempered_model_comes_back_with_what_stood_at_its_sites(name: str, tmp_path: Path, full_size: bool):
    model = llama()
    plain = logits(model)
    handle = attemper.temper(model, **PARTS[name]())
    handle.step()
    moved(model)
    expected = logits(model)
    assert (expected - plain).abs().max() > 1e-4
    model.save_pretrained(tmp_path)
    again = attemper.load(tmp_path)
    assert type(again) is type(model)
    torch.testing.assert_close(logits(again), expected, rtol=1e-6, atol=1e-6)
    assert sorted(again.state_dict()) == sorted(model.state_dict())
    assert not hasattr(again.config, "attemper")
    # It is saved again as it is, and from another folder it comes back again.
    if full_size or name == "product":
        again.save_pretrained(tmp_path / "again")
        assert torch.equal(logits(attemper.load(tmp_path / "again")), logits(again))


def test_the_files_say_what_stands_where(tmp_path: Path):
    model = llama()
    attemper.temper(model, temperature=LearnedTemperature(4), normalizer=TopK(3), sites=["model.layers.1"])
    model.save_pretrained(tmp_path)
    document = json.loads((tmp_path / "attemper.json").read_text())
    assert document["sites"] == {
        "model.layers.1.self_attn": {
            "temperatures": [{"kind": "LearnedTemperature", "floor": 0.01, "ceiling": 100.0}],
            "normalizer": {"kind": "TopK", "k": 3},
        }
    }
    assert json.loads((tmp_path / "config.json").read_text())["attemper"]["restored_by"] == "attemper.load(folder)"
    assert not [file.name for file in tmp_path.iterdir() if file.suffix in (".bin", ".pt", ".pkl", ".pickle", ".part")]


STAIRS = piecewise([(0.1, 2.0), (0.5, 1.0)], interpolation="constant")


@pytest.mark.parametrize("schedule", [constant(0.7), warmup_anneal(), curriculum(), STAIRS])
def test_each_schedule_goes_on_where_it_was(schedule: Any, tmp_path: Path):
    model = llama()
    given = ScheduledTemperature(schedule, 10)
    attemper.temper(model, temperature=given)
    given.step(4)
    model.save_pretrained(tmp_path)
    part = attemper.load(tmp_path).model.layers[0].self_attn.attemper_temperature
    for step in range(4, 11):
        assert (int(part.steps), part.value.item()) == (step, pytest.approx(schedule(step, 10)))
        part.step()


def test_several_temperatures_of_a_site_come_back_all(tmp_path: Path):
    model = llama()
    with attemper.temper(model, temperature=0.5), attemper.temper(model, temperature=LearnedTemperature(4)):
        moved(model)
        expected = logits(model)
        model.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(attemper.load(tmp_path)), expected, rtol=1e-6, atol=1e-6)


def test_what_a_thermostat_held_is_fixed_in_the_saved_model(tmp_path: Path):
    model = llama().train()
    with attemper.Thermostat(model, target_entropy=0.3, unit="normalized", max_step=0.5) as thermostat:
        model(IDS)
        thermostat.step()
        expected = logits(model.eval())
        model.save_pretrained(tmp_path)
    again = attemper.load(tmp_path)
    assert isinstance(again.model.layers[0].self_attn.attemper_temperature, FixedTemperature)
    torch.testing.assert_close(logits(again), expected, rtol=1e-6, atol=1e-6)


def test_a_float64_model_comes_back_in_float64(tmp_path: Path):
    model = llama().double()
    attemper.temper(model, temperature=LearnedTemperature(4))
    moved(model)
    model.save_pretrained(tmp_path)
    again = attemper.load(tmp_path)
    own = "model.layers.0.self_attn.attemper_temperature.log_temperature"
    assert torch.equal(again.state_dict()[own], model.state_dict()[own])
    assert again.state_dict()[own].dtype == torch.float64


# --- save_pretrained while the handle stands ---


def test_removed_the_handle_gives_save_pretrained_back(tmp_path: Path):
    model = llama()
    handle = attemper.temper(model, temperature=0.5)
    assert "save_pretrained" in vars(model)
    handle.remove()
    assert all("save_pretrained" not in vars(part) for part in model.modules())
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "attemper.json").exists()
    assert torch.equal(logits(attemper.load(tmp_path)), logits(model))  # what was not tempered comes as it is


def test_a_save_pretrained_of_the_users_own_is_called_and_given_back(tmp_path: Path):
    model, calls = llama(), []
    kind = type(model)

    def own(save_directory: Path, **kwargs: Any) -> None:
        calls.append(save_directory)
        kind.save_pretrained(model, save_directory, **kwargs)

    model.save_pretrained = own
    with attemper.temper(model, temperature=0.5):
        model.save_pretrained(save_directory=tmp_path)
        assert (tmp_path / "attemper.json").is_file()
    assert calls == [tmp_path]
    assert model.save_pretrained is own


def test_copies_and_pickles_save_their_own_temperatures(tmp_path: Path):
    model = llama()
    handle = attemper.temper(model, temperature=LearnedTemperature(4))
    twins = {"copied": copy.deepcopy(model), "pickled": pickle.loads(pickle.dumps(model))}
    handle.remove()
    for name, twin in twins.items():
        moved(twin)
        twin.save_pretrained(tmp_path / name)
        assert torch.equal(logits(attemper.load(tmp_path / name)), logits(twin))
    model.save_pretrained(tmp_path / "own")
    assert not (tmp_path / "own" / "attemper.json").exists()


def test_the_body_of_a_model_is_saved_and_loaded_by_its_own_names(tmp_path: Path):
    model = llama()
    attemper.temper(model, temperature=0.5)
    model.model.save_pretrained(tmp_path / "body")
    body = attemper.load(tmp_path / "body")
    with torch.no_grad():
        assert torch.equal(body(IDS)[0], model.model(IDS)[0])
    model.save_pretrained(tmp_path / "whole")
    other = attemper.load(tmp_path / "whole", tf.AutoModel)
    with torch.no_grad():
        torch.testing.assert_close(other(IDS)[0], body(IDS)[0])


def test_only_the_main_process_writes_and_a_push_says_how(tmp_path: Path):
    model = llama()
    attemper.temper(model, temperature=0.5)
    model.save_pretrained(tmp_path / "other", is_main_process=False)
    assert not (tmp_path / "other" / "attemper.json").exists()
    with pytest.raises(InputError, match=r"call model\.push_to_hub"):
        model.save_pretrained(tmp_path / "pushed", push_to_hub=True)


def test_a_state_dict_that_was_gathered_is_what_is_saved(tmp_path: Path):
    model = llama()
    attemper.temper(model, temperature=LearnedTemperature(4))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    own = "model.layers.1.self_attn.attemper_temperature.log_temperature"
    state[own] = torch.tensor([0.1, 0.2, 0.3, 0.4])
    model.save_pretrained(tmp_path, state_dict=dict(state))
    assert torch.equal(attemper.load(tmp_path).state_dict()[own], state[own])


def test_a_schedule_of_the_users_own_is_saved_at_its_value_with_a_warning(tmp_path: Path):
    model = llama()
    attemper.temper(model, temperature=ScheduledTemperature(lambda step, total: 0.5 + step / total, 10) * 2.0)
    with pytest.warns(UserWarning, match=r"saved as its value at step 0, 0\.5: its schedule is your own function"):
        model.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(attemper.load(tmp_path)), logits(model), rtol=1e-6, atol=1e-6)


class Own(Temperature):
    def forward(self, query: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.full((1, 1, 1), 0.5)


def test_a_class_of_the_users_own_is_named_when_saved_and_refused_when_loaded(tmp_path: Path):
    model = llama()
    attemper.temper(model, temperature=Own(), sites=["model.layers.0"])
    with pytest.warns(UserWarning, match="a Own is your own class"):
        model.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="None is not a temperature or normalizer of attemper"):
        attemper.load(tmp_path)


def test_checkpoints_of_trainer_are_tempered_and_resumed(tmp_path: Path):
    pytest.importorskip("accelerate")
    rows = [{"input_ids": row, "labels": row} for row in IDS.repeat(4, 1)]

    def trainer(model: Any, steps: int) -> Any:
        options = tf.TrainingArguments(
            output_dir=str(tmp_path / "runs"), max_steps=steps, save_steps=2, per_device_train_batch_size=2,
            report_to=[], learning_rate=0.1, use_cpu=True, disable_tqdm=True, logging_strategy="no",
            dataloader_pin_memory=False,
        )  # fmt: skip
        return tf.Trainer(model=model, args=options, train_dataset=rows)

    model = llama()
    handle = attemper.temper(model, temperature=LearnedTemperature(4), normalizer=Entmax(1.5, learned=True))
    trainer(model, 2).train()
    assert all((value != 1).any() for value in handle.values().values())
    checkpoint = tmp_path / "runs" / "checkpoint-2"
    torch.testing.assert_close(logits(attemper.load(checkpoint)), logits(model.eval()), rtol=1e-5, atol=1e-5)
    other = llama()
    attemper.temper(other, temperature=LearnedTemperature(4), normalizer=Entmax(1.5, learned=True))
    resumed = trainer(other, 2)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    torch.testing.assert_close(logits(other.eval()), logits(model), rtol=1e-6, atol=1e-6)


# --- what loads a folder of ours ---


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tempered decoder with a tokenizer."""
    place = tmp_path / "tempered"
    tokenizer = tf.AutoTokenizer.from_pretrained(str(encoder.folder()))
    torch.manual_seed(0)
    config = tf.GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=2, n_head=2, n_positions=32)
    model = tf.GPT2LMHeadModel(config)
    attemper.temper(model, temperature=torch.tensor([0.01, 50.0]), sites=["transformer.h.0"])
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


def test_what_loads_a_folder_restores_it_and_says_so(folder: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, logger="attemper"):
        known = pretrained.load(str(folder))
    assert known.tempered[0].sites == ("h.0.attn",)
    assert "was tempered (attemper.json): restored at 1 site" in caplog.text
    batch = pretrained.windows(known, "heads attend to a key " * 30)
    tempered = attemper.scan(known.model, batch)
    known.tempered[0].remove()
    plain = attemper.scan(known.model, batch)
    one, two = (scan.sites[0].heads[0].entropy_nats or 0.0 for scan in (tempered, plain))
    assert 0 < one < two - 1e-3


@pytest.mark.slow("takes many seconds")
def test_calibrate_folds_what_the_model_came_with(run: Run, folder: Path, tmp_path: Path):
    words = tmp_path / "words.txt"
    words.write_text("heads attend to a key " * 48, encoding="utf-8")
    given = ("calibrate", folder, "--text", words, "--max-length", 16, "--validation", 0.5, "--method", "grid")
    ended = run(*given, "--fold", tmp_path / "folded", "--force", "--out", tmp_path)
    assert ended.code == 0, ended.err
    assert "the model already has attemper temperatures: they are folded in too" in ended.err
    assert not (tmp_path / "folded" / "attemper.json").exists()
    found = attemper.types.Calibration.load(tmp_path)
    ids = torch.arange(20)[None] + 100
    plain = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "folded").eval()
    own = attemper.load(folder)
    with torch.no_grad(), found.apply(own):
        torch.testing.assert_close(plain(ids).logits, own(ids).logits, rtol=1e-4, atol=1e-5)


def test_every_map_and_temperature_of_the_library_can_be_saved():
    from attemper.control.saved_model import KINDS

    of_nn = {name for name in attemper.nn.__all__ if isinstance(kind := getattr(attemper.nn, name), type)
             and issubclass(kind, Temperature | Normalizer)}  # fmt: skip
    assert of_nn - {"Temperature", "Normalizer"} <= set(KINDS)
