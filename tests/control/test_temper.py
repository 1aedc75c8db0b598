"""temper: the bits stay at 1, other temperatures act as query weights divided by them, in every way in and under all
that training brings.
"""

import copy
import importlib
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import attemper
from attemper import InputError
from attemper.call.request import Options
from attemper.lab.model import Attention
from attemper.nn import ConditionalTemperature, FixedTemperature, LearnedTemperature, LengthTemperature
from attemper.sites import actions
from attemper.sites.actions import key_counts, query_over_temperature
from attemper.sites.names import Wrapper
from attemper.sites.observation import AttentionCall
from tests.control.models import BUILD, built, checkpointed, output, small
from tests.monitor.tiny_models import require_registry

WITHIN_REACH = [name for name in BUILD if name not in ("bloom",)]
IDS = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(1))


def entropies(scan: Any) -> torch.Tensor:
    """Of the heads of the first site."""
    return torch.tensor([head.entropy_nats for head in scan.sites[0].heads])


@pytest.mark.parametrize("name", [name for name in WITHIN_REACH if "Multihead" not in name])
@pytest.mark.turns(2)
def test_at_1_and_after_removal_the_bits_stay(name: str):
    model, batch = built(name)
    if name == "modernbert":
        require_registry(type(model))
    before, keys = output(model, batch), list(model.state_dict())
    handle = attemper.temper(model, temperature=1.0)
    assert len(handle.sites) >= 1
    assert torch.equal(output(model, batch), before)
    handle.remove()
    assert torch.equal(output(model, batch), before)
    handle.remove()
    assert list(model.state_dict()) == keys
    assert all("forward" not in vars(part) and "_attemper_actions" not in vars(part) for part in model.modules())


@pytest.mark.parametrize("name", [name for name in WITHIN_REACH if "Multihead" in name])
def test_nn_multihead_attention_keeps_its_bits_where_gradients_are_on(name: str):
    model, batch = built(name)
    plain, fast = model(**batch), output(model, batch)
    with attemper.temper(model, temperature=1.0):
        assert torch.equal(model(**batch), plain)
        # Its fast path for inference computes in another order.
        torch.testing.assert_close(output(model, batch), fast, rtol=0, atol=2e-6)
    assert torch.equal(output(model, batch), fast)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "attemper"])
@pytest.mark.parametrize("given", [{"temperature": 2.0}, {"normalizer": "sparsemax"}], ids=str)
def test_every_implementation_of_the_registry(given: dict[str, Any], implementation: str):
    import attemper.integrations.transformers

    model, batch = built("llama")
    with attemper.temper(model, **given):
        expected = output(model, batch)
        model.set_attn_implementation(implementation)
        torch.testing.assert_close(output(model, batch), expected, rtol=1e-4, atol=1e-5)


def test_a_scan_and_a_watch_see_what_was_tempered():
    model = small()
    plain = entropies(attemper.scan(model, [IDS]))
    with attemper.temper(model, temperature=torch.tensor([4.0, 0.25])):
        for found in (attemper.scan(model, [IDS]), _watched(model)):
            moved = entropies(found) - plain
            assert moved[0] > 0.01
            assert moved[1] < -0.01
    llama, batch = built("llama")
    before = entropies(attemper.scan(llama, [batch]))
    with attemper.temper(llama, temperature=3.0):
        assert (entropies(attemper.scan(llama, [batch])) > before).all()


def _watched(model: nn.Module) -> Any:
    with attemper.watch(model) as watch:
        model(IDS)
    return watch.table()


def test_copies_and_pickles_keep_their_temperatures_by_themselves():
    for former, name in (("wrap", "_forward"), ("wrap", "_Inert"), ("act", "Actions")):  # where pickles of 0.2 look
        assert getattr(importlib.import_module(f"attemper.sites.{former}"), name) is getattr(actions, name)
    assert pickle.loads(b"cattemper.functional.sparse\nsparsemax\n.") is attemper.functional.sparsemax
    for model, run in ((small(), lambda m: m(IDS)), (built("llama")[0], lambda m: m(**built("llama")[1])[0])):
        handle = attemper.temper(model, temperature=LearnedTemperature(1, initial=2.0))
        expected = run(model)
        copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        handle.remove()
        for twin in (copied, pickled):
            assert torch.equal(run(twin), expected)
        parameters = dict(copied.named_parameters())
        run(copied).sum().backward()
        assert all(p.grad is not None for name, p in parameters.items() if "attemper" in name)


def test_a_list_is_one_per_site_and_a_mapping_by_name():
    model = small()
    handle = attemper.temper(model, temperature=attemper.schedules.layerwise(2, 0.5, 2.0))
    assert [value.item() for value in handle.values().values()] == [0.5, 2.0]
    handle.remove()
    handle = attemper.temper(model, temperature={"blocks.1": torch.tensor([2.0, 3.0])})
    assert handle.sites == ("blocks.1.attention",)
    assert handle.values()["blocks.1.attention"].tolist() == [2.0, 3.0]
    assert attemper.temper(small(), temperature=2.0, sites=["blocks.1"]).sites == ("blocks.1.attention",)


def _gradients(model: nn.Module, run: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    run().square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("way", ["reentrant", "checkpointing", "compile"])
@pytest.mark.parametrize("kind", ["fixed", "learned", "conditional", "length", "product"])
@pytest.mark.quick("learned-reentrant", "conditional-checkpointing")
def test_each_kind_under_checkpointing_and_compile(kind: str, way: str):
    model, batch = built("llama")
    size = model.config.hidden_size
    temperature = {
        "fixed": FixedTemperature(1.5),
        "learned": LearnedTemperature(4, initial=1.5),
        "conditional": ConditionalTemperature(size, 4, initial=1.5),
        "length": LengthTemperature(4),
        "product": LengthTemperature(4) * LearnedTemperature(4),
    }[kind]
    attemper.temper(model, temperature=temperature)
    model.train()
    batch = {name: value for name, value in batch.items() if name != "labels"}
    expected = _gradients(model, lambda: model(**batch, use_cache=False)[0])
    names = [name for name in expected if "attemper" in name]
    assert len(names) == {"fixed": 0, "learned": 2, "conditional": 4, "length": 0, "product": 2}[kind]
    assert all(expected[name].abs().max() > 0 for name in names)
    run: Any = model
    if way == "compile":
        torch._dynamo.reset()
        run = torch.compile(model, fullgraph=True, backend="aot_eager")
    else:
        checkpointed(model, way == "reentrant")
    found = _gradients(model, lambda: run(**batch, use_cache=False)[0])
    near: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-6} if way == "compile" else {}
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=lambda text, name=name: f"{name}: {text}", **near)


@pytest.mark.slow("takes many seconds")
def test_a_module_that_calls_sdpa_compiles_into_one_graph_once():
    model = small()
    attemper.temper(model, temperature=LearnedTemperature(2, initial=1.5))
    expected = model(IDS)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for _ in range(3):
        torch.testing.assert_close(compiled(IDS), expected)
    assert counter.frame_count == 1


def test_autocast_keeps_the_bits_at_1():
    model = small()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = model(IDS)
        with attemper.temper(model, temperature=1.0):
            assert torch.equal(model(IDS), before)


def test_saved_beside_the_model_and_loaded(tmp_path: Any):
    model = small()
    handle = attemper.temper(model, temperature=LearnedTemperature(2, initial=2.5))
    handle.save(tmp_path)
    assert (tmp_path / "attemper.safetensors").is_file()
    other = small()
    twin = attemper.temper(other, temperature=LearnedTemperature(2))
    twin.load(tmp_path)
    assert torch.equal(other(IDS), model(IDS))
    third = attemper.temper(small(), temperature=LearnedTemperature(1))
    with pytest.raises(InputError, match="number of heads"):
        third.load(tmp_path)
    with pytest.raises(InputError, match="other sites"):
        attemper.temper(small(), temperature=LearnedTemperature(2), sites=["blocks.0"]).load(tmp_path)
    (tmp_path / "attemper.safetensors").write_bytes(b"garbage")
    with pytest.raises(InputError, match="is cut off or no file of attemper"):
        twin.load(tmp_path)
    with pytest.raises(InputError, match="is not a file"):
        twin.load(tmp_path / "nothing")


def test_a_checkpoint_of_the_whole_model_carries_them():
    model = small()
    attemper.temper(model, temperature=LearnedTemperature(2, initial=2.5))
    other = small()
    attemper.temper(other, temperature=LearnedTemperature(2))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(IDS), model(IDS))
    with pytest.raises(RuntimeError, match="attemper_temperature"):
        other.load_state_dict(small().state_dict())


def test_our_own_layers():
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16)
    layer = attemper.nn.MultiheadAttention(16, 2, batch_first=True, temperature=2.0, stats="entropy").eval()
    plain, stats = layer(x, x, x)
    with attemper.temper(layer, temperature=0.5):
        _, sharper = layer(x, x, x)
        assert (sharper.entropy <= stats.entropy + 1e-6).all()
    assert torch.equal(layer(x, x, x)[0], plain)
    cross = attemper.nn.CrossAttention(16, num_heads=2, stats="entropy")
    one = cross(x, x).stats.entropy
    with attemper.temper(cross, temperature=float("inf")):
        torch.testing.assert_close(cross(x, x).stats.entropy, torch.full_like(one, 5.0).log())


MISTAKES = [
    ({"temperature": 0.0}, "above 0"),
    ({"temperature": float("nan")}, "above 0"),
    ({"temperature": -1.0}, "above 0"),
    ({"temperature": True}, "must be a number above 0"),
    ({"temperature": "hot"}, "must be a number above 0"),
    ({"temperature": nn.Linear(2, 2)}, "module of attemper.nn"),
    ({"temperature": [1.0]}, "has 1 entry and the model 2"),
    ({"temperature": {"blocks.7": 2.0}}, "not an attention site"),
    ({"sites": ["blocks.7"]}, "matches no attention"),
    ({"sites": 3}, "must be a list"),
    ({"normalizer": "entmin"}, "normalizer"),
]


@pytest.mark.parametrize(("given", "message"), MISTAKES)
def test_mistakes_are_told_and_nothing_is_changed(given: dict[str, Any], message: str):
    model = small()
    with pytest.raises(InputError, match=message):
        attemper.temper(model, **given)
    assert not any("attemper" in name for name, _ in model.named_modules())


def test_another_number_of_heads_is_told_when_it_runs():
    model = small()
    attemper.temper(model, temperature=torch.tensor([1.0, 2.0, 3.0]))
    with pytest.raises(InputError, match="has 3 temperatures; the query's heads are 2"):
        model(IDS)


def _compiled(model: Any) -> Any:
    return torch.compile(model, backend="aot_eager")


def test_models_out_of_reach_are_told():
    with pytest.raises(InputError, match="found no attention"):
        attemper.temper(nn.Linear(2, 2))
    with pytest.raises(InputError, match="by hand"):
        attemper.temper(built("bloom")[0])
    with pytest.raises(InputError, match="before compiling"):
        attemper.temper(_compiled(small()))
    block, batch = built("nn.MultiheadAttention")
    attemper.temper(block, temperature=ConditionalTemperature(48, 4))
    with pytest.raises(InputError, match=r"attemper\.nn\.MultiheadAttention"):
        block(**batch)


def test_wrappers_for_data_parallel_training_come_afterwards():
    with pytest.raises(InputError, match="copies of the model"):
        attemper.temper(nn.DataParallel(small()), temperature=2.0)
    wrapped = Wrapper(small())
    with pytest.raises(InputError, match="before it is wrapped"):
        attemper.temper(wrapped, temperature=LearnedTemperature())
    assert attemper.temper(wrapped, temperature=2.0).sites == ("blocks.0.attention", "blocks.1.attention")


class Odd(nn.Module):
    """Its code names SDPA, and does not call it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 100:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)
        return x


def test_attention_that_is_never_met_is_an_error():
    odd = Odd()
    attemper.temper(odd, temperature=2.0)
    with pytest.raises(InputError, match="was not met"):
        odd(torch.zeros(1, 2, 3, 4))


def test_handles_come_and_go_in_any_order():
    model = small()
    before = model(IDS)
    with attemper.temper(model, temperature=15.0):
        wanted = model(IDS)
    one = attemper.temper(model, temperature=2.0)
    two = attemper.temper(model, temperature=3.0)
    one.remove()
    three = attemper.temper(model, temperature=5.0)
    torch.testing.assert_close(model(IDS), wanted)
    two.remove()
    three.remove()
    assert torch.equal(model(IDS), before)


def test_threads_do_not_disturb_each_other():
    model = small()
    attemper.temper(model, temperature=ConditionalTemperature(32, 2, initial=1.5))
    expected = model(IDS)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: model(IDS), range(24)))
    assert all(torch.equal(one, expected) for one in found)


def test_a_forward_that_somebody_wrapped_afterwards_stays_theirs():
    model = small()
    before = model(IDS)
    handle = attemper.temper(model, temperature=2.0)
    attention = model.get_submodule("blocks.0.attention")
    inner, calls = attention.forward, []

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return inner(*args, **kwargs)

    attention.forward = wrapper
    handle.remove()
    assert torch.equal(model(IDS), before)
    assert calls == [1]
    again = attemper.temper(model, temperature=2.0)
    assert not torch.equal(model(IDS), before)
    again.remove()
    assert torch.equal(model(IDS), before)


class Derived(Attention):
    """Attends in what it inherits."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_attention_that_is_inherited_is_found():
    model = small()
    model.get_submodule("blocks.1").attention = Derived(model.config)
    assert attemper.temper(model, temperature=2.0).sites == ("blocks.0.attention", "blocks.1.attention")


def test_a_query_of_a_cache_sees_all_keys_under_flashs_alignment():
    call = AttentionCall(
        torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 50, 4),
        options=Options(is_causal=True, causal_alignment="bottom-right"),
    )  # fmt: skip
    assert key_counts(call).flatten().tolist() == [48, 49, 50]
    mask = torch.ones(1, 1, 1, 50, dtype=torch.bool)
    mask[..., :10] = False
    padded = replace(call, mask=mask)
    assert key_counts(padded).flatten().tolist() == [38, 39, 40]


def test_a_small_temperature_leaves_no_nan_in_half_precision():
    query = torch.full((1, 1, 2, 4), 100.0, dtype=torch.float16)
    found = query_over_temperature(query, torch.tensor(1e-4).view(1, 1, 1))
    assert torch.isfinite(found).all()
