"""Whatever acts on a model ends with ``remove()``; the former name says so. Controls that cannot act say so: once, with
the sites, the reason and what to do.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import attemper
from attemper import InputError
from attemper.control.handle import NAMED, Handle, warn_idle
from tests.control.models import built, small

MAKE: dict[str, Callable[[Any], Handle]] = {
    "temper": lambda model: attemper.temper(model, temperature=2.0),
    "regularize": lambda model: attemper.regularize(model, attemper.ZLoss(coef=1.0)),
    "sigma_reparam_": lambda model: attemper.sigma_reparam_(model, which="qk"),
    "Thermostat": lambda model: attemper.Thermostat(model, target_entropy=1.0),
    "QKClip": attemper.QKClip,
}


@pytest.mark.parametrize("name", MAKE)
def test_what_acts_on_a_model_is_taken_off_by_remove_and_at_the_end_of_a_with(name: str):
    model, batch = built("llama")
    before, names = model(**batch).logits, [name for name, _ in model.named_modules()]
    handle = MAKE[name](model)
    handle.remove()
    handle.remove()
    with MAKE[name](model) as entered:
        assert type(entered) is type(handle)
    assert [name for name, _ in model.named_modules()] == names
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    torch.testing.assert_close(model(**batch).logits, before)
    assert hasattr(handle, "close") == (name in ("Thermostat", "QKClip"))


@pytest.mark.parametrize("name", ["Thermostat", "QKClip"])
def test_the_former_close_still_removes_and_says_the_new_name(name: str):
    model, _ = built("llama")
    handle: Any = MAKE[name](model)
    with pytest.warns(DeprecationWarning, match=rf"{name}\.close\(\) goes in attemper 0\.4; write \.remove\(\)"):
        handle.close()
    assert not model._forward_pre_hooks


IDS = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(1))


class Skipping(nn.Module):
    """Runs the first of its two layers only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(attemper.nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x, x, x)[0]


HIDDEN = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(2))


def test_a_thermostat_on_a_model_in_eval_mode_warns_once_in_60_steps():
    model = small()
    with attemper.Thermostat(model, target_entropy=1.0) as thermostat, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(60):
            model(IDS)
            assert thermostat.step() == {}
    (warning,) = told
    assert str(warning.message) == (
        "Thermostat: 2 sites had no effect in this step (blocks.0.attention: is in eval mode; blocks.1.attention: is "
        "in eval mode). Only training counts: call model.train() before the forward pass. Leave sites out with sites= "
        "if this is meant."
    )
    assert warning.filename == __file__


def test_a_thermostat_whose_model_goes_to_eval_mode_later_warns_then():
    model = small().train()
    with attemper.Thermostat(model, target_entropy=1.0) as thermostat:
        model(IDS)
        thermostat.step()
        model.eval()(IDS)
        with pytest.warns(UserWarning, match="2 sites had no effect in this step"):
            thermostat.step()


def test_a_thermostat_names_the_site_that_never_ran_and_only_that():
    model = Skipping().train()
    with attemper.Thermostat(model, target_entropy=1.0) as thermostat:
        model(HIDDEN)
        with pytest.warns(UserWarning, match=r"1 site had no effect so far \(layers.1: did not run\)"):
            thermostat.step()
        model(HIDDEN)
        thermostat.step()


def test_a_second_thermostat_on_the_same_sites_is_refused_until_the_first_is_closed():
    model = small().train()
    first = attemper.Thermostat(model, target_entropy=1.0, sites=["blocks.0.attention"])
    with pytest.raises(InputError, match=r"another Thermostat controls blocks\.0\.attention"):
        attemper.Thermostat(model, target_entropy=1.0)
    attemper.Thermostat(model, target_entropy=1.0, sites=["blocks.1.attention"]).remove()
    first.remove()
    attemper.Thermostat(model, target_entropy=1.0).remove()


def test_a_penalty_names_the_sites_that_do_not_count():
    model = small().train()
    model.blocks[1].eval()
    with attemper.regularize(model, attemper.EntropyBonus(0.1)) as penalty:
        with pytest.warns(
            UserWarning, match=r"regularize: 1 site had no effect so far \(blocks.1.attention: is in eval"
        ):
            penalty.attach(model(IDS).square().mean()).backward()
        penalty.attach(model(IDS).square().mean()).backward()


def test_a_clip_names_the_sites_that_it_did_not_see():
    model = Skipping().train()
    clip = attemper.QKClip(model, threshold=100.0)
    model(HIDDEN)
    with clip:
        with pytest.warns(UserWarning, match=r"QKClip: 1 site cannot be clipped \(layers.1: did not run\)"):
            clip.step()
        model(HIDDEN)
        clip.step()


def test_a_warning_names_few_sites_and_counts_the_others():
    reasons = {f"layers.{number}": "did not run" for number in range(NAMED + 2)}
    with pytest.warns(UserWarning, match=r"layers.3: did not run; and 2 more\)\. Leave sites out"):
        warn_idle("Thermostat", "6 sites had no effect so far", reasons)
