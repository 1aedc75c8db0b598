"""Known behaviours of transformers and torch by which a measurement goes wrong, and that here it does not."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import attemper
from tests.sites.own_models import OWN, Hand, Own


def watched(model: nn.Module, *args: Any, **kwargs: Any) -> attemper.Scan:
    with attemper.watch(model) as watch:
        model(*args, **kwargs)
    assert watch.failures == 0
    return watch.table()


def entropies(scan: attemper.Scan) -> list[float | None]:
    return [head.entropy_nats for site in scan.sites for head in site.heads]


def llama(**changes: Any) -> Any:
    tf = pytest.importorskip("transformers")
    from tests.monitor.tiny_models import GROUPED, sharpened

    return sharpened(
        tf.LlamaForCausalLM._from_config(tf.LlamaConfig(**GROUPED, **changes), attn_implementation="eager")
    )


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_what_a_keyword_that_is_not_known_means_is_read_inside_the_function(implementation: str) -> None:
    model, ids = llama(), torch.randint(3, 101, (1, 9))
    model.set_attn_implementation(implementation)
    found = watched(model, ids, indices=torch.zeros(1))  # neither of the two functions does anything with it
    assert found.skipped == ()
    assert entropies(found) == pytest.approx(entropies(attemper.scan(model, [ids])), abs=1e-5)


@pytest.mark.parametrize("wrapped", ["sdpa", "eager"])
def test_what_a_function_that_somebody_registered_calls_is_read_inside(wrapped: str) -> None:
    tf = pytest.importorskip("transformers")
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.models.llama.modeling_llama import eager_attention_forward

    function = sdpa_attention_forward if wrapped == "sdpa" else eager_attention_forward
    tf.AttentionInterface.register("another", lambda *args, **given: function(*args, **given))
    tf.AttentionMaskInterface.register("another", tf.AttentionMaskInterface()[wrapped])
    model, ids = llama(), torch.randint(3, 101, (1, 9))
    model.set_attn_implementation(wrapped)
    expected = entropies(attemper.scan(model, [ids]))
    model.set_attn_implementation("another")
    found = watched(model, ids, indices=torch.zeros(1))
    assert found.skipped == ()
    assert entropies(found) == pytest.approx(expected, abs=1e-5)
    assert entropies(attemper.scan(model, [ids])) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "scan"])
def test_a_model_that_chooses_keys_by_indices_is_read_where_its_mask_says_the_same(implementation: str) -> None:
    pytest.importorskip("transformers")
    from tests.sites.architectures import BY_TITLE
    from tests.sites.test_architectures import expected, largest_error

    model, batch = BY_TITLE["DeepSeek V3.2"].build(), BY_TITLE["DeepSeek V3.2"].batch("left")
    layers = expected(model, batch)
    if implementation != "scan":
        model.set_attn_implementation(implementation)
    found = attemper.scan(model, [batch]) if implementation == "scan" else watched(model, **batch)
    assert found.skipped == ()
    assert [site.heads[0].by_visible_keys[-1].last for site in found.sites] == [15, 15]  # 9 keys are chosen of up to 40
    assert largest_error(found, layers) < 2e-5


@pytest.mark.filterwarnings("ignore:.*does not support `output_attentions=True`")
def test_asking_sdpa_for_weights_that_it_does_not_return_changes_no_reading() -> None:
    model, ids = llama(), torch.randint(3, 101, (2, 20))
    model.set_attn_implementation("sdpa")
    plain = watched(model, ids)
    assert not model(ids, output_attentions=True).attentions
    assert entropies(watched(model, ids, output_attentions=True)) == entropies(plain)


def test_entropies_of_a_training_step_are_those_before_dropout() -> None:
    model, ids = llama(attention_dropout=0.5), torch.randint(3, 101, (2, 20))
    still = watched(model, ids).sites[0]
    model.train()
    weights = model(ids, output_attentions=True).attentions[0].detach()
    assert float((weights.sum(-1) - 1).abs().max()) > 0.1
    moving = watched(model, ids).sites[0]
    assert (moving.mode, still.mode) == ("train", "eval")
    assert [head.entropy_nats for head in moving.heads] == [head.entropy_nats for head in still.heads]


def test_a_config_that_names_an_attention_of_the_hub_loads_nothing_during_a_scan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub = pytest.importorskip("transformers.integrations.hub_kernels")

    def loaded(*_: Any, **__: Any) -> None:
        pytest.fail("a config chose code")

    monkeypatch.setattr(hub, "load_and_register_attn_kernel", loaded)
    monkeypatch.setattr(hub, "get_kernel", loaded)
    model, ids = llama(), torch.randint(3, 101, (1, 9))
    model.config._attn_implementation_internal = "somebody/evil-kernel"
    with pytest.raises(KeyError, match="not a valid attention implementation"):
        model(ids)
    with pytest.raises(KeyError, match="not a valid attention implementation"):
        attemper.scan(model, [ids])
    assert model.config._attn_implementation_internal == "somebody/evil-kernel"


@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention_is_one_call_and_not_a_recursion(need_weights: bool) -> None:
    model, x = nn.MultiheadAttention(16, 4, batch_first=True), torch.randn(2, 9, 16)
    plain = model(x, x, x, need_weights=need_weights, average_attn_weights=False)
    with attemper.watch(model) as watch:
        during = model(x, x, x, need_weights=need_weights, average_attn_weights=False)
    assert torch.equal(plain[0], during[0])
    sites = watch.table().sites
    assert [site.name for site in sites] == ["MultiheadAttention"]
    assert sites[0].heads[0].rows == 2 * 9
    weights = model(x, x, x, average_attn_weights=False)[1].double()
    expected = -(weights * weights.log()).sum(-1).mean((0, 2))
    found = torch.tensor([head.entropy_nats for head in sites[0].heads], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


def test_a_thread_that_nobody_watches_is_not_told_of() -> None:
    other, model = Own(), Own()
    x = torch.randn(2, 20, 32)

    class Both(nn.Module):
        """Runs another model beside its own, in a thread, as loaders and servers do."""

        def __init__(self) -> None:
            super().__init__()
            self.own = model

        def forward(self, x: Tensor) -> Tensor:
            thread = threading.Thread(target=other, args=(torch.randn(7, 5, 32),))
            thread.start()
            thread.join()
            return self.own(x)

    sites = watched(Both(), x).sites
    assert [(site.name, site.heads[0].rows) for site in sites] == [("own", 40)]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", [Own, Hand])
def test_gradients_under_activation_checkpointing_are_bit_identical(kind: type[Own], reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = kind(0.1)

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.block, x, use_reentrant=reentrant)

    model, x = Checkpointed().train(), torch.randn(2, 20, 32, requires_grad=True)

    def gradients() -> list[Tensor]:
        torch.manual_seed(3)
        model.zero_grad()
        x.grad = None
        model(x).square().sum().backward()
        return [tensor.grad.clone() for tensor in (x, *model.parameters()) if tensor.grad is not None]

    plain = gradients()
    with attemper.watch(model) as watch:
        during = gradients()
    assert len(plain) == 3
    assert all(torch.equal(a, b) for a, b in zip(plain, during, strict=True))
    assert watch.table().sites[0].heads[0].rows == 40


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_fast_path_of_an_encoder_layer_is_left_within_2e_6() -> None:
    model, batch = OWN["encoder"]()
    with torch.no_grad():
        fast = model(*batch)
        with attemper.watch(model) as watch:
            measured = model(*batch)
        again = model(*batch)
    real = ~batch[2]
    torch.testing.assert_close(measured[real], fast[real], rtol=0, atol=2e-6)
    assert torch.equal(again, fast)
    assert len(watch.table().sites) == 2


def test_a_compiled_model_without_taps_says_so_and_is_not_compiled_anew() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    model, x = Own(), torch.randn(2, 20, 32)
    compiled: Any = torch.compile(model, fullgraph=True, backend=counter)
    before = compiled(x)
    only_taps = pytest.warns(UserWarning, match=r"nothing was measured in the first step\. .*only taps are seen inside")
    with attemper.watch(compiled, every=2, observe="beside") as watch, only_taps as told:
        for _ in range(4):
            assert torch.equal(compiled(x), before)
            watch.step()
    assert len(told) == 1
    assert counter.frame_count == 1
    with pytest.raises(attemper.InputError, match="This model is compiled: only taps are seen inside"):
        watch.table()


def autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


class Products(nn.Module):
    """Attention over queries and keys as they are given."""

    def forward(self, query: Tensor, key: Tensor, by_keyword: bool = False) -> Tensor:
        if by_keyword:
            return F.scaled_dot_product_attention(query=query, key=key, value=key)
        return F.scaled_dot_product_attention(query, key, key)


def test_under_autocast_the_weights_of_the_rounded_queries_and_keys_are_read_in_float32() -> None:
    query, key = (3 * torch.randn(2, 4, 64, 16) for _ in range(2))
    with autocast():
        scan, inside = watched(Products(), query, key), attemper.attention_statistics(query, key).entropy
    plain, found = attemper.attention_statistics(query, key).entropy, scan.row_statistics(scan.sites[0].name).entropy
    assert torch.equal(found, attemper.attention_statistics(query.bfloat16(), key.bfloat16()).entropy)
    assert float((found - plain).abs().max()) > 0.01
    assert torch.equal(inside, plain)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_registry_attention_under_autocast_reads_rounded_queries_too(implementation: str) -> None:
    model, ids = llama(), torch.randint(3, 101, (2, 20))
    model.set_attn_implementation(implementation)
    plain = entropies(watched(model, ids))
    with autocast():
        under = entropies(watched(model, ids))
    differences = [abs((a or 0.0) - (b or 0.0)) for a, b in zip(under, plain, strict=True)]
    assert 1e-5 < max(differences) < 0.05


SHAPES = {
    "batch, heads, tokens": ((2, 4, 9, 8), (2, 4, 9, 8)),
    "heads and tokens": ((9, 8), (9, 8)),
    "folded heads": ((8, 9, 8), (8, 9, 8)),
    "more leading axes": ((2, 3, 4, 9, 8), (2, 3, 4, 9, 8)),
    "other keys": ((2, 4, 5, 8), (2, 4, 9, 8)),
    "heads that broadcast": ((2, 4, 9, 8), (2, 1, 9, 8)),
}


@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.turns(2)
def test_sdpa_is_read_in_every_shape_that_models_give_it(name: str, by_keyword: bool) -> None:
    query, key = (torch.randn(shape) for shape in SHAPES[name])
    found = entropies(watched(Products(), query, key, by_keyword))
    weights = (query @ key.transpose(-2, -1) / 8**0.5).double().softmax(-1)
    mean = -(weights * weights.log()).sum(-1).mean()
    assert sum(value for value in found if value is not None) / len(found) == pytest.approx(float(mean), abs=1e-6)


def test_nothing_that_is_kept_holds_a_graph() -> None:
    model, batch = OWN["sdpa"]()
    with attemper.watch(model) as watch:
        loss = model(*batch).square().sum()
        scan = watch.table()
        stats = scan.row_statistics(scan.sites[0].name)
        loss.backward()
    assert all(not stats[name].requires_grad for name in ("entropy", "lse", "max_logit"))
