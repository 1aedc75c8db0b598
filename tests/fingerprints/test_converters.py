"""What converters of checkpoints get wrong is named, both ways round, and a number stands only where it predicts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch

import attemper
from attemper.errors import InputError
from attemper.report.explanation import explanation_page
from attemper.types import Explanation, Fingerprint
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
SLOW = pytest.mark.slow("takes many seconds")


def both_ways(name: str, precision: str, change: Change) -> tuple[Explanation, Explanation]:
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


@pytest.mark.quick("float32-q-0-llama")
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "qwen2", "qwen3"])
@pytest.mark.parametrize("site", [0, 2])
@pytest.mark.parametrize("roles", ["q", "k", "qk"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_new_weights_are_no_factor_of_the_old_ones(precision: str, roles: str, site: int, name: str):
    for found in both_ways(name, precision, lambda model: initialised(model, [site], roles)):
        assert found.value is None, found.message
        assert found.kind == "not_loaded", found.message
        assert "looks newly initialised in run" in found.message
        assert found.site == clean(name, False).sites[site].name


def half_twice(model: Tiny) -> AbstractContextManager[Any]:
    weight = model.model.layers[1].self_attn.q_proj.weight
    half = len(weight) // 2
    return rewritten(model, lambda: weight[half:].copy_(weight[:half].clone()))


def layer_twice(model: Tiny) -> AbstractContextManager[Any]:
    layers = model.model.layers
    return rewritten(model, lambda: layers[2].load_state_dict(layers[1].state_dict()))


@pytest.mark.parametrize(
    ("name", "precision", "change", "kinds", "words"),
    [
        *(
            pytest.param("phi", precision, change, ("not_loaded", "swapped"), ("", ""), marks=SLOW)
            for precision in ("float32", "bfloat16")
            for change in (
                lambda model: tied(model, [2], "qk"),
                lambda model: tied(model, [2], "kq"),
                lambda model: swapped(model, [2], "qk"),
            )
        ),
        pytest.param("llama", "float32", half_twice, ("not_loaded",), ("", ""), marks=SLOW),
        (
            *("llama", "float32", layer_twice, ("order_of_layers",)),
            ("of run b equal those of layers.1.self_attn in the other run", "of run a equal those of layers.1."),
        ),
        (
            *("llama", "float32", lambda model: reordered_groups(model, [2], "kv"), ("head_order",)),
            ("the keys of run b are the keys of heads 1, 0 of run a",) * 2,
        ),
    ],
)
def test_a_weight_in_the_place_of_another_is_named_both_ways_with_no_number(name, precision, change, kinds, words):
    for found, said in zip(both_ways(name, precision, change), words, strict=True):
        assert found.kind in kinds, found.message
        assert found.value is None, found.message
        assert said in found.message
        assert change is half_twice or found.site == clean(name, False).sites[2].name


@SLOW
@pytest.mark.parametrize("role", ["q", "k"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_noise_in_a_deep_layer_is_no_bias(precision: str, role: str):
    def edit(model: Tiny) -> None:
        for site in (2, 3):
            weight = projection(model, site, role)
            weight.copy_(noise(weight, 0.1))

    for name in ("llama", "gpt2"):
        found, _ = both_ways(name, precision, lambda model: rewritten(model, lambda: edit(model)))
        assert found.kind == "weights", found.message
        part = "queries" if role == "q" else "keys"
        assert f"{part} differ by" in found.message
        assert "correlation 0.99" in found.message or "correlation 1.00" in found.message


@pytest.mark.quick("bfloat16-llama-one head")
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


@pytest.mark.quick("float32-qk-llama")
@pytest.mark.parametrize("name", ["llama", "qwen2", "phi"])
@pytest.mark.parametrize("roles", ["qk", "q", "k"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_features_in_the_order_of_the_other_pairing_are_rotary(precision: str, roles: str, name: str):
    found, _ = both_ways(name, precision, lambda model: permuted_features(model, [1], roles))
    assert (found.kind, found.site) == ("rotary", "layers.1.self_attn"), found.message
    assert "order of the other rotary pairing" in found.message
    assert ("of queries alone" in found.message) == (roles == "q")
    assert ("of keys alone" in found.message) == (roles == "k")


def test_weights_that_a_file_does_not_keep_are_told_by_queries_and_keys_alone():
    a = clean("llama", False)
    model = tiny("llama")
    with initialised(model, [0], "q"):
        b = attemper.fingerprint(model.model, [batch_of("llama", False)])
    old = replace(b, sites=tuple(replace(site, weights={}) for site in b.sites))
    found = attemper.explain(a, old)
    assert found.kind == "weights"
    assert "queries differ by" in found.message
    assert "correlation 0.0" in found.message


@pytest.mark.quick("0.02")
@pytest.mark.parametrize("std", [0.02, 128**-0.5, 384**-0.5])
def test_weights_look_new_by_the_spread_of_an_initialiser(std: float):
    found, _ = both_ways("bert", "float32", lambda model: initialised(model, [1], "v", std))
    assert found.kind == "not_loaded", found.message
    found, _ = both_ways("bert", "float32", lambda model: initialised(model, [1], "v", 1.3 * std))
    assert found.kind == "values", found.message
    assert "self.value.weight [128, 128] differs by" in found.message


@SLOW
def test_an_output_projection_is_named_where_no_attention_follows():
    found, _ = both_ways("llama", "float32", lambda model: initialised(model, [3], "o"))
    assert (found.kind, found.site, found.stage) == ("not_loaded", "layers.3.self_attn", "attention output")
    found, _ = both_ways("llama", "float32", lambda model: initialised(model, [3], "o", 0.7))
    assert (found.kind, found.site, found.stage) == ("weights", "layers.3.self_attn", "attention output")


@pytest.mark.quick("llama")
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_documents_whose_positions_start_anew_are_documents(name: str):
    model = tiny(name)
    bounds = torch.tensor([0, 1, 2]).repeat_interleave(torch.tensor([30, 35, 31]))
    same = (bounds[:, None] == bounds[None]).tril()[None, None]
    positions = torch.cat([torch.arange(count) for count in (30, 35, 31)])[None]
    ids = batch_of(name, False)["input_ids"]
    b = attemper.fingerprint(
        model.model, [{"input_ids": ids, "attention_mask": same.expand(2, 1, 96, 96), "position_ids": positions}]
    )
    a = clean(name, False)
    assert attemper.explain(a, b).kind == attemper.explain(b, a).kind == "documents"


@pytest.mark.quick("llama")
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_padding_that_one_run_shows_is_padding(name: str):
    model = tiny(name).model
    batch = batch_of(name, True)
    hidden = clean(name, True)
    ones = attemper.fingerprint(model, [batch | {"attention_mask": torch.ones_like(batch["attention_mask"])}])
    bare = attemper.fingerprint(model, [{"input_ids": batch["input_ids"]}])
    for a, b, run in ((hidden, ones, "a"), (hidden, bare, "a"), (ones, hidden, "b")):
        found = attemper.explain(a, b)
        assert (found.kind, found.site, found.stage) == ("padding", a.sites[0].name, "visible keys")
        assert f"run {run} hides 36 places of padding, in sequences 1, and the other run shows them" in found.message
        assert found.is_fault
        assert "padding" in explanation_page(found)
    other = attemper.fingerprint(model, [batch | {"input_ids": batch["input_ids"].flip(1)}])
    with pytest.raises(InputError, match="take fingerprints of the same"):
        attemper.explain(hidden, other)


def test_padding_that_another_mask_hides_is_not_shown():
    model = tiny("bert").model
    batch = batch_of("bert", True)
    seen = batch["attention_mask"][:, None, None].bool().expand(-1, 1, 96, -1)
    b = attemper.fingerprint(model, [batch | {"attention_mask": seen}])
    with pytest.raises(InputError, match="take fingerprints of the same tokens"):
        attemper.explain(clean("bert", True), b)


def test_a_number_of_a_mask_stands_only_where_every_row_has_it():
    a = clean("gpt2", False)
    b = clean("gpt2", False)
    first = b.sites[0].counts["first_visible"].copy()
    first[:, 12] += 3  # one row as by a window
    seen = b.sites[0].counts["visible_keys"].copy()
    seen[:, 12] -= 3
    first[:, 14], seen[:, 14] = first[:, 14] + 9, seen[:, 14] - 9
    site = replace(b.sites[0], counts={**b.sites[0].counts, "first_visible": first, "visible_keys": seen})
    assert attemper.explain(a, replace(b, sites=(site, *b.sites[1:]))).value is None


Rule = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def masked(name: str, rule: Rule, hidden: float = -torch.inf) -> Fingerprint:
    """A fingerprint with a mask by the places of rows [N, 1] and keys [1, N], ``hidden`` where none is seen."""
    ids = batch_of(name, False)["input_ids"]
    places = torch.arange(ids.shape[1])
    seen = rule(places[:, None], places[None]).expand(len(ids), 1, -1, -1)
    mask = torch.where(seen, 0.0, hidden)
    return attemper.fingerprint(tiny(name).model, [{"input_ids": ids, "attention_mask": mask}])


def ending(*ends: int) -> Rule:
    """Documents that end at these places."""
    at = torch.tensor(ends)
    return lambda row, key: (key <= row) & (torch.bucketize(key, at) == torch.bucketize(row, at))


@pytest.mark.quick("bert", "first among")
@pytest.mark.parametrize(
    ("name", "right", "wrong", "kind", "words"),
    [
        ("bert", None, lambda row, key: (row - key).abs() < 9, "window", "9 keys to each side in run {run}"),
        (
            *("llama", None, lambda row, key: (key <= row) & ((row - key < 10) | (key < 4)), "window"),
            "run {run} sees 14 keys of a row at most, the first among them",
        ),
        (
            *("llama", None, lambda row, key: (key <= row) & (key // 24 == row // 24), "documents"),
            "run {run} attends in stretches of 24 keys",
        ),
        ("llama", ending(30, 65), ending(40, 60), "documents", "a sequence begin at other places in run b"),
    ],
)
def test_a_mask_is_named_at_the_first_site_with_no_number(
    name: str, right: Rule | None, wrong: Rule, kind: str, words: str
):
    a, b = clean(name, False) if right is None else masked(name, right), masked(name, wrong)
    for one, two, run in ((a, b, "b"), (b, a, "a")):
        found = attemper.explain(one, two)
        assert (found.kind, found.site, found.value) == (kind, a.sites[0].name, None), found.message
        assert words.format(run=run) in found.message


def test_a_number_that_hides_keys_is_no_other_mask():
    a, large, largest, small = (
        masked("bert", lambda row, key: key < 60 + 0 * row, hidden)
        for hidden in (-torch.inf, -1e4, torch.finfo(torch.float32).min, -20.0)
    )
    assert not attemper.explain(a, large).is_fault
    assert not attemper.explain(a, largest).is_fault
    assert attemper.explain(a, small).is_fault


@pytest.mark.quick("float32-llama")
@pytest.mark.parametrize("name", ["llama", "bert"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_token_whose_embedding_is_missing_is_told_where_it_enters(precision: str, name: str):
    def change(model: Tiny) -> Any:
        embeddings = next(part for part in model.model.modules() if isinstance(part, torch.nn.Embedding))
        often = batch_of(name, False)["input_ids"].flatten().mode().values
        return rewritten(model, lambda: embeddings.weight[often].zero_())

    for found in both_ways(name, precision, change):
        assert (found.kind, found.stage) == ("input", "residual"), found.message


def turning(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Fingerprint:
    """A fingerprint with other angles."""
    model = tiny(name).model
    rotary = next(part for name, part in model.named_modules() if name.endswith("rotary_emb"))
    rotary.inv_freq.copy_(change(rotary.inv_freq))
    return attemper.fingerprint(model, [batch_of(name, False)])


@pytest.mark.quick("25000000.0")
@pytest.mark.parametrize("base", [1e3, 2.5e7])
def test_a_base_has_its_number_both_ways_where_few_pairs_turn_fast(base: float):
    a, b = (turning("phi", lambda own, used=used: used ** (-torch.arange(len(own)) / len(own))) for used in (1e4, base))
    for one, two, wanted in ((a, b, base), (b, a, 1e4)):
        found = attemper.explain(one, two)
        assert found.kind == "rotary"
        assert found.value == pytest.approx(wanted, rel=0.05), found.message


def test_a_layer_that_turns_nothing_has_no_factor_of_positions():
    a, b = clean("llama", False), turning("llama", torch.zeros_like)
    told = [replace(site, inv_freq=own.inv_freq) for site, own in zip(b.sites, a.sites, strict=True)]
    b = replace(b, sites=tuple(told))
    found = attemper.explain(a, b)
    assert (found.kind, found.value) == ("rotary", None), found.message


def test_what_is_added_by_distance_hides_no_key():
    ids = batch_of("gpt2", False)["input_ids"]
    places = torch.arange(ids.shape[1])
    distance = places[:, None] - places[None]
    mask = torch.where(distance >= 0, -200.0 * distance, -torch.inf).expand(len(ids), 1, -1, -1)
    b = attemper.fingerprint(tiny("gpt2").model, [{"input_ids": ids, "attention_mask": mask}])
    assert (b.sites[0].counts["visible_keys"] == clean("gpt2", False).sites[0].counts["visible_keys"]).all()
