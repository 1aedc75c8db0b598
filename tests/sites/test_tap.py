"""``tap``: measured when a watch samples, in eager and in compiled code, and nothing to the compiler."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import attemper
from attemper import InputError
from attemper.sites import tap_buffers
from tests.sites.own_models import Checkpointed, Own, Tapped, entropies, is_close

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def test_a_tap_without_a_watch_does_nothing_and_without_a_name_is_an_error() -> None:
    query = torch.randn(1, 2, 5, 8, requires_grad=True)
    assert attemper.tap(query, query, name="alone") is None
    with pytest.raises(InputError, match="must name the site"):
        attemper.tap(query, query, name="")


@pytest.mark.parametrize("kind", [Tapped, Checkpointed])
@pytest.mark.quick("Checkpointed")
def test_a_compiled_model_is_one_graph_on_sampled_and_other_steps(kind: type[nn.Module]) -> None:
    model, x = kind(), torch.randn(2, 20, 32, requires_grad=True)
    counter = CompileCounterWithBackend("aot_eager")
    compiled: Any = torch.compile(model, fullgraph=True, backend=counter)
    with attemper.watch(compiled, every=3) as watch:
        for _ in range(7):
            for _ in range(2):  # two passes a step: gradients accumulate
                compiled(x).sum().backward()
            watch.step()
    assert counter.frame_count == 1
    assert watch.sampled == 3
    assert watch.history("rows", site="first", head=0).values.tolist() == [2 * 40] * 3
    scan = watch.table()
    assert scan.sites[0].name == "first"
    assert scan.sites[0].heads[0].rows == 2 * 40
    block = model.block if isinstance(model, Checkpointed) else model
    twin = Own()
    twin.load_state_dict(block.state_dict())
    assert is_close(scan, entropies(twin, (x.detach(),))[0])


def test_temperature_of_a_tap_divides_the_scores() -> None:
    query, key = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)

    class Model(nn.Module):
        def forward(self, temperature: Any) -> None:
            attemper.tap(query, key, name="warm", temperature=temperature)

    expected = attemper.attention_statistics(query, key, temperature=2.0).per_head()["entropy"].mean
    for temperature in (2.0, torch.full((2, 1), 2.0)):
        model = Model()
        with attemper.watch(model) as watch:
            model(temperature)
        assert is_close(watch.table(), expected)


def bert_set_to_attemper(padding: str | None, **sizes: int) -> tuple[Any, dict[str, Tensor], list[Tensor]]:
    """A model set to ``attemper``, a batch, and the entropies of its eager weights, layer by layer."""
    pytest.importorskip("transformers")
    import attemper.integrations.transformers
    from tests.monitor.tiny_models import TINY, eager_entropies, inputs, sharpened

    model, batch = sharpened(TINY["bert"].build()), inputs("encoder", padding, **sizes)
    expected = eager_entropies(model, batch)["attentions"]
    model.set_attn_implementation(attemper.integrations.transformers.NAME)
    return model, batch, expected


def are_entropies(scan: attemper.Scan, expected: list[Tensor]) -> bool:
    found = torch.tensor([[head.entropy_nats for head in site.heads] for site in scan.sites], dtype=torch.float64)
    return bool((found - torch.stack(expected)).abs().max() < 2e-5)


@pytest.mark.slow("takes many seconds")
def test_a_transformers_model_set_to_attemper_is_watched_in_one_graph() -> None:
    model, batch, expected = bert_set_to_attemper("right", batch=2)
    counter = CompileCounterWithBackend("eager")
    compiled: Any = torch.compile(model, fullgraph=True, backend=counter)
    with attemper.watch(compiled, every=2) as watch:
        for _ in range(4):
            compiled(**batch)
            watch.step()
    assert counter.frame_count == 1
    assert watch.table().tokens == int(batch["attention_mask"].sum()) < 80
    assert are_entropies(watch.table(), expected)


def test_a_watch_or_a_clip_that_is_dropped_unclosed_ends_and_holds_no_model() -> None:
    model = Tapped()
    watch = attemper.watch(model)
    model(torch.randn(2, 12, 32))
    unclosed, of_model = weakref.ref(watch), weakref.ref(model)
    del watch
    assert unclosed() is None
    assert len(model._forward_hooks) + len(model._forward_pre_hooks) == 0
    assert not tap_buffers.has_receivers()
    del model
    gc.collect()
    assert of_model() is None
    clip = attemper.QKClip(Tapped())
    assert tap_buffers.has_receivers()
    del clip
    gc.collect()
    assert not tap_buffers.has_receivers()


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # of SDPA, which has no rule
def test_a_tap_inside_a_transform_of_functions_leaves_it_right_and_says_that_it_saw_nothing() -> None:
    model, x = Tapped(), torch.randn(2, 6, 32)

    def loss(x: Tensor) -> Tensor:
        return model(x[None]).square().sum()

    def gradients() -> Tensor:
        return torch.func.vmap(torch.func.grad(loss))(x)

    want = gradients()
    with attemper.watch(model) as watch:
        assert torch.equal(gradients(), want)
        with pytest.raises(InputError, match=r"inside a transform of torch\.func"):
            watch.table()
    leaf = x.clone().requires_grad_()
    model(leaf).square().sum().backward()
    torch.testing.assert_close(want, leaf.grad)
