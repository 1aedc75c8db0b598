"""The shipped model: its shapes and laws, its weights, and the script that trains it."""

from __future__ import annotations

import importlib.util
import inspect
import json
import pickle
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from attemper.errors import InputError
from attemper.lab import model as lab_model
from attemper.lab.model import (
    WEIGHTS,
    Attention,
    ByteConfig,
    ByteModel,
    bits_per_byte,
    encode,
    load,
    rotary,
    rotate,
    save,
    windows,
)

TEXT = Path(lab_model.__file__).with_name("text.txt")
SCRIPT = Path(__file__).parents[2] / "examples" / "train_bytes.py"
SMALL = ByteConfig(layers=2, heads=2, width=16, context=24)
VARIANTS = {
    "rope": SMALL,
    "no positions": replace(SMALL, positions="none"),
    "qk-norm": replace(SMALL, qk_norm=True),
    "dropout": replace(SMALL, dropout=0.3),
}


@pytest.fixture(params=VARIANTS.values(), ids=list(VARIANTS))
def model(request: pytest.FixtureRequest) -> ByteModel:
    return ByteModel(request.param).eval()


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """``examples/train_bytes.py`` as a module."""
    spec = importlib.util.spec_from_file_location("train_bytes", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_bytes"] = module
    spec.loader.exec_module(module)
    return module


def attentions(model: ByteModel) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]


def text_ids() -> Tensor:
    return encode(TEXT.read_text(encoding="utf-8"))


# The model


def test_a_later_byte_changes_no_earlier_logits_at_any_length(model):
    ids = torch.randint(256, (2, 40))
    changed = ids.clone()
    changed[:, 12] = (ids[:, 12] + 1) % 256
    before, after = model(ids), model(changed)
    assert before.shape == (2, 40, 256)
    assert before.isfinite().all()
    assert torch.equal(before[:, :12], after[:, :12])
    assert (before[:, 12:] != after[:, 12:]).any(-1).all()
    assert model(ids[:, :1]).shape == (2, 1, 256)


def test_every_parameter_gets_a_gradient(model):
    model.train().loss(torch.randint(256, (4, 20))).backward()
    without = [
        name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()
    ]
    assert without == []


def test_the_loss_is_the_mean_cross_entropy_of_the_next_byte(model):
    ids = torch.randint(256, (2, 10))
    logs = model(ids).double().log_softmax(-1)
    picked = [logs[b, n, ids[b, n + 1]] for b in range(2) for n in range(9)]
    assert model.loss(ids).item() == pytest.approx(-sum(p.item() for p in picked) / 18, rel=1e-5)


def test_attention_equals_softmax_by_hand(model):
    attention, x = attentions(model)[0], torch.randn(2, 9, 16)
    rotation = rotary(9, 8, x.device) if model.config.positions == "rope" else None
    query, key, value = (
        layer(x).view(2, 9, 2, 8).transpose(1, 2) for layer in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    query, key = attention.q_norm(query), attention.k_norm(key)
    if rotation:
        query, key = rotate(query, *rotation), rotate(key, *rotation)
    scores = (query @ key.mT / 8**0.5).masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    expected = attention.o_proj((scores.softmax(-1) @ value).transpose(1, 2).reshape(2, 9, 16))
    torch.testing.assert_close(attention(x, rotation), expected)


def test_a_rotation_keeps_lengths_and_makes_scores_depend_on_distance_alone():
    query, key = torch.randn(8), torch.randn(8)
    angles = rotary(30, 8, query.device)
    turned = [rotate(x.expand(1, 1, 30, 8), *angles)[0, 0].double() for x in (query, key)]
    scores = turned[0] @ turned[1].mT
    torch.testing.assert_close(turned[0].norm(dim=-1), query.double().norm().expand(30))
    for distance in (0, 3, 11):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[0].expand_as(diagonal), atol=1e-4, rtol=0)
    assert scores.diagonal().mean() != pytest.approx(scores.diagonal(-3).mean().item(), abs=1e-3)


def test_qk_norm_bounds_the_scores_whatever_the_projections():
    model = ByteModel(replace(SMALL, qk_norm=True))
    ids = torch.randint(256, (1, 20))
    before = model(ids)
    for attention in attentions(model):
        attention.q_proj.weight.data *= 100
        attention.k_proj.weight.data *= 100
    # Only the epsilon of the norms sees the factor.
    torch.testing.assert_close(model(ids), before, rtol=1e-3, atol=1e-3)
    assert set(model.state_dict()) - set(ByteModel(SMALL).state_dict()) == {
        f"blocks.{layer}.attention.{name}_norm.weight" for layer in range(2) for name in "qk"
    }


def test_dropout_acts_in_training_only():
    model = ByteModel(replace(SMALL, dropout=0.3))
    ids = torch.randint(256, (2, 20))
    assert not torch.equal(model(ids), model(ids))
    assert torch.equal(model.eval()(ids), model(ids))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"positions": "learned"}, "must be one of 'rope', 'none'; got 'learned'"),
        ({"width": 100, "heads": 3}, "heads must divide the width"),
        ({"width": 12, "heads": 4}, "multiple of 2 x heads"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(InputError, match=message):
        ByteConfig(**sizes)
    ByteConfig(width=12, heads=4, positions="none")


# Text


def test_text_becomes_its_utf8_bytes():
    assert encode("aé\n").tolist() == [97, 195, 169, 10]
    assert encode("").shape == (0,)


def test_windows_lie_side_by_side_or_a_stride_apart():
    ids = torch.arange(10)
    assert windows(ids, 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert windows(ids, 4, stride=3).tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert windows(ids, 11).shape == (0, 11)


def test_bits_per_byte_predicts_every_byte_but_the_first_once():
    model = ByteModel(SMALL)
    for length in (2, 24, 25, 26, 49, 50, 100):
        ids = torch.randint(256, (length,))
        assert bits_per_byte(model, ids) == pytest.approx(bits_by_windows(model, ids), rel=1e-5), length


def bits_by_windows(model: ByteModel, ids: Tensor) -> float:
    nats = 0.0
    for start in range(0, len(ids) - 1, 24):
        window = ids[start : start + 25]
        logits = model(window[None, :-1])[0]
        nats += F.cross_entropy(logits, window[1:], reduction="sum").item()
    return nats / (len(ids) - 1) / 0.6931471805599453


def test_bits_per_byte_of_one_byte_is_refused():
    with pytest.raises(InputError, match="needs 2 bytes at least"):
        bits_per_byte(ByteModel(SMALL), torch.zeros(1, dtype=torch.int64))


# The weights that ship


def test_the_shipped_weights_are_float16_and_at_most_2_megabytes():
    assert WEIGHTS.stat().st_size <= 2_000_000
    assert {tensor.dtype for tensor in load_file(WEIGHTS).values()} == {torch.float16}
    assert sum(parameter.numel() for parameter in load().parameters()) == 885_888


def test_loading_needs_no_pickle_and_draws_nothing(monkeypatch):
    def forbidden(*_, **__):
        raise AssertionError("pickle was used")

    for place, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(place, name, forbidden)
    before = torch.get_rng_state()
    model = load()
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training
    assert {(p.dtype, p.device.type, p.requires_grad) for p in model.parameters()} == {(torch.float32, "cpu", True)}


def test_the_shipped_model_reads_python_and_english():
    """Measured: 2.38 bits a byte on the module's own source, 2.47 on English that is nothing like what it learned."""
    model = load()
    assert bits_per_byte(model, encode(inspect.getsource(lab_model))) < 2.6
    assert bits_per_byte(model, text_ids()) < 2.6


def test_saved_weights_come_back_rounded_to_float16(tmp_path):
    model = ByteModel(replace(SMALL, qk_norm=True, positions="none"))
    save(model, tmp_path / "m.safetensors")
    loaded = load(tmp_path / "m.safetensors")
    assert loaded.config == model.config
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name].half().float())


def of(name: str, tensor: Tensor | None) -> Callable[[dict[str, Tensor], dict[str, Any]], object]:
    """Another tensor of a name, or none."""
    return lambda tensors, sizes: tensors.pop(name) if tensor is None else tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (of("blocks.1.mlp.up_proj.weight", None), r"Missing key.*blocks\.1\.mlp\.up_proj\.weight"),
        (of("blocks.2.mlp.up_proj.weight", torch.zeros(3)), r"Unexpected key.*blocks\.2\.mlp\.up_proj\.weight"),
        (of("norm.weight", torch.ones(17)), r"size mismatch for norm\.weight"),
        (of("norm.weight", torch.full((16,), torch.nan)), r"norm\.weight holds NaN or infinity"),
        (lambda tensors, sizes: sizes.update(depth=2), "depth"),
        (lambda tensors, sizes: sizes.update(heads=3), "heads must divide the width"),
        (lambda tensors, sizes: sizes.clear(), "no 'config' in its metadata"),
        (b"nothing of the kind", ""),
        (slice(-100), ""),
        (None, "o such file"),
    ],
)
def test_damaged_weights_are_refused_by_name(tmp_path, change, message):
    path = tmp_path / "m.safetensors"
    save(ByteModel(SMALL), path)
    if callable(change):
        tensors = load_file(path)
        sizes = asdict(SMALL)
        change(tensors, sizes)
        save_file(tensors, path, metadata={"config": json.dumps(sizes)} if sizes else None)
    else:
        path.write_bytes(path.read_bytes()[change] if isinstance(change, slice) else change or b"")
        path.unlink() if change is None else None
    with pytest.raises(
        InputError, match=rf"(?s)m\.safetensors.*these are not the weights of a byte model: .*{message}.*Install"
    ):
        load(path)


# The script that trains it


def test_an_interrupted_run_continues_to_the_same_bits_whatever_is_reported_and_another_seed_gives_others(
    script, tmp_path
):
    recipe, path = script.Recipe(steps=10, batch=4, warmup=3), tmp_path / "state.safetensors"
    config = replace(SMALL, dropout=0.2)
    whole = script.train(config, text_ids(), recipe)

    def interrupt(step: int, *_: object) -> None:
        torch.rand(3)
        if step == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        script.train(config, text_ids(), recipe, checkpoint=path, every=4, report=interrupt)
    steps: list[int] = []
    resumed = script.train(
        config, text_ids(), recipe, checkpoint=path, every=4, resume=True, report=lambda step, *_: steps.append(step)
    )
    assert steps == [10]
    one, two = whole.state_dict(), resumed.state_dict()
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []
    other = script.train(config, text_ids(), replace(recipe, seed=2))
    assert not torch.equal(whole.embedding.weight, other.embedding.weight)


def test_a_checkpoint_of_another_run_is_refused(script, tmp_path):
    recipe, path = script.Recipe(steps=2, batch=2), tmp_path / "state.safetensors"
    script.train(SMALL, text_ids(), recipe, checkpoint=path)
    with pytest.raises(SystemExit, match="of another run \\(recipe\\)"):
        script.train(SMALL, text_ids(), replace(recipe, rate=1e-3), checkpoint=path, resume=True)
    with pytest.raises(SystemExit, match="of another run \\(bytes\\)"):
        script.train(SMALL, text_ids()[1:], recipe, checkpoint=path, resume=True)


@pytest.mark.quick("qk-norm")
@pytest.mark.parametrize("name", ["no positions", "qk-norm"])
def test_every_kind_of_model_learns(script, name):
    recipe = script.Recipe(steps=40, batch=8, warmup=5, rate=1e-2)
    model = script.train(VARIANTS[name], text_ids(), recipe)
    assert bits_per_byte(model, text_ids()) < 5


def test_the_learning_rate_warms_up_and_falls_to_zero(script):
    recipe = script.Recipe(steps=100, warmup=10, rate=1.0)
    rates = [recipe.learning_rate(step) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 1e-3


def test_held_out_files_are_chosen_by_name_and_the_rest_is_trained_on(script, tmp_path):
    names = [f"package/module{number}.py" for number in range(200)]
    refused = [
        "test/test_a.py",
        "json/tests/b.py",
        "site-packages/c.py",
        "encodings/d.py",
        "_sysconfigdata_e.py",
        "f.txt",
    ]
    for name in names + refused:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    trained, held_out = script.stdlib_files(tmp_path)
    assert sorted(trained + held_out) == sorted(tmp_path / name for name in names)
    assert 2 <= len(held_out) <= 25
    (tmp_path / names[0]).write_text("another content")
    assert script.stdlib_files(tmp_path) == (trained, held_out)
    assert script.read(held_out[:2]).tolist() == [120, 0, 120, 0]
