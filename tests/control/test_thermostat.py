"""Thermostat: entropies come to their target and stay, without a swing; bands, schedules, biases, checkpoints."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import attemper
from attemper import InputError
from attemper.call.request import Options, request_of
from attemper.control.entropy_meter import slope_of
from tests.control.models import built, checkpointed, small

IDS = torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(1))


def held(model: nn.Module, batch: Any, thermostat: attemper.Thermostat, steps: int) -> list[Any]:
    found = []
    for _ in range(steps):
        model(**batch) if isinstance(batch, dict) else model(batch)
        found.append(thermostat.step())
    return found


@pytest.mark.parametrize("per", ["head", "layer"])
@pytest.mark.parametrize(("target", "unit"), [(0.6, "normalized"), (0.95, "normalized"), (1.0, "nats")])
@pytest.mark.quick("0.6-normalized-head", "nats-layer")
def test_entropies_come_to_the_target_from_one_side(target: float, unit: str, per: str):
    model = small().train()
    with attemper.Thermostat(model, target_entropy=target, unit=unit, per=per, rows=None, max_step=0.5) as thermostat:
        readings = held(model, IDS, thermostat, 25)
    for site in thermostat.sites:
        path = torch.stack([reading[site].entropy for reading in readings])
        away = path - target
        torch.testing.assert_close(path[-1], torch.full_like(path[-1], target), rtol=0, atol=2e-3)
        # Never further away than the step before, and never much past the target. Layers before a site move it too.
        if site == thermostat.sites[0]:
            assert (away[1:].abs() <= away[:-1].abs() + 1e-6).all()
        assert (away * away[0].sign() > -0.02).all()
        if per == "layer":
            assert len(set(readings[-1][site].temperature.tolist())) == 1


def test_the_reported_entropy_is_the_scans():
    model = small().train()
    with attemper.Thermostat(model, target_entropy=0.6, unit="normalized", rows=None) as thermostat:
        held(model, IDS, thermostat, 10)
        model(IDS)
        reading = {name: meter.sums for name, meter in thermostat._meters.items()}
        scanned = attemper.scan(model.eval(), [IDS])
    for site in scanned.sites:
        sums = reading[site.name]
        assert sums is not None
        found = [head.normalized_entropy for head in site.heads]
        torch.testing.assert_close(sums.total[0] / sums.total[2], torch.tensor(found).double(), rtol=0, atol=2e-3)


def test_inside_a_band_nothing_moves():
    model = small().train()
    with attemper.Thermostat(model, target_entropy=(0.1, 1.0), unit="normalized") as thermostat:
        held(model, IDS, thermostat, 3)
        assert all((value == 1).all() for value in thermostat.temperatures.values())


def test_a_schedule_is_asked_for_the_steps_that_are_over():
    model, asked = small().train(), []

    def target(step: int, total: int) -> float:
        asked.append((step, total))
        return 0.5

    with attemper.Thermostat(model, target_entropy=target, unit="normalized", total_steps=7) as thermostat:
        asked.clear()  # the target is checked when the thermostat is made
        held(model, IDS, thermostat, 3)
        assert asked == [(0, 7), (1, 7), (2, 7)]
        thermostat.load_state_dict(thermostat.state_dict() | {"steps": 5})
        held(model, IDS, thermostat, 1)
    assert asked[3:] == [(5, 7)]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "bert", "nn.MultiheadAttention"])
@pytest.mark.quick("gpt-oss", "MultiheadAttention")
def test_models_of_every_way_in(name: str):
    model, batch = built(name)
    model.train()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    with attemper.Thermostat(model, target_entropy=0.8, unit="normalized", rows=None, max_step=0.5) as thermostat:
        readings = held(model, batch, thermostat, 30)
    for reading in readings[-1].values():
        reached = (reading.entropy - 0.8).abs() < 5e-3
        assert (reached | reading.bounded).all()
        assert reached.any()


class Biased(nn.Module):
    """One row whose entropy falls with temperature: y = [0, 3, 3, 3], bias = [6, 0, 0, 0]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = torch.ones(1, 1, 1, 1)
        key = torch.tensor([0.0, 3.0, 3.0, 3.0]).view(1, 1, 4, 1)
        bias = torch.tensor([6.0, 0.0, 0.0, 0.0]).view(1, 1, 1, 4)
        return nn.functional.scaled_dot_product_attention(query, key, key, bias, scale=1.0) * x


def test_with_a_bias_it_turns_and_does_not_run_away():
    model = Biased().train()
    with attemper.Thermostat(model, target_entropy=0.6, rows=None, max_step=0.2) as thermostat:
        model(torch.ones(1))
        first = thermostat.step()["Biased"]
        assert first.slope.item() < 0
        readings = held(model, torch.ones(1), thermostat, 30)
    torch.testing.assert_close(readings[-1]["Biased"].entropy, torch.tensor([0.6]).double(), rtol=0, atol=1e-4)
    # A target that no temperature reaches: it comes to rest, inside its bounds.
    with attemper.Thermostat(model, target_entropy=1.38, rows=None, max_step=0.2) as thermostat:
        readings = held(model, torch.ones(1), thermostat, 60)
    last = [reading["Biased"].temperature.item() for reading in readings[-5:]]
    assert max(last) - min(last) < 0.05 * max(last)
    assert 0.01 <= last[-1] <= 100.0


def test_an_unreachable_target_stops_at_the_bound_and_says_so():
    model = small().train()
    with attemper.Thermostat(model, target_entropy=50.0, rows=None, max_step=1.0) as thermostat:
        readings = held(model, IDS, thermostat, 12)
    reading = readings[-1]["blocks.0.attention"]
    assert reading.bounded.all()
    torch.testing.assert_close(reading.temperature, torch.full((2,), 100.0).double())


def test_checkpointing_counts_rows_once_and_accumulation_adds():
    model, batch = built("llama")
    model.train()
    with attemper.Thermostat(model, target_entropy=0.8, unit="normalized", rows=None) as thermostat:
        meter = next(iter(thermostat._meters.values()))
        model(**batch, use_cache=False)
        assert meter.sums is not None
        once = meter.sums.total.clone()
        for reentrant in (True, False):
            thermostat.step()
            for name in thermostat.sites:
                thermostat._temperatures[name].set(torch.zeros(4))
            checkpointed(model, reentrant)
            for _ in range(2):
                model(**batch, use_cache=False)[0].sum().backward()
            torch.testing.assert_close(meter.sums.total, 2 * once)


@pytest.mark.slow("takes many seconds")
def test_a_compiled_model_is_held_in_one_graph():
    model = small().train()
    thermostat = attemper.Thermostat(model, target_entropy=0.6, unit="normalized", rows=None, max_step=0.5)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    readings = {}
    for _ in range(25):
        compiled(IDS).sum().backward()
        readings = thermostat.step()
    # The heads are known after the first step: one compilation more, and no other.
    assert counter.frame_count <= 2
    assert all((reading.entropy - 0.6).abs().max() < 2e-3 for reading in readings.values())


def test_a_checkpoint_goes_on_where_it_was():
    model = small().train()
    with attemper.Thermostat(model, target_entropy=0.6, unit="normalized", rows=None) as thermostat:
        held(model, IDS, thermostat, 4)
        state = thermostat.state_dict()
        expected = held(model, IDS, thermostat, 2)[-1]
    with attemper.Thermostat(model, target_entropy=0.6, unit="normalized", rows=None) as thermostat:
        thermostat.load_state_dict(state)
        assert thermostat.steps == 4
        found = held(model, IDS, thermostat, 2)[-1]
        for site, reading in expected.items():
            assert torch.equal(found[site].temperature, reading.temperature)
        with pytest.raises(InputError, match="other sites"):
            thermostat.load_state_dict({"steps": 1, "log_temperatures": {}})
        with pytest.raises(InputError, match="must have steps"):
            thermostat.load_state_dict({})
        state["log_temperatures"]["blocks.0.attention"] = torch.zeros(3)
        with pytest.raises(InputError, match=r"the heads of .* are 2, and \[3\]"):
            thermostat.load_state_dict(state)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"target_entropy": -1.0}, "target_entropy"),
        ({"target_entropy": 1.2, "unit": "normalized"}, "at most 1"),
        ({"target_entropy": (0.9, 0.3)}, "target_entropy"),
        ({"target_entropy": lambda step, total: 1.0}, "total_steps"),
        ({"target_entropy": 1.0, "per": "row"}, "per"),
        ({"target_entropy": 1.0, "rows": 0}, "rows"),
        ({"target_entropy": 1.0, "rate": 0.0}, "rate"),
        ({"target_entropy": 1.0, "floor": 2.0}, "1 between"),
        ({"target_entropy": 1.0, "sites": ["nowhere"]}, "matches no attention"),
    ],
)
def test_mistakes_are_told(given: dict[str, Any], message: str):
    model = small().train()
    with pytest.raises(InputError, match=message):
        attemper.Thermostat(model, **given)
    assert not any("attemper" in name for name, _ in model.named_modules())


class OneHot(nn.Module):
    """Rows that see one key above all others, under a mask that is added."""

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = torch.full((1, 1, 6, 1), 40.0)
        key = torch.arange(6.0).view(1, 1, 6, 1)
        return nn.functional.scaled_dot_product_attention(query, key, key, self.mask, scale=1.0) * x


def test_a_collapsed_head_is_rescued_whatever_the_type_of_its_mask():
    hidden = torch.ones(6, 6).triu(1).bool()
    added = torch.zeros(6, 6).masked_fill(hidden, torch.finfo(torch.float32).min)
    for mask in (~hidden, added):
        model = OneHot(mask).train()
        with attemper.Thermostat(model, target_entropy=1.0, rows=None, max_step=0.5) as thermostat:
            readings = held(model, torch.ones(1), thermostat, 40)
        torch.testing.assert_close(readings[-1]["OneHot"].entropy, torch.tensor([1.0]).double(), rtol=0, atol=1e-3)


def test_slopes_of_rows_that_a_kernel_picks_are_those_rows():
    query, key = torch.randn(2, 2, 9, 4), torch.randn(2, 2, 9, 4)
    bias = torch.randn(1, 1, 9, 9)
    options = Options(is_causal=True, stats=("entropy", "logit_variance"), backend="blocked")
    whole = request_of("test", query, key, None, bias, options).problem
    every = slope_of(whole, torch.zeros(2, 2, 9))
    rows = torch.tensor([1, 4, 8])
    found = slope_of(replace(whole, rows=rows), torch.zeros(2, 2, 3))
    torch.testing.assert_close(found, every[..., rows])


def test_half_precision_keeps_the_steps_of_the_thermostat():
    model = small().train().bfloat16()
    with attemper.Thermostat(model, target_entropy=0.6, unit="normalized", max_step=1e-4, rows=None) as thermostat:
        held(model, IDS, thermostat, 20)
        logs = thermostat.state_dict()["log_temperatures"]["blocks.0.attention"]
    torch.testing.assert_close(logs, torch.full((2,), -20e-4).double())
