"""``scan`` and ``watch`` on a real pretrained encoder: entropies of its eager weights, and training as without them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attemper
from tests.monitor.tiny_models import eager_entropies, largest_error
from tests.support import encoder
from tests.support.identical_training import assert_identical_training

TITLE = "MiniLM, pretrained"
TEXTS = [
    "Attention is a weighted mean whose weights the tokens choose for themselves. " * 12,
    "How sharp should that choice be?",
    "If a head gives all its weight to a single token, it looks something up: the subject of the sentence, perhaps.",
]


def texts(number: int) -> dict[str, Tensor]:
    return dict(encoder.loaded()[1](TEXTS[-number:], return_tensors="pt", padding=True))


def model_of(implementation: str) -> Any:
    model = copy.deepcopy(encoder.loaded()[0])
    model.set_attn_implementation(implementation)
    return model


@pytest.mark.slow("takes seconds")
@pytest.mark.filterwarnings(
    "ignore:flex_attention called without", "ignore:`torch.jit.script_method`", "ignore:_compile flag on"
)
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize(("implementation", "way"), [("eager", "eager"), ("sdpa", "sdpa"), ("flex_attention", "flex")])
@pytest.mark.quick("sdpa-sdpa-3")
def test_watched_entropies_of_a_pretrained_encoder_are_those_of_its_eager_weights(
    implementation: str, way: str, number: int, seen: Callable[..., None]
) -> None:
    batch = texts(number)
    expected = eager_entropies(encoder.loaded()[0], batch)
    model = model_of(implementation)
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        before = model(**batch).last_hidden_state
        with attemper.watch(model) as watch:
            during = model(**batch).last_hidden_state
    assert torch.equal(before, during)
    assert watch.failures == 0
    for scan in (attemper.scan(model, [batch]), watch.table()):
        assert scan.skipped == ()
        assert scan.tokens == int(batch["attention_mask"].sum())
        worst = largest_error(scan, "encoder", expected)
        assert worst < 5e-6
    seen("transformers", TITLE, f"registry, {way}", error_nats=worst)


@pytest.mark.slow("takes many seconds")
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_training_steps_of_a_pretrained_encoder_are_bit_identical(
    implementation: str, steps: int, seen: Callable[..., None]
) -> None:
    batch = texts(2)
    batch = {name: part[:, :16] for name, part in batch.items()}

    def made() -> tuple[nn.Module, Callable[[Any], Tensor]]:
        model = model_of(implementation)
        assert model.config.hidden_dropout_prob == model.config.attention_probs_dropout_prob == 0.1
        return model, lambda root: (root(**batch).last_hidden_state - 1).square().mean()

    assert_identical_training(made, steps)
    seen("transformers", TITLE, f"registry, {implementation}", identical_steps=steps)
