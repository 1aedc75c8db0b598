"""What converters of checkpoints get wrong is named, both ways round, and a number stands only where it predicts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import attemper
from tests.support.engine_converters import (
    initialised,
    permuted_features,
    projection,
    reordered_groups,
    rewritten,
    swapped,
    tied,
)
from tests.support.engine_faults import FAULTS
from tests.support.engine_models import Tiny, tiny
from tests.support.engine_pairs import PRECISIONS, batch_of, clean
from tests.support.engine_patches import noise

Change = Callable[[Tiny], AbstractContextManager[Any]]


def both_ways(name: str, precision: str, change: Change) -> tuple[attemper.Explanation, attemper.Explanation]:
    """What is said of a changed model beside its clean twin, and of the twin beside the changed model."""
    model = tiny(name, dtype=PRECISIONS[precision])
    a = clean(name, False)
    with change(model):
        b = attemper.fingerprint(model.model, [batch_of(name, False)])
    one, two = attemper.explain(a, b), attemper.explain(b, a)
    assert (one.kind, one.site, one.stage, one.value is None) == (two.kind, two.site, two.stage, two.value is None), (
        f"{one.message}\n{two.message}"
    )
    return one, two


@pytest.mark.quick("float32-q-0-llama", "float32-k-2-gpt2", "bfloat16-qk-2-qwen2", "bfloat16-k-0-bert")
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "qwen2", "qwen3"])
@pytest.mark.parametrize("site", [0, 2])
@pytest.mark.parametrize("roles", ["q", "k", "qk"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_new_weights_are_no_factor_of_the_old_ones(precision: str, roles: str, site: int, name: str):
    for found in both_ways(name, precision, lambda model: initialised(model, [site], roles)):
        assert found.value is None, found.message
        assert found.kind in ("weights", "not_loaded"), found.message
        assert found.site == clean(name, False).sites[site].name


@pytest.mark.quick("float32-q-tied", "bfloat16-swapped")
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda model: tied(model, [2], "qk"), id="q-tied"),
        pytest.param(lambda model: tied(model, [2], "kq"), id="k-tied"),
        pytest.param(lambda model: swapped(model, [2], "qk"), id="swapped"),
    ],
)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_queries_in_the_place_of_keys_are_no_factor(precision: str, change: Change):
    for found in both_ways("phi", precision, change):
        assert found.kind in ("weights", "not_loaded", "swapped")
        assert found.value is None, found.message


@pytest.mark.quick("bfloat16-k")
@pytest.mark.parametrize("role", ["q", "k"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_noise_in_a_deep_layer_is_no_bias(precision: str, role: str):
    def change(model: Tiny) -> Any:
        def edit() -> None:
            for site in (2, 3):
                weight = projection(model, site, role)
                weight.copy_(noise(weight, 0.1))

        return rewritten(model, edit)

    for name in ("llama", "gpt2"):
        found, _ = both_ways(name, precision, change)
        assert found.kind == "weights", found.message
        part = "queries" if role == "q" else "keys"
        assert f"{part} differ by" in found.message
        assert "correlation 0.99" in found.message or "correlation 1.00" in found.message


@pytest.mark.quick("bfloat16-llama-one_head")
@pytest.mark.parametrize(("name", "variant"), [("llama", "one head"), ("gpt2", "of the call"), ("bert", "of the call")])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_factor_the_other_way_round_is_the_inverse(precision: str, name: str, variant: str):
    fault = next(one for one in FAULTS if (one.kind, one.variant) == ("scale", variant))
    one, two = both_ways(name, precision, lambda model: fault.patch(model, [2], 1.3))
    assert one.kind == "scale"
    assert one.value is not None
    assert two.value is not None
    assert one.value == pytest.approx(1.3, rel=0.002)
    assert one.value * two.value == pytest.approx(1.0, rel=1e-3 if precision == "bfloat16" else 1e-6)


def test_factors_that_heads_do_not_share_are_told_head_by_head():
    model = tiny("gpt2")
    a = clean("gpt2", False)
    factors = torch.tensor([1.0, 1.2, 0.8, 1.5]).view(1, 4, 1, 1)
    with attemper.temper(model.model, temperature=factors[0, :, 0, 0]):
        found = attemper.explain(a, attemper.fingerprint(model.model, [batch_of("gpt2", False)]))
    assert (found.kind, found.value) == ("scale", None)
    assert "0.83333, 1.25, 0.66667 times that of run a, head by head" in found.message


@pytest.mark.quick("float32-qk-llama", "bfloat16-k-phi")
@pytest.mark.parametrize("name", ["llama", "qwen2", "phi"])
@pytest.mark.parametrize("roles", ["qk", "q", "k"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_features_in_the_order_of_the_other_pairing_are_rotary(precision: str, roles: str, name: str):
    found, _ = both_ways(name, precision, lambda model: permuted_features(model, [1], roles))
    assert (found.kind, found.site) == ("rotary", "layers.1.self_attn"), found.message
    assert "order of the other rotary pairing" in found.message
    assert ("of queries alone" in found.message) == (roles == "q")
    assert ("of keys alone" in found.message) == (roles == "k")


def test_groups_of_keys_in_another_order_are_named():
    found, _ = both_ways("llama", "float32", lambda model: reordered_groups(model, [1], "kv"))
    assert (found.kind, found.site) == ("head_order", "layers.1.self_attn")
    assert "the keys of run b are those of heads 1, 0 of run a" in found.message
