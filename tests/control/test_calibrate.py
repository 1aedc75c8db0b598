"""Calibration: temperatures that minimise held-out loss, by two ways that agree; folding that changes no output."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn

import attemper
from attemper import InputError, calibrate
from attemper.cli.arguments import TEXT
from attemper.control.calibrate import by_gradient, by_grid, paired_interval
from attemper.lab import model as lab
from attemper.lab.corpus import drawn_windows, standard_library
from attemper.types import Calibration
from tests.control.models import BUILD, built, output
from tests.monitor.tiny_models import GROUPED, from_config, inputs, require_registry

HARD = ("bloom",)
"""Softmaxed by hand: nothing to temper from outside."""
FOLDED = [name for name in BUILD if name not in HARD]


def shipped(scale: float = 1.0) -> nn.Module:
    """The byte-level model that ships, its scores multiplied by ``scale``."""
    model = lab.load()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("q_proj.weight"):
                weight.mul_(scale)
    return model


def text(length: int = 128) -> list[Tensor]:
    return list(lab.windows(lab.encode(TEXT.read_text("utf-8")), length).split(1))


def loss(model: Any, batch: Tensor) -> Tensor:
    return model.loss(batch)


class One(nn.Module):
    """One head of attention whose queries are its input: the loss over T is known in closed form."""

    def __init__(self, scale: float = 1.0, heads: int = 1) -> None:
        super().__init__()
        self.scale, self.heads = nn.Parameter(torch.tensor(scale)), heads
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, heads * 4] -> attention of x to itself."""
        parts = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(parts * self.scale, parts, parts)
        return self.dropout(mixed.transpose(1, 2).flatten(2))


def teacher_batches(temperatures: Tensor, count: int = 32) -> list[tuple[Tensor, Tensor]]:
    """Inputs, and what ``One`` gives for them at these temperatures [heads]."""
    model = One(heads=len(temperatures)).eval()
    found = []
    for number in range(count):
        x = torch.randn(2, 6, 4 * len(temperatures), generator=torch.Generator().manual_seed(number)) * 2
        with torch.no_grad(), attemper.temper(model, temperature=temperatures):
            found.append((x, model(x)))
    return found


def squared(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


# --- the least loss ---


@pytest.mark.quick("grid")
@pytest.mark.parametrize("method", ["gradient", "grid"])
def test_the_temperature_that_made_the_data_is_found(method: str):
    found = calibrate(One(), teacher_batches(torch.tensor([1.6])), squared, method=method)
    assert found.temperatures["One"] == pytest.approx((1.6,), rel=1e-3)
    assert (found.fitting, found.held_out) == (22, 10)
    assert found.tells
    assert found.converged
    assert found.after < 1e-6 < found.before


@pytest.mark.parametrize("method", ["gradient", "grid"])
@pytest.mark.quick("gradient")
def test_temperatures_of_heads_are_found_each(method: str):
    want = (0.6, 1.0, 2.5)
    found = calibrate(One(heads=3), teacher_batches(torch.tensor(want)), squared, per="head", method=method)
    assert found.temperatures["One"] == pytest.approx(want, rel=2e-3)
    assert found.converged


class Bowl:
    """A quadratic in log T with coupled coordinates; its least value lies at ``at``."""

    def __init__(self, at: Tensor, unit: float) -> None:
        self.at, self.unit, self.evaluations = at, unit, 0
        coupled = torch.full((len(at), len(at)), 0.3, dtype=torch.float64)
        self.form = coupled + torch.diag(torch.linspace(0.5, 3.0, len(at), dtype=torch.float64))

    def value(self, logs: Tensor) -> float:
        self.evaluations += 1
        return float((logs - self.at) @ self.form @ (logs - self.at)) * self.unit

    def gradient(self, logs: Tensor) -> tuple[float, Tensor]:
        return self.value(logs), 2 * self.unit * self.form @ (logs - self.at)


@pytest.mark.parametrize("unit", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("search", [by_gradient, by_grid])
def test_both_searches_find_a_known_minimum_whatever_the_unit_of_the_loss(search: Any, unit: float):
    bowl = Bowl(torch.tensor([-0.9, 0.0, 0.4, 1.1], dtype=torch.float64), unit)
    logs, converged = search(bowl, 4, (0.25, 4.0), 400)
    assert converged
    torch.testing.assert_close(logs, bowl.at, rtol=0, atol=2e-3)


@pytest.mark.parametrize("search", [by_gradient, by_grid])
def test_both_searches_stay_within_the_bounds_and_within_their_steps(search: Any):
    far = Bowl(torch.tensor([2.0], dtype=torch.float64), 1.0)
    assert search(far, 1, (0.5, 3.0), 100)[0].exp().item() == pytest.approx(3.0, rel=1e-2)
    for steps in (1, 3):
        short: Any = Bowl(torch.linspace(-1, 1, 6, dtype=torch.float64), 1.0)
        _, converged = search(short, 6, (0.25, 4.0), steps)
        assert not converged
        assert search is by_gradient or short.evaluations == steps


@pytest.mark.long("takes a minute")
def test_on_text_like_its_own_the_shipped_model_wants_no_temperature_and_the_scaled_one_its_factor():
    windows = drawn_windows(standard_library().held_out, 96, 129, seed=0).split(2)
    plain, sharp = (calibrate(shipped(scale), windows, loss) for scale in (1.0, 1.7))
    (one,), (two,) = (next(iter(found.temperatures.values())) for found in (plain, sharp))
    assert one == pytest.approx(1.0, abs=0.02)
    assert two / one == pytest.approx(1.7, rel=0.005)
    assert abs(plain.after - plain.before) < 1e-3
    assert sharp.tells


@pytest.mark.slow("takes many seconds")
def test_the_losses_are_those_of_the_model_before_and_after():
    model, windows = shipped(1.7), text(96)
    found = calibrate(model, windows, loss, validation=0.5)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0)).tolist()
    held = [windows[place] for place in order[: found.held_out]]
    with torch.no_grad():
        assert found.before == pytest.approx(sum(float(loss(model, part)) for part in held) / len(held), abs=1e-6)
        with found.apply(model):
            assert found.after == pytest.approx(sum(float(loss(model, part)) for part in held) / len(held), abs=1e-6)


# --- what it leaves as it was, and what it refuses ---


def test_the_model_its_modes_its_gradients_and_the_random_state_are_as_they_were():
    model = One()
    model.train()
    model.dropout.eval()
    model.scale.grad = torch.tensor(3.0)
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    model.register_parameter("frozen", frozen)
    state, forward, random = copy.deepcopy(model.state_dict()), model.forward, torch.get_rng_state()
    calibrate(model, teacher_batches(torch.tensor([1.3]))[:27], squared)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert list(model.state_dict()) == list(state)
    assert (model.training, model.dropout.training) == (True, False)
    assert (model.scale.requires_grad, frozen.requires_grad) == (True, False)
    assert float(model.scale.grad) == 3.0
    assert model.forward == forward


def test_a_loss_that_draws_at_random_draws_alike_at_every_temperature():
    def noisy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return squared(model, batch) + torch.rand(())

    found = calibrate(One(), teacher_batches(torch.tensor([1.0])), noisy, bounds=(0.5, 2.0))
    assert found.before == pytest.approx(found.after, abs=1e-6)
    assert not found.tells
    assert "cannot tell" in str(found)


def test_the_same_seed_gives_the_same_calibration():
    batches = teacher_batches(torch.tensor([1.6]))
    assert calibrate(One(), batches, squared, seed=3) == calibrate(One(), batches, squared, seed=3)


def test_the_interval_is_that_of_paired_differences():
    before = torch.randn(200, generator=torch.Generator().manual_seed(0)).tolist()
    change = torch.randn(200, generator=torch.Generator().manual_seed(1)) * 0.1 + 1.0
    low, high = paired_interval(before, [a + b for a, b in zip(before, change.tolist(), strict=True)])
    error = float(change.std()) / 200**0.5
    assert low == pytest.approx(float(change.mean()) - 1.96 * error, abs=0.2 * error)
    assert high == pytest.approx(float(change.mean()) + 1.96 * error, abs=0.2 * error)


def test_sites_that_are_not_named_and_sites_that_do_not_run_have_no_temperature():
    windows, model = text(32)[:30], shipped(1.7)
    found = calibrate(model, windows, loss, sites=["blocks.1", "blocks.3"], steps=2)
    assert list(found.temperatures) == ["blocks.1.attention", "blocks.3.attention"]
    assert not found.converged
    pair, batches = nn.ModuleDict({"used": One(), "idle": One()}), teacher_batches(torch.tensor([1.6]))
    found = calibrate(pair, batches, lambda _, batch: squared(pair["used"], batch))
    assert list(found.temperatures) == ["used"]


@pytest.mark.parametrize(
    ("count", "validation", "needed"), [(26, 0.3, 25), (15, 0.5, 16), (39, 0.2, 38), (79, 0.9, 76)]
)
def test_too_few_batches_are_refused_before_the_model_runs(count: int, validation: float, needed: int):
    def never(model: nn.Module, batch: Any) -> Tensor:
        raise AssertionError

    count = min(count, needed - 1)
    with pytest.raises(
        InputError, match=rf"too few batches \({count}\) to tell .* {needed} at validation={validation}"
    ):
        calibrate(One(), [torch.ones(1)] * count, never, validation=validation)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per": "token"}, r"calibrate\(per=...\) must be one of 'model', 'layer', 'head'; got 'token'"),
        ({"method": "anneal"}, r"calibrate\(method=...\) must be one of 'gradient', 'grid'"),
        ({"bounds": (1.5, 2.0)}, r"calibrate\(bounds=...\) must have 1 between them"),
        ({"bounds": (0.0, 2.0)}, r"calibrate\(bounds=...\) must be finite and above 0, got 0"),
        ({"bounds": 2.0}, r"calibrate\(bounds=...\) must be two numbers"),
        ({"validation": 1.0}, r"calibrate\(validation=...\) is a share between 0 and 1, got 1.0"),
        ({"steps": 0}, r"calibrate\(steps=...\) must be an int of at least 1, got 0"),
        ({"sites": ["nowhere"]}, r"^calibrate\(sites=.*matches no attention"),
    ],
)
def test_options_that_make_no_sense_are_told(options: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        calibrate(One(), teacher_batches(torch.tensor([1.2])), squared, **options)


def test_losses_that_cannot_be_used_are_told_and_the_model_is_given_back():
    batches, model = teacher_batches(torch.tensor([1.2])), One()
    wrong = {
        r"must return a finite scalar tensor, got Tensor \[2, 6, 4\]": lambda model, batch: model(batch[0]),
        r"must return a finite scalar tensor, got nan": lambda model, batch: squared(model, batch) * torch.nan,
        r"must return a finite scalar tensor, got float 0.0": lambda model, batch: 0.0,
        r"has no gradient in the temperatures.*method='grid'": lambda model, batch: squared(model, batch).detach(),
        r"runs none of the model's attention": lambda model, batch: batch[0].mean(),
    }
    for message, given in wrong.items():
        with pytest.raises(InputError, match=message):
            calibrate(model, batches, given)
    assert list(model.state_dict()) == ["scale"]
    detached = calibrate(model, batches, lambda model, batch: squared(model, batch).detach(), method="grid")
    assert detached.temperatures["One"] == pytest.approx((1.2,), rel=1e-3)


def test_wrapped_models_and_single_batches_are_refused():
    with pytest.raises(InputError, match="DataParallel is wrapped or split over processes"):
        calibrate(nn.DataParallel(One()), [], squared)
    with pytest.raises(InputError, match=r"calibrate\(batches\) must be an iterable of batches, got one Tensor"):
        calibrate(One(), torch.ones(40), squared)
    with pytest.raises(InputError, match=r"calibrate\(model\) must be an nn.Module, got str"):
        calibrate("gpt2", [], squared)  # type: ignore[arg-type]


# --- the result ---


def made(temperatures: dict[str, tuple[float, ...]], **more: Any) -> Calibration:
    given: dict[str, Any] = {
        "before": 2.0, "after": 1.5, "interval": (-0.6, -0.4), "per": "head", "method": "gradient", "fitting": 19,
        "held_out": 8, "evaluations": 12, "converged": True, "bounds": (0.25, 4.0),
    }  # fmt: skip
    return Calibration(temperatures=temperatures, **given | more)


def test_a_saved_calibration_is_read_back_equal(tmp_path: Path):
    found = made({"layers.0": (0.123456789012345, 2.0), "layers.1": (1.0, 3.0)})
    assert Calibration.load(found.save(tmp_path)) == found
    assert Calibration.load(found.save(tmp_path / "own.safetensors")) == found
    with pytest.raises(InputError, match="is not a file"):
        Calibration.load(tmp_path / "missing.safetensors")
    handle = attemper.temper(One())
    handle.save(tmp_path / "other.safetensors")
    with pytest.raises(InputError, match="not a file of the kind 'attemper-calibration'"):
        Calibration.load(tmp_path / "other.safetensors")


def test_json_and_table_say_the_same():
    found = made({"layers.0": (0.5, 2.0), "layers.1": (1.0, 3.99)}, converged=False)
    document = json.loads(found.to_json())
    assert document["schema"] == 1
    assert document["temperatures"] == {"layers.0": [0.5, 2.0], "layers.1": [1.0, 3.99]}
    assert (document["before"], document["after"], document["interval"]) == (2.0, 1.5, [-0.6, -0.4])
    assert (document["tells"], document["at_bounds"]) == (True, ["layers.1"])
    shown = str(found)
    assert "0.500 2.000" in shown
    assert "2.0000 -> 1.5000 (-0.5000, 95% interval -0.6000 to -0.4000)" in shown
    assert "cut off by steps=" in shown
    assert "Held by a bound of (0.25, 4.0): layers.1." in shown
    assert "do not use" in str(made({"a": (1.0,)}, after=2.5, interval=(0.4, 0.6)))


def test_apply_tempers_and_comes_off_again():
    model, batch = built("llama")
    plain = model(**batch).logits
    found = made({"model.layers.0.self_attn": (0.5, 2.0, 1.0, 3.0), "model.layers.1.self_attn": (1.5,)})
    with found.apply(model):
        assert not torch.equal(model(**batch).logits, plain)
    assert torch.equal(model(**batch).logits, plain)
    with pytest.raises(InputError, match=r"^Calibration\.apply\(sites=\[.nowhere.\]\) matches no attention"):
        made({"nowhere": (2.0,)}).apply(model)


# --- folding ---


def temperatures_of(model: nn.Module) -> dict[str, tuple[float, ...]]:
    """Another temperature for each head of each site."""
    with attemper.temper(model) as handle:
        sites = handle.sites
    return {site: tuple((0.6 + 0.3 * ((number + head) % 4)) for head in range(4)) for number, site in enumerate(sites)}


NORMED: dict[str, bool] = {"Gemma3": False, "Qwen3": False, "Olmo2": True, "Olmo3": True}
"""Models that normalise queries after their projection, and whether each head has its own part of the gain."""


def normed(name: str) -> tuple[Any, dict[str, Any]]:
    config = tf.Gemma3TextConfig if name == "Gemma3" else getattr(tf, f"{name}Config")
    model = from_config(getattr(tf, f"{name}ForCausalLM"), config(**GROUPED), attn_implementation="eager")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval(), inputs("decoder", None)


@pytest.mark.parametrize("name", [*FOLDED, *NORMED])
@pytest.mark.turns(2)
def test_a_folded_model_gives_what_the_tempered_one_gives(name: str):
    model, batch = normed(name) if name in NORMED else built(name)
    if name == "modernbert":  # in transformers 5.1 it takes its function from the registry in another way
        require_registry(type(model))
    if name == "gpt-oss":  # the grouped product of its experts takes no float64
        config: Any = model.config
        config._experts_implementation = "eager"
    model.double()
    batch = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
    plain, temperatures = output(model, batch), temperatures_of(model)
    if not NORMED.get(name, True):
        with pytest.raises(InputError, match=r"a gain that its heads share, and their temperatures differ.*per=.layer"):
            made(temperatures).fold(model)
        temperatures = {site: found[:1] for site, found in temperatures.items()}
    found = made(temperatures)
    with found.apply(model):
        tempered = output(model, batch)
    moved = (tempered - plain).abs().max()
    assert moved > 1e-6 * plain.abs().max()
    keys = list(model.state_dict())
    found.fold(model)
    assert list(model.state_dict()) == keys
    # Some models rotate in float32, whatever their weights are: that rounds a little of what the temperatures moved.
    assert (output(model, batch) - tempered).abs().max() <= 1e-5 * moved


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "deepseek_v3"])
def test_plain_transformers_reads_the_folded_checkpoint_and_gives_the_same(name: str, tmp_path: Path):
    model, batch = built(name)
    assert isinstance(model, tf.PreTrainedModel)
    found = made(temperatures_of(model))
    with found.apply(model):
        tempered = output(model, batch)
    found.fold(model)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, attn_implementation="eager").eval()
    torch.testing.assert_close(output(again, batch), tempered, rtol=1e-5, atol=1e-5)


def test_a_single_head_folds_into_the_gain_of_its_norm():
    class OneHead(NormWithoutGain):
        num_heads = 1

        def __init__(self) -> None:
            super().__init__()
            self.q_norm = nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            query, key = self.q_norm(self.q_proj(x))[:, None], self.k_proj(x)[:, None]
            return F.scaled_dot_product_attention(query, key, key)

    model, x = OneHead(), torch.randn(1, 3, 8)
    with made({"OneHead": (2.0,)}).apply(model):
        tempered = model(x)
    made({"OneHead": (2.0,)}).fold(model)
    torch.testing.assert_close(model(x), tempered)


DOUBTS = [
    ({"interval": (-0.2, 0.1)}, r"the 8 held-out batches cannot tell.*-0\.2000 to \+0\.1000, holds 0"),
    ({"after": 2.5, "interval": (0.4, 0.6)}, r"the held-out loss rises, 2\.0000 -> 2\.5000"),
    ({"bounds": (0.25, 1.5)}, r"held by a bound of \(0\.25, 1\.5\), at model\.layers\.0\.self_attn"),
]


@pytest.mark.parametrize(("more", "message"), DOUBTS)
def test_temperatures_that_are_in_doubt_are_folded_only_by_force(more: dict[str, Any], message: str):
    model: Any = built("llama")[0]
    before = copy.deepcopy(model.state_dict())
    weight = "model.layers.0.self_attn.q_proj.weight"
    found = made({"model.layers.0.self_attn": (1.49,)}, **more)
    with pytest.raises(InputError, match=rf"Calibration\.fold: .*{message}.*force=True\. The model was not changed"):
        found.fold(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    found.fold(model, force=True)
    assert not torch.equal(model.state_dict()[weight], before[weight])


def test_temperatures_in_no_doubt_say_so():
    assert made({"a": (1.49,)}).doubt is None
    assert "at a, b, c, d, and 2 more" in (made(dict.fromkeys("abcdef", (4.0,))).doubt or "")


def test_a_search_tells_after_each_batch_how_far_it_is():
    told: list[tuple[int, int]] = []
    found = calibrate(
        One(), teacher_batches(torch.tensor([1.6])), squared, steps=4, on_batch=lambda *numbers: told.append(numbers)
    )
    most = 2 * found.held_out + 4 * found.fitting
    assert told == [(number + 1, most) for number in range(2 * found.held_out + found.evaluations * found.fitting)]


def test_a_tempered_handle_folds_what_it_learned_and_comes_off():
    model, batch = built("gpt2")
    handle = attemper.temper(
        model, temperature=attemper.nn.LearnedTemperature(4) * attemper.nn.FixedTemperature([0.5, 1.0, 2.0, 1.0])
    )
    with torch.no_grad():
        for parameter in handle.parameters():
            parameter.copy_(torch.tensor([0.1, -0.2, 0.3, 0.0]))
    tempered = output(model, batch)
    handle.fold()
    torch.testing.assert_close(output(model, batch), tempered, rtol=1e-5, atol=1e-5)
    folded = output(model, batch)
    handle.fold()
    handle.remove()
    assert torch.equal(output(model, batch), folded)
    assert not any("attemper" in name for name in model.state_dict())
    handle = attemper.temper(model, temperature=attemper.nn.LengthTemperature(8))
    with pytest.raises(InputError, match=r"LengthTemperature.* is not the same for every query"):
        handle.fold()
    handle.remove()
    assert torch.equal(output(model, batch), folded)


def test_half_precision_weights_are_rounded_once():
    model: Any = built("llama")[0]
    model.to(torch.bfloat16)
    weight = model.model.layers[0].self_attn.q_proj.weight
    want = (weight.double() / 1.03).to(torch.bfloat16)
    made({"model.layers.0.self_attn": (1.03,)}).fold(model)
    assert (weight != want).float().mean() < 0.01  # the factor is float32


def test_what_cannot_be_folded_is_refused_and_nothing_is_changed():
    model: Any = built("llama")[0]
    sites = ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    weights = copy.deepcopy(model.state_dict())

    def refused(message: str, *temperatures: tuple[float, ...]) -> None:
        with pytest.raises(InputError, match=message):
            made(dict(zip(sites, temperatures, strict=True))).fold(model)
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())

    refused("model.layers.1.self_attn takes a temperature a head, 4 in all; got 3", (2.0,), (2.0, 2.0, 2.0))
    layers: Any = model.model.layers
    own = layers[1].self_attn.q_proj.weight
    layers[1].self_attn.q_proj.weight = layers[0].self_attn.q_proj.weight
    weights = copy.deepcopy(model.state_dict())
    refused(r"is shared: model.layers.0.self_attn.q_proj.weight, model.layers.1.self_attn", (1.0,), (2.0,))
    layers[1].self_attn.q_proj.weight = own
    nn.utils.parametrizations.weight_norm(layers[1].self_attn.q_proj)
    weights = copy.deepcopy(model.state_dict())
    refused("quantised, parametrised or has an adapter", (2.0,), (2.0,))


class Normalises(nn.Module):
    """Queries are normalised by a function, which no module tells."""

    num_heads = 2

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self._split(self.q_proj(x)), self._split(self.k_proj(x))
        return F.scaled_dot_product_attention(q, k, k)

    def _split(self, x: Tensor) -> Tensor:
        return F.normalize(x.unflatten(-1, (2, 4)).transpose(1, 2), dim=-1)


class Clips(Normalises):
    clip_qkv = 3.0

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (2, 4)).transpose(1, 2).clamp(-self.clip_qkv, self.clip_qkv)


class Gated(Normalises):
    head_dim = 2


class NormWithoutGain(Normalises):
    def __init__(self) -> None:
        super().__init__()
        self.q_norm = nn.LayerNorm(4, elementwise_affine=False)

    def _split(self, x: Tensor) -> Tensor:
        return self.q_norm(x.unflatten(-1, (2, 4)).transpose(1, 2))


class NormOfPairs(NormWithoutGain):
    def __init__(self) -> None:
        super().__init__()
        self.q_norm = nn.LayerNorm(2)


class ClipsWhatIsNormalised(NormWithoutGain):
    clip_qkv = 3.0

    def __init__(self) -> None:
        super().__init__()
        self.q_norm = nn.LayerNorm(4)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Normalises, r"the code of Normalises \(Normalises\) uses normalize"),
        (Clips, r"clips its queries \(clip_qkv\)"),
        (NormWithoutGain, r"without a learned gain of the queries alone"),
        (NormOfPairs, r"by a gain of shape \[2\], which is neither one head's \(4\) nor all heads' \(\[2, 4\] or 8\)"),
        (ClipsWhatIsNormalised, r"clips its queries \(clip_qkv\)"),
    ],
)
def test_queries_that_pass_more_than_their_projection_are_refused(kind: type[nn.Module], message: str):
    model = kind()
    weights = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError, match=message):
        made({kind.__name__: (2.0,)}).fold(model)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_a_projection_that_makes_more_than_queries_is_refused():
    Gated._split = Clips._split  # type: ignore[method-assign]
    with pytest.raises(InputError, match="makes a size of 4 a head, whose own is 2"):
        made({"Gated": (2.0,)}).fold(Gated())
