"""Whatever acts on a model ends with ``remove()``; the former name says so."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import attemper
from attemper.control.handle import Handle
from tests.control.models import built

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
