"""Training runs: the protocol, the same bits again, interventions that act, and branches from the alarm."""

from __future__ import annotations

import json
import math
from functools import cache
from typing import Any

import pytest
import torch

import attemper
from attemper.errors import InputError
from attemper.lab.model import Attention
from attemper.lab.trained import interventions, training
from attemper.lab.trained.interventions import (
    BRANCHES,
    INTERVENTIONS,
    Control,
    GatedAttention,
    QueryKeyRates,
    add_gates,
    configure,
)
from attemper.lab.trained.training import Run, adamw, held_out_loss, held_out_windows, one_step, start, trained
from tests.support.small_runs import CONFIG, corpus, small


def test_the_rate_rises_to_its_peak_and_falls_to_nearly_nothing():
    run = Run(rate=1.0, steps=100, warmup=0.1)
    rates = [run.learning_rate(step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert rates[99] < 1e-3
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert Run(rate=1.0, steps=100, warmup=0.0).learning_rate(0) == 1.0


@pytest.mark.parametrize("rate", [1e-3, 1e-1])
def test_a_step_at_the_peak_takes_the_same_share_off_a_matrix_whatever_the_rate(rate: float):
    model = start(small())[0].model
    run = small(rate=rate, decay=0.125)
    before = model.blocks[0].attention.q_proj.weight.detach().clone()  # type: ignore[union-attr]
    gain = model.norm.weight.detach().clone()
    optimizer = adamw(model, run)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert model.blocks[0].attention.q_proj.weight.detach() == pytest.approx(0.875 * before, rel=1e-6)  # type: ignore[union-attr]
    assert torch.equal(model.norm.weight, gain)


@pytest.mark.slow("takes many seconds")
def test_a_run_learns_and_gives_the_same_bits_again():
    record = trained(small(steps=60, rate=1e-2), corpus())
    assert record["held_out"] < 0.9 * record["held_out_at_start"]
    assert record["diverged_at"] is None
    assert record["branches"] == {}
    curve = record["curve"]
    assert curve["measured"] == list(range(0, 60, 3))
    assert len(curve["losses"]) == len(curve["gradient_norms"]) == 60
    assert len(curve["max_logits"]) == len(curve["entropies"]) == 20
    assert all(0 < value <= 1 for layers in curve["entropies"] for value in layers)
    assert json.dumps(plain()) == json.dumps(trained(small(rate=1e-2), corpus()))


def test_measured_logits_and_entropies_are_those_of_the_batch_that_was_trained_on():
    run = small(steps=1)
    batch = training.drawn_windows(corpus().training, run.batch, 17, 1)[:, :-1]
    sites = attemper.scan(start(run)[0].model, [batch]).sites
    curve = trained(run, corpus())["curve"]
    heads = [[head.normalized_entropy or 0.0 for head in site.heads] for site in sites]
    assert curve["entropies"] == [[pytest.approx(sum(layer) / 2, abs=1e-5) for layer in heads]]
    assert curve["max_logits"] == [
        pytest.approx(max(head.max_logit or 0.0 for s in sites for head in s.heads), rel=1e-5)
    ]


@cache
def plain() -> dict[str, Any]:
    """A short run without an intervention."""
    return trained(small(rate=1e-2), corpus())


@pytest.mark.parametrize("name", INTERVENTIONS)
@pytest.mark.quick("QK-norm", "EntropyTarget")
def test_every_intervention_trains_and_starts_from_the_same_loss_or_says_why_not(name: str):
    record = trained(small(intervention=name, rate=1e-2), corpus())
    assert len(record["curve"]["losses"]) == 8
    assert record["held_out"] < record["held_out_at_start"]
    assert record["held_out_at_start"] == pytest.approx(plain()["held_out_at_start"], rel=1e-2)


def test_qk_norm_is_a_configuration_and_an_unknown_name_lists_the_known():
    assert configure(CONFIG, "QK-norm").qk_norm
    assert configure(CONFIG, "QKClip") == CONFIG
    with pytest.raises(InputError, match=r"intervention must be one of 'plain', 'QK-norm', .*; got 'nothing'"):
        configure(CONFIG, "nothing")


@pytest.mark.slow("takes many seconds")
def test_clipping_holds_what_would_pass_the_threshold(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(interventions, "THRESHOLD", 2.0)
    clipped = trained(small(intervention="QKClip", rate=3e-2, steps=30), corpus())
    plain = trained(small(rate=3e-2, steps=30), corpus())
    assert max(plain["curve"]["max_logits"]) > 4
    assert max(clipped["curve"]["max_logits"][3:]) < 0.75 * max(plain["curve"]["max_logits"])


def test_rates_of_queries_and_keys_fall_as_the_weights_of_the_other_grow():
    model = start(small())[0].model
    layer: Any = model.blocks[0]
    query, key = layer.attention.q_proj.weight, layer.attention.k_proj.weight
    rates = QueryKeyRates(model, relative_rate=0.5)
    with torch.no_grad():
        key[:8] *= 4
    before = query.detach().clone(), key.detach().clone()
    rates.remember(torch.zeros(()))
    with torch.no_grad():
        query += 1
        key += 1
    rates.step()
    moved = (query - before[0])[:, 0], (key - before[1])[:, 0]
    assert moved[0].tolist() == pytest.approx([0.125] * 8 + [0.5] * 8, rel=1e-4)
    assert moved[1].tolist() == pytest.approx([0.5] * 16, rel=1e-4)


def test_a_gate_that_is_wide_open_is_the_model_without_it():
    model, ids = start(small())[0].model, corpus().training[:17].long()[None]
    before = model(ids)
    add_gates(model)
    gated = model(ids)
    assert not torch.allclose(gated, before, atol=1e-4)
    for layer in model.modules():
        if isinstance(layer, GatedAttention):
            torch.nn.init.zeros_(layer.gate_proj.weight)
            layer.o_proj.weight.data.mul_(2)
    torch.testing.assert_close(model(ids), before)


def test_softmax_plus_one_lets_a_row_give_its_weight_to_no_key():
    state, control = start(small(intervention="softmax-plus-one"))
    ids = corpus().training[:17].long()[None]
    plus_one = state.model(ids)
    control.close()
    for layer in state.model.modules():
        if isinstance(layer, Attention):
            layer.attend = _with_a_key_of_zeros
    torch.testing.assert_close(plus_one, state.model(ids), rtol=1e-4, atol=1e-5)


def _with_a_key_of_zeros(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    length = query.shape[2]
    visible = torch.ones(length, length + 1, dtype=torch.bool).tril(1)
    key, value = (torch.nn.functional.pad(x, (0, 0, 1, 0)) for x in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=visible)


@pytest.fixture(scope="module")
def alarmed() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (interventions, training):
            patch.setattr(module, "THRESHOLD", 5.0)
        return trained(small(rate=6e-2, steps=24, branch=True), corpus())


@pytest.mark.slow("takes many seconds")
def test_branches_go_on_from_the_alarm_with_the_same_past_and_another_future(alarmed: dict[str, Any]):
    assert list(alarmed["branches"]) == list(BRANCHES)
    curve = alarmed["curve"]
    alarm = next(step for step, logit in zip(curve["measured"], curve["max_logits"], strict=True) if logit > 5.0)
    assert 0 < alarm < 20
    for name, branch in alarmed["branches"].items():
        losses = branch["curve"]["losses"]
        assert len(losses) == 24, name
        # The step after the alarm still has the weights and the bytes of the unchanged run.
        assert losses[: alarm + 2] == curve["losses"][: alarm + 2], name
        assert losses[alarm + 3 :] != curve["losses"][alarm + 3 :], name
    assert max(alarmed["branches"][BRANCHES[1]]["curve"]["max_logits"][-3:]) < max(curve["max_logits"][-3:])


@pytest.mark.slow("takes many seconds")
def test_a_branch_leaves_the_unchanged_run_as_it_would_be_without(alarmed: dict[str, Any]):
    assert alarmed["curve"] == trained(small(rate=6e-2, steps=24), corpus())["curve"]


def test_a_run_whose_loss_is_no_number_ends_there_and_says_so(monkeypatch: pytest.MonkeyPatch):
    def broken(model: Any, total_steps: int) -> Control:
        def step() -> None:
            with torch.no_grad():
                model.norm.weight.fill_(math.nan)

        return Control(step=step)

    monkeypatch.setitem(INTERVENTIONS, "plain", broken)
    record = trained(small(), corpus())
    assert (record["diverged_at"], record["held_out"]) == (1, None)
    assert record["signs"]["loss"] == 1


def test_a_step_leaves_the_model_in_training_and_held_out_text_does_not_train_it():
    run = small()
    state, control = start(run)
    assert one_step(run, corpus(), state, control)
    before = [parameter.detach().clone() for parameter in state.model.parameters()]
    held_out_loss(state.model, held_out_windows(run, corpus()))
    assert state.model.training
    assert all(torch.equal(one, other) for one, other in zip(before, state.model.parameters(), strict=True))
