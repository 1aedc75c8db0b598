"""What takes ``sites=`` and is given a name that matches nothing, alone or beside one that matches."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import attemper
from attemper.errors import InputError
from tests.sites.own_models import Own, Tapped

X = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """Two attentions, and a module that attends to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.layers = nn.ModuleList([Own(), Tapped("stack.1")])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(self.norm(x)).transpose(1, 2).flatten(2)
        return x


def calibrate(model: nn.Module, **options: Any) -> object:
    return attemper.calibrate(model, [X] * 40, lambda one, batch: one(batch).square().mean(), **options)


ACT: dict[str, Callable[..., Any]] = {
    "temper": lambda model, **options: attemper.temper(model, temperature=2.0, **options),
    "regularize": lambda model, **options: attemper.regularize(model, attemper.ZLoss(1e-3), **options),
    "calibrate": calibrate,
    "sigma_reparam_": attemper.sigma_reparam_,
    "Thermostat": lambda model, **options: attemper.Thermostat(model, target_entropy=1.0, **options),
    "QKClip": attemper.QKClip,
}
"""What acts on modules: these are there, so a name that matches none is a mistake."""


def test_the_table_has_all_that_take_sites() -> None:
    named = {name: getattr(attemper, name) for name in attemper.__all__}
    ours = {name: one for name, one in named.items() if callable(one) and not name.endswith("Error")}
    takes = {name for name, one in ours.items() if "sites" in inspect.signature(one).parameters}
    assert takes == {*ACT, "watch", "AlarmLimits"}  # patterns of sites that a run may have


@pytest.mark.parametrize("name", ACT)
@pytest.mark.parametrize(
    ("good", "wrong", "near"),
    [
        ([], "layers.o", "Did you mean '"),
        (["layers.0"], "layers.o", "Did you mean '"),
        (["layers.0"], "norm", "They are: "),
    ],
    ids=["alone", "beside a good one", "a module of another kind"],
)
def test_a_name_that_matches_nothing_is_an_error_that_names_those_that_do(
    name: str, good: list[str], wrong: str, near: str
) -> None:
    model = Model()
    before = [key for key, _ in model.named_parameters()]
    with pytest.raises(
        InputError, match=rf"^{name}\(sites=\['{re.escape(wrong)}'\]\) matches no .*{near}.*layers"
    ) as told:
        ACT[name](model, sites=[*good, wrong])
    assert "layers.0" in str(told.value)
    assert [key for key, _ in model.named_parameters()] == before
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in model.modules())


@pytest.mark.parametrize("name", ACT)
def test_names_that_match_are_taken(name: str) -> None:
    if name != "calibrate":
        ACT[name](Model(), sites=["layers.0", "layers"]).remove()


def first_step(sites: list[str]) -> tuple[list[str], attemper.types.Watch]:
    """What the first step of a watch tells, and the watch."""
    model = Model()
    with warnings.catch_warnings(record=True) as told, attemper.watch(model, sites=sites) as watch:
        warnings.simplefilter("always")
        for _ in range(2):
            model(X)
            watch.step()
    return [str(one.message) for one in told], watch


def test_a_watch_tells_with_its_first_step_of_a_name_that_neither_a_module_nor_a_tap_had() -> None:
    told, watch = first_step(["layers.0", "layers.o", "stack.2"])
    assert len(told) == 1
    assert "layers.o: no module has this name, and no tap of this name ran. Did you mean 'layers." in told[0]
    assert "stack.2: no module has this name, and no tap of this name ran" in told[0]
    assert [site.name for site in watch.table().sites] == ["layers.0"]
    assert [one.name for one in watch.table().skipped] == ["layers.o", "stack.2"]


@pytest.mark.parametrize("name", ["stack.1", "stack", "layers.1", "layers.0#1", "layers"])
def test_a_watch_takes_names_of_modules_calls_and_taps_and_what_they_are_below(name: str) -> None:
    told, watch = first_step([name])
    assert told == []
    assert watch.table().sites
    assert not watch.table().skipped


def test_a_watch_tells_of_a_name_that_matches_nothing_where_it_is_the_only_one() -> None:
    told, watch = first_step(["layers.o"])
    assert len(told) == 1
    assert "matches none of the sites that were seen" in told[0]
    with pytest.raises(InputError, match="matches none of the sites that were seen"):
        watch.table()
