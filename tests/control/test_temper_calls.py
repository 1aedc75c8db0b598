"""``temper`` at one call of a module that runs several times in a pass."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attemper
from attemper import InputError
from attemper.nn import LearnedTemperature
from tests.monitor.test_repeated_calls import Attention, Early, Looped, batch
from tests.support.scans import entropies


def tempered(model: Looped, x: Tensor, temperatures: dict[int, float]) -> Tensor:
    """The model's output with temperatures at calls, from 1, of its only block, by hand."""
    block = model.blocks[0]
    assert isinstance(block, Attention)
    for call in range(1, model.times + 1):
        with attemper.temper(block, temperature=temperatures.get(call, 1.0)):
            x = block(x)
    return x.detach()


def test_a_temperature_acts_on_the_call_that_is_named_in_every_pass() -> None:
    model, x = Looped(1).eval(), batch()
    plain, expected = model(x).detach(), tempered(model, x, {2: 0.5})
    with attemper.temper(model, temperature=0.5, sites=["blocks.0#2"]) as handle:
        for _ in range(2):
            assert torch.equal(model(x), expected)
        assert handle.sites == ("blocks.0#2",)
        assert torch.equal(copy.deepcopy(model)(x), expected)
        found = entropies(attemper.scan(model, [x]))
    assert torch.equal(model(x), plain)
    before = entropies(attemper.scan(model, [x]))
    assert torch.equal(found[0], before[0])
    assert not torch.equal(found[1], before[1])


def test_a_mapping_names_calls_and_all_calls() -> None:
    model, x = Looped(1).eval(), batch()
    expected = tempered(model, x, {1: 2.0, 3: 0.5}), tempered(model, x, {1: 2.0, 2: 2.0, 3: 0.5})
    with attemper.temper(model, temperature={"blocks.0#1": 2.0, "blocks.0#3": 0.5}):
        assert torch.equal(model(x), expected[0])
    with attemper.temper(model, temperature={"blocks.0": 2.0, "blocks.0#3": 0.25}) as handle:
        assert handle.sites == ("blocks.0", "blocks.0#3")
        assert torch.equal(model(x), expected[1])


def test_what_is_learned_at_one_call_has_its_gradient_from_that_call_alone(tmp_path: Path) -> None:
    model, x = Looped(1).train(), batch()
    handle = attemper.temper(model, temperature=LearnedTemperature(num_heads=2), sites=["blocks.0#2"])
    model(x)[..., 0].sum().backward()
    (learned,) = handle.parameters()
    assert learned.grad is not None
    assert learned.grad.abs().min() > 0
    with torch.no_grad():
        learned.add_(0.3)
    expected = model(x).detach()
    handle.save(tmp_path / "t.safetensors")
    with torch.no_grad():
        learned.zero_()
    assert not torch.equal(model(x), expected)
    handle.load(tmp_path / "t.safetensors")
    assert torch.equal(model(x), expected)
    assert list(handle.values()) == ["blocks.0#2"]


def test_torchs_own_attention_is_tempered_at_one_call() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = self.own(x, x, x, need_weights=False)[0]
            return x

    model, x = Twice().eval(), batch()
    once = model.own(x, x, x, need_weights=False)[0]
    with attemper.temper(model.own, temperature=0.25):
        expected = model.own(once, once, once, need_weights=False)[0]
    with attemper.temper(model, temperature=0.25, sites=["own#2"]):
        assert torch.equal(model(x), expected)


@pytest.mark.slow("compiles for seconds")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.quick("aot_eager")
def test_a_compiled_model_counts_its_calls(backend: str) -> None:
    torch._dynamo.reset()
    model, x = Looped(1).eval(), batch()
    expected = tempered(model, x, {2: 0.5})
    with attemper.temper(model, temperature=0.5, sites=["blocks.0#2"]), torch.no_grad():
        compiled: Any = torch.compile(model, backend=backend, fullgraph=True)
        for _ in range(3):
            assert float((compiled(x) - expected).abs().max()) < 1e-6


def test_recomputation_in_the_backward_pass_is_refused() -> None:
    class Checkpointed(Looped):
        def forward(self, x: Tensor) -> Any:
            for _ in range(self.times):
                x = checkpoint(self.blocks[0], x, use_reentrant=False)
            return x

    model = Checkpointed(1).train()
    with attemper.temper(model, temperature=0.5, sites=["blocks.0#2"]):
        loss = model(batch().requires_grad_()).sum()
        with pytest.raises(InputError, match=r"computes blocks\.0#2 again in the backward pass, and temper cannot"):
            loss.backward()


def test_a_call_that_a_pass_does_not_reach_is_told_once() -> None:
    model = Early(1).eval()
    with attemper.temper(model, temperature=0.5, sites=["blocks.0#3"]):
        model(batch(3))
        with pytest.warns(UserWarning, match=r"acts on blocks\.0#3, but its module attended 2 times in this pass"):
            model(batch(2))
        model(batch(2))


def test_what_acts_on_modules_refuses_single_calls() -> None:
    model = Looped(1)
    with pytest.raises(InputError, match=r"acts on all calls of a module: write \['blocks\.0'\]"):
        attemper.regularize(model, attemper.EntropyBonus(), sites=["blocks.0#2"])
    with pytest.raises(InputError, match=r"normalizer=...\) stands at all calls of a module, and blocks\.0#2 is one"):
        attemper.temper(model, normalizer="sparsemax", sites=["blocks.0#2"])
    with (
        attemper.temper(model, temperature=0.5, sites=["blocks.0#2"]) as handle,
        pytest.raises(InputError, match=r"blocks\.0#2 is one call of a module, whose weights all calls share"),
    ):
        handle.fold()
    with pytest.raises(InputError, match=r"\['blocks\.7#2'\]\) matches no attention"):
        attemper.temper(model, temperature=0.5, sites=["blocks.7#2"])


def test_a_tempered_call_is_saved_with_its_model_and_restored(tmp_path: Path) -> None:
    tf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = tf.AlbertConfig(
        vocab_size=50, embedding_size=16, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=32, max_position_embeddings=32,
    )  # fmt: skip
    model, ids = tf.AlbertModel(config).eval(), torch.arange(12).view(1, 12)
    name = "encoder.albert_layer_groups.0.albert_layers.0.attention"
    attemper.temper(model, temperature={f"{name}#2": torch.linspace(0.2, 0.5, 4), name: 1.5})
    expected = model(ids)[0]
    model.save_pretrained(tmp_path / "tempered")
    loaded = attemper.load(tmp_path / "tempered")
    assert torch.equal(loaded(ids)[0], expected)
    attemper.temper(model, temperature=1.1, sites=[name])
    with pytest.raises(InputError, match=r"#2 and a second temperature at all its calls share a name"):
        model.save_pretrained(tmp_path / "again")
