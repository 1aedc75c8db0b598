"""What a temperature or a normalizer that was given becomes in the model: itself, a copy for each site, or one for all;
its type; what the handle shows of it.
"""

from __future__ import annotations

import copy
import gc
import math
import warnings
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import attemper
from attemper.control import temper as control
from attemper.lab.model import ByteModel
from attemper.nn import (
    ConditionalTemperature,
    Entmax,
    FixedTemperature,
    LearnedTemperature,
    LengthTemperature,
    ScheduledTemperature,
    Sink,
    TopK,
)
from tests.control.models import small

IDS = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(1))
ONE, TWO = "blocks.0.attention", "blocks.1.attention"


@pytest.fixture
def earlier() -> int:
    """Originals that tests before this one have left alive."""
    gc.collect()
    return len(control._originals)


def scheduled() -> ScheduledTemperature:
    return ScheduledTemperature(attemper.schedules.curriculum(2.0, 0.5), 10)


def trained(model: ByteModel, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model.loss(IDS).backward()
    optimizer.step()


# --- itself, or a copy for each site ---


@pytest.mark.parametrize(
    "given",
    [
        lambda a, b: [a, b],
        lambda a, b: {ONE: a, TWO: b},
        lambda a, b: {"blocks.0": a, "blocks.1": b},
    ],
)
def test_a_module_in_a_list_or_a_mapping_stands_itself_at_its_site_and_its_optimizer_trains_it(given: Any):
    model, one, two = small(), LearnedTemperature(2), LearnedTemperature(2)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=1.0)
    handle = attemper.temper(model, temperature=given(one, two))
    assert handle.temperatures[ONE] is one
    assert handle.temperatures[TWO] is two
    trained(model, optimizer)
    assert all((part.value() != 1).any() for part in (one, two))


def test_a_module_for_a_single_site_stands_there_itself():
    model, one, sink = small(), LearnedTemperature(2), Sink(2)
    handle = attemper.temper(model, temperature=one, normalizer=sink, sites=["blocks.0"])
    assert handle.temperatures[ONE] is one
    assert handle.normalizers[ONE] is sink


def test_the_same_module_twice_in_a_list_is_one_for_both_sites(tmp_path: Any):
    model, one = small(), LearnedTemperature(2, initial=1.5)
    handle = attemper.temper(model, temperature=[one, one])
    assert list(handle.parameters()) == list(one.parameters())
    handle.save(tmp_path)
    twin = attemper.temper(small(), temperature=LearnedTemperature(2))
    twin.load(tmp_path)
    assert torch.equal(twin.model(IDS), model(IDS))


@pytest.mark.parametrize(
    "make",
    [lambda: LearnedTemperature(2), lambda: ConditionalTemperature(32, 2), lambda: LearnedTemperature(2) * scheduled()],
)
def test_one_module_for_several_sites_learns_at_each_and_whoever_trains_the_original_is_told_once(
    make: Any, earlier: int
):
    model, original = small(), make()
    optimizer = torch.optim.SGD([*original.parameters(), *model.parameters()], lr=1.0)
    handle = attemper.temper(model, temperature=original)
    assert all(part is not original for part in handle.temperatures.values())
    assert len(set(handle.parameters())) == 2 * len(list(original.parameters()))
    called: list[Any] = []
    another = register_optimizer_step_post_hook(lambda *_: called.append(1))  # a hook after ours
    with pytest.warns(UserWarning, match=r"given for several sites, and it has no gradient.*handle\.parameters\(\)"):
        trained(model, optimizer)
    trained(model, optimizer)  # once
    another.remove()
    assert len(called) == 2
    assert len(control._originals) == earlier


def test_the_original_of_a_normalizer_is_told_alike():
    model, original = small(), Entmax(1.5, learned=True, num_heads=2)
    optimizer = torch.optim.SGD(original.parameters(), lr=1.0)
    handle = attemper.temper(model, normalizer=original)
    assert len(list(handle.parameters())) == 2
    with pytest.warns(UserWarning, match="log_excess of the Entmax"):
        trained(model, optimizer)


def test_nobody_is_told_who_trains_the_copies_or_an_original_that_has_a_place_of_its_own(earlier: int):
    model, original = small(), LearnedTemperature(2, initial=2.0)
    handle = attemper.temper(model, temperature=original)
    trained(model, torch.optim.SGD(handle.parameters(), lr=1.0))
    optimizer = torch.optim.SGD(original.parameters(), lr=1.0)
    original.value().sum().backward()
    optimizer.step()
    del original, optimizer
    gc.collect()
    trained(model, torch.optim.SGD(handle.parameters(), lr=1.0))
    assert len(control._originals) == earlier  # none is left to look for


# --- schedules ---


@pytest.mark.parametrize("given", [lambda s: s, lambda s: [s, s], lambda s: {"blocks": s}])
def test_a_schedules_step_moves_every_site(given: Any):
    model, schedule = small(), scheduled()
    handle = attemper.temper(model, temperature=given(schedule))
    before = model(IDS)
    schedule.step(10)
    assert {name: value.item() for name, value in handle.values().items()} == {ONE: 0.5, TWO: 0.5}
    with attemper.temper(small(), temperature=0.5) as other:
        assert torch.equal(model(IDS), other.model(IDS))
    assert not torch.equal(model(IDS), before)
    handle.step()  # by one for all sites that share it
    assert int(schedule.steps) == 11


def test_a_scheduled_factor_is_shared_and_the_learned_one_is_not():
    schedule = scheduled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle = attemper.temper(small(), temperature=LearnedTemperature(2) * schedule)
    one, two = (list(part.get_submodule("factors").children()) for part in handle.temperatures.values())
    assert one[0] is not two[0]
    assert one[1] is two[1] is schedule


def test_a_model_with_a_shared_schedule_is_copied_and_saved_as_any_other():
    model, schedule = small(), scheduled()
    attemper.temper(model, temperature=schedule)
    schedule.step(7)
    state = model.state_dict()
    assert save(state)  # takes no tensors that share their memory
    twin = copy.deepcopy(model)
    schedule.step(0)
    assert int(twin.state_dict()[f"{TWO}.attemper_temperature.steps"]) == 7
    other = small()
    attemper.temper(other, temperature=scheduled())
    other.load_state_dict(state)
    assert torch.equal(other(IDS), twin(IDS))


# --- types ---

KINDS: dict[str, Any] = {
    "number": lambda: 0.7,
    "fixed": lambda: FixedTemperature([0.7, 1.3]),
    "learned": lambda: LearnedTemperature(2, initial=1.5),
    "conditional": lambda: ConditionalTemperature(32, 2, initial=1.5),
    "length": lambda: LengthTemperature(4),
    "scheduled": lambda: ScheduledTemperature(attemper.schedules.constant(0.7), 10),
    "product": lambda: LengthTemperature(4) * LearnedTemperature(2, initial=1.5) * 0.7,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.turns(2)
def test_a_float64_model_has_float64_temperatures_whenever_it_became_one(kind: str, later: bool):
    model = small() if later else small().double()
    handle = attemper.temper(model, temperature=KINDS[kind]())
    model.double()
    part, query, hidden = handle.temperatures[ONE], torch.zeros(2, 2, 5, 16).double(), torch.randn(2, 5, 32).double()
    found = part(query, hidden=hidden, visible_keys=torch.arange(2, 7))
    assert found.dtype == torch.float64
    assert all(parameter.dtype == torch.float64 for parameter in handle.parameters())
    if kind in ("number", "fixed", "scheduled"):
        assert found.flatten()[0].item() == 0.7
    if kind == "length":
        assert found.flatten()[1].item() == pytest.approx(math.log(4) / math.log(3), rel=1e-15)


@pytest.mark.parametrize("way", ["own", "torch"])
def test_a_temperature_is_learned_at_float64_precision(way: str):
    kind = attemper.nn.MultiheadAttention if way == "own" else nn.MultiheadAttention
    model, x = kind(8, 2, batch_first=True).double(), torch.randn(2, 5, 8).double()
    handle = attemper.temper(model, temperature=LearnedTemperature(2, initial=1.5))
    (parameter,) = handle.parameters()

    def loss() -> torch.Tensor:
        return model(x, x, x, need_weights=False)[0].square().sum()

    (gradient,) = torch.autograd.grad(loss(), parameter)
    step, sides = 1e-5, []
    for side in (step, -step):
        with torch.no_grad():
            parameter[0] += side
            sides.append(loss())
            parameter[0] -= side
    # The error of a central difference in float64; float32 would leave 1e-2 of it.
    assert float((sides[0] - sides[1]) / (2 * step)) == pytest.approx(float(gradient[0]), rel=1e-6)


def test_a_half_precision_model_keeps_its_temperatures_in_float32():
    handle = attemper.temper(small().bfloat16(), temperature=LearnedTemperature(2, initial=1.003))
    assert {parameter.dtype for parameter in handle.parameters()} == {torch.float32}


# --- what the handle shows ---


def test_the_handle_shows_what_stands_where_with_its_numbers():
    model = small()
    given = [LearnedTemperature(2) * FixedTemperature(0.5), scheduled()]
    handle = attemper.temper(model, temperature=given, normalizer=Entmax(torch.tensor([1.3, 1.7]), learned=True))
    with torch.no_grad():
        given[0].factors[0].log_temperature.copy_(torch.tensor([0.25, 2.0]).log())  # pyright: ignore[reportAttributeAccessIssue]
    given[1].step(4)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    assert str(handle).splitlines() == [
        "ByteModel, tempered at 2 sites",
        "  blocks.0.attention  LearnedTemperature 0.25 2 x FixedTemperature 0.5; Entmax alpha 1.3 1.7",
        "  blocks.1.attention  ScheduledTemperature 1.4 at step 4 of 10; Entmax alpha 1.3 1.7",
    ]
    handle.remove()
    assert str(handle).startswith("ByteModel, no more tempered at 2 sites")


def test_many_heads_and_modules_without_a_number_are_shown_in_one_line():
    heads = torch.linspace(0.5, 2.0, 20)
    handle = attemper.temper(small(heads=1), temperature=heads, normalizer=TopK(4), sites=["blocks.0"])
    (line,) = str(handle).splitlines()[1:]
    assert line.endswith("1.684 ... (20 heads, 0.5 to 2); TopK(k=4)")
    handle = attemper.temper(small(), temperature=LengthTemperature(64), normalizer="entmax15", sites=["blocks.0"])
    assert str(handle).endswith("LengthTemperature(reference=64, law='log'); Entmax15")
    handle = attemper.temper(small(), temperature=LearnedTemperature(2), sites=["blocks.0"])
    assert str(handle).endswith("LearnedTemperature 1 (2 heads)")
