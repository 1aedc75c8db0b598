"""``temper(normalizer=...)``: another normalizer in a model that exists."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from attemper import nn as ours
from attemper.backends.normalizers import NORMALIZERS
from attemper.errors import InputError
from tests.control.models import checkpointed
from tests.monitor.tiny_models import TINY, inputs, require_registry


class Attending(nn.Module):
    """Two layers that call ``F.scaled_dot_product_attention``."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(16, 48)
            self.drop = 0.0

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            dropout = self.drop if self.training else 0.0
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True).transpose(1, 2).flatten(2)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.Layer(), self.Layer()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def by_hand(model: Attending, x: Tensor, function: Any) -> Tensor:
    for layer in model.layers:
        q, k, v = layer.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
        scores = q @ k.transpose(-1, -2) / 8**0.5
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        x = x + (function(scores) @ v).transpose(1, 2).flatten(2)
    return x


REPLACED = {
    "sparsemax": ours.Sparsemax(),
    "entmax15": ours.Entmax15(),
    "softmax_plus_one": ours.SoftmaxPlusOne(),
    "scalable_softmax": ours.ScalableSoftmax(),
    "sigmoid": ours.Sigmoid(),
    "softmax": ours.Softmax(),
}
GIVEN = [*REPLACED, ours.TopK(3), ours.Threshold(0.2), ours.Entmax(1.3), ours.Sink(2), ours.Sigmoid(-1.0)]


@pytest.mark.parametrize("given", GIVEN, ids=str)
@pytest.mark.turns(2)
def test_the_model_attends_by_the_map_and_is_what_it_was_afterwards(given: Any):
    model, x = Attending(), torch.randn(2, 9, 16)
    before = model(x)
    handle = attemper.temper(model, normalizer=given)
    want = by_hand(model, x, REPLACED.get(given, given) if isinstance(given, str) else given)
    assert torch.allclose(model(x), want, atol=2e-6)
    assert handle.sites == ("layers.0", "layers.1")
    handle.remove()
    assert torch.equal(model(x), before)
    assert not [name for name in model.state_dict() if "attemper" in name]


def test_a_temperature_and_a_map_act_together():
    model, x = Attending(), torch.randn(2, 9, 16)
    with attemper.temper(model, temperature=0.5, normalizer="sparsemax"):
        want = by_hand(model, x, lambda scores: ours.Sparsemax()(scores, temperature=0.5))
        assert torch.allclose(model(x), want, atol=2e-6)


def test_each_site_learns_its_own_alpha_which_is_saved_with_the_model(tmp_path: Any):
    model, x = Attending(), torch.randn(2, 9, 16)
    handle = attemper.temper(model, normalizer=ours.Entmax(1.5, learned=True, num_heads=2))
    parameters = list(handle.parameters())
    assert [tuple(parameter.shape) for parameter in parameters] == [(2,), (2,)]
    model(x).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().min() > 0 for parameter in parameters)
    torch.optim.SGD(parameters, 1e-2).step()
    assert "layers.0.attemper_normalizer.log_excess" in model.state_dict()
    moved = model(x)
    handle.save(tmp_path)
    other = copy.deepcopy(model)
    assert torch.equal(other(x), moved)
    torch.optim.SGD(parameters, 1.0).step()
    assert not torch.equal(model(x), moved)
    handle.load(tmp_path)
    assert torch.equal(model(x), moved)


def test_a_penalty_has_the_gradient_of_the_maps_entropy():
    model, x = Attending().double(), torch.randn(2, 9, 16, dtype=torch.float64)
    attemper.temper(model, normalizer="entmax15", sites=["layers.0"])
    penalty = attemper.regularize(model, attemper.EntropyTarget(0.3, 1.0), sites=["layers.0"])
    model.train()
    loss = penalty.attach(model(x).sum() * 0)
    loss.backward()
    layer: Any = model.layers[0]
    got = layer.qkv.weight.grad.clone()
    weight = layer.qkv.weight.detach().clone().requires_grad_()
    q, k, _ = F.linear(x, weight, layer.qkv.bias).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    entropy = attemper.functional.entropy_of(ours.Entmax15()(scores))
    ((entropy - 0.3) ** 2).mean().backward()
    assert weight.grad is not None
    assert torch.allclose(got, weight.grad, rtol=1e-5, atol=1e-9)


def test_dropout_is_the_models():
    model, x = Attending().train(), torch.randn(2, 9, 16)
    layers: Any = model.layers
    for layer in layers:
        layer.drop = 0.5
    attemper.temper(model, normalizer="sparsemax")
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


REFUSED = "steers by the slope of softmax's entropy, and {} attends by another normalizer"


def test_a_thermostat_refuses_another_map_before_anything_runs():
    model, x = Attending().train(), torch.randn(2, 9, 16)
    handle = attemper.temper(model, normalizer="sparsemax", sites=["layers.1"])
    with pytest.raises(InputError, match=REFUSED.format("Layer")):
        attemper.Thermostat(model, target_entropy=0.5)
    handle.remove()
    thermostat = attemper.Thermostat(model, target_entropy=0.5)
    attemper.temper(model, normalizer="sparsemax", sites=["layers.1"])
    with pytest.raises(InputError, match=REFUSED.format("Layer")):
        model(x)
    thermostat.remove()
    model(x)
    layer = ours.MultiheadAttention(16, 2, normalizer="entmax15")
    with pytest.raises(InputError, match=REFUSED.format("MultiheadAttention")):
        attemper.Thermostat(layer, target_entropy=0.5)


def test_what_cannot_be_is_refused():
    with pytest.raises(InputError, match=r"nn.MultiheadAttention, which has no place for another normalizer"):
        attemper.temper(nn.TransformerEncoderLayer(16, 2, 16), normalizer="entmax15")
    with pytest.raises(InputError, match=r"temper\(normalizer=\.\.\.\) must be one of 'softmax'.*got 'entmax'"):
        attemper.temper(Attending(), normalizer="entmax")
    with pytest.raises(InputError, match=r"temper\(normalizer=\.\.\.\) must be one of 'softmax'"):
        attemper.temper(Attending(), normalizer=object())  # pyright: ignore[reportArgumentType]
    handle = attemper.temper(Attending(), normalizer="entmax15")
    with pytest.raises(InputError, match="another normalizer than softmax cannot be folded"):
        handle.fold()


def test_a_normalizer_without_a_module_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(NORMALIZERS, "relu", NORMALIZERS["sparsemax"])
    with pytest.raises(
        InputError, match=r"normalizer='relu'\): no module .* There are modules of softmax, .*sparsemax"
    ):
        attemper.temper(Attending(), normalizer="relu")


def test_a_layer_of_ours_takes_another_map_and_gives_it_back():
    layer, x = ours.MultiheadAttention(16, 2, batch_first=True), torch.randn(2, 5, 16)
    before = layer(x, x, x, need_weights=False)[0]
    other = ours.MultiheadAttention(16, 2, batch_first=True, normalizer="sparsemax")
    other.load_state_dict(layer.state_dict())
    with attemper.temper(layer, normalizer="sparsemax"):
        assert torch.equal(layer(x, x, x, need_weights=False)[0], other(x, x, x, need_weights=False)[0])
    assert torch.equal(layer(x, x, x, need_weights=False)[0], before)


def test_a_reading_says_which_normalizer_it_is_of():
    model, x = Attending(), torch.randn(2, 9, 16)
    attemper.temper(model, normalizer="sparsemax", sites=["layers.1"])
    with attemper.watch(model) as watch:
        model(x)
    assert [site.get("normalizer") for site in watch.table().to_dict()["sites"]] == [None, "sparsemax"]
    assert [site.normalizer for site in watch.table().sites] == ["softmax", "sparsemax"]
    support = watch.table().row_statistics("layers.1").support_size
    q, k, _ = model.layers[1].qkv(x + model.layers[0](x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    assert torch.equal(support, (ours.Sparsemax()(scores) > 0).sum(-1))


@pytest.mark.slow("takes many seconds")
def test_what_a_compiled_model_hides_from_its_taps_is_skipped_by_name():
    model, x = Attending(), torch.randn(2, 9, 16)
    attemper.temper(model, normalizer="sparsemax", sites=["layers.1"])
    compiled = torch.compile(model, backend="eager")
    with attemper.watch(compiled) as watch:  # pyright: ignore[reportArgumentType]
        compiled(x)
    assert [site.normalizer for site in watch.table().sites] == ["softmax", "sparsemax"]
    with attemper.watch(compiled, observe="beside") as watch:  # pyright: ignore[reportArgumentType]
        compiled(x)
    with pytest.raises(InputError, match=r"layers.1: temper gave it another normalizer than softmax"):
        watch.table()


def test_a_penalty_on_lse_says_that_the_map_has_none():
    model, x = Attending().train(), torch.randn(2, 9, 16)
    attemper.temper(model, normalizer="entmax15")
    attemper.regularize(model, attemper.ZLoss(1e-3))
    with pytest.raises(InputError, match=r"a penalty on lse \(ZLoss\) has a meaning under softmax only.*Entmax15"):
        model(x)


# --- models of transformers: sinks, softcaps, biases, caches, checkpointing, autocast ---

RTOL = 1e-5


def ready(name: str) -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    tiny = TINY[name]
    model = tiny.build().eval()
    return model, inputs(tiny.kind, None if tiny.kind in ("vision", "speech") else "right")


def real_outputs(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The first output, at real tokens."""
    output = model(**batch)[0]
    mask = batch.get("decoder_attention_mask", batch.get("attention_mask"))
    return output if mask is None or mask.shape != output.shape[:2] else output[mask.bool()]


@pytest.mark.parametrize("name", [name for name in TINY if name != "gpt-oss"])
@torch.no_grad()
@pytest.mark.turns(2)
def test_softmax_changes_nothing_and_another_map_is_measured_and_taken_off(name: str) -> None:
    require_registry(TINY[name].model)
    model, batch = ready(name)
    before = real_outputs(model, batch)
    with attemper.temper(model, normalizer="softmax"):
        assert (real_outputs(model, batch) - before).abs().max() < RTOL
    with attemper.temper(model, normalizer="entmax15") as handle:
        assert (real_outputs(model, batch) - before).abs().max() > 10 * RTOL
        scan = attemper.scan(model, [batch])
        assert handle.sites
    assert {site.normalizer for site in scan.sites} == {"entmax15"}
    assert not scan.skipped
    assert torch.equal(real_outputs(model, batch), before)


@torch.no_grad()
def test_generation_with_a_cache_is_generation_without_one() -> None:
    model, _ = ready("llama")
    prompt = {key: value[:, :12] for key, value in inputs("text", None).items()}
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with attemper.temper(model, normalizer="sparsemax"):
        cached = model.generate(**prompt, use_cache=True, **options)
        assert torch.equal(cached, model.generate(**prompt, use_cache=False, **options))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_gradients_are_the_same(reentrant: bool) -> None:
    model, batch = ready("llama")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    found = []
    for kind in (None, reentrant):
        again = copy.deepcopy(model).train()
        attemper.temper(again, normalizer=ours.Entmax(1.5, learned=True, num_heads=4))
        checkpointed(again, kind)
        again(**batch, labels=labels, use_cache=False).loss.backward()
        found.append({name: part.grad for name, part in again.named_parameters() if part.grad is not None})
    plain, repeated = found
    assert plain.keys() == repeated.keys()
    assert sum("attemper_normalizer" in name for name in plain) == 2  # alpha of each layer
    for name, gradient in plain.items():
        assert torch.equal(gradient, repeated[name]), name


@torch.no_grad()
def test_under_autocast_outputs_are_those_of_float32_up_to_its_rounding() -> None:
    model, batch = ready("llama")
    with attemper.temper(model, normalizer="entmax15"):
        exact = real_outputs(model, batch)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = real_outputs(model, batch)
    # What bfloat16 does to the same model under its own softmax.
    own = real_outputs(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        own_error = (real_outputs(model, batch) - own).abs().max()
    assert (rounded - exact).abs().max() < 3 * own_error


@torch.no_grad()
def test_sinks_of_a_model_take_the_maps_of_softmax_only() -> None:
    """gpt-oss hands learned sinks to its attention; sparse normalizers have no place for them."""
    model, batch = ready("gpt-oss")
    before = real_outputs(model, batch)
    for normalizer in ("softmax", "softmax_plus_one"):
        with attemper.temper(model, normalizer=normalizer):
            moved = (real_outputs(model, batch) - before).abs().max()
            mass = [head.mass for site in attemper.scan(model, [batch]).sites for head in site.heads]
        assert (moved < RTOL) == (normalizer == "softmax")
        assert all(m is not None and 0 < m < 1 for m in mass)
    with (
        attemper.temper(model, normalizer="sparsemax"),
        pytest.raises(
            InputError, match=r"has no sink.*a model that brings one \(gpt-oss\) takes forms of softmax only"
        ),
    ):
        model(**batch)
    assert torch.equal(real_outputs(model, batch), before)
