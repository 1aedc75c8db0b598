"""What a difference of two readings is counted by: rounding, sampled rows, other texts; and what is not known."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import mpmath
import pytest
import torch
from torch import Tensor, nn

import attemper
from attemper.readings.reading import Reading
from attemper.results import floor
from attemper.results.comparison import ALWAYS, STATISTICS, Comparison
from tests.support.engine_models import VOCABULARY, tiny

NOT_KNOWN = {"support_size", "mean_distance", "gini", "entropy_with_sink_nats", "missed_mass"}
"""Statistics of which nobody has derived how far an error of scores moves them."""


def batches(seed: int = 0, many: int = 8) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(3, VOCABULARY, (2, 48), generator=generator)} for _ in range(many)]


def scan(model: Any, of: list[Any] | None = None, dtype: torch.dtype = torch.float32) -> Reading:
    return attemper.scan(copy.deepcopy(model).to(dtype), batches() if of is None else of).reading


def with_one_longer_head(model: Any, name: str) -> Any:
    """The model with queries of head 1 of its second layer that are a fifth longer."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for key, parameter in changed.named_parameters():
            if "layers.1." in key.replace("layer.", "layers.") and ("q_proj" in key or "query" in key):
                parameter[32:64] *= 1.2
    return changed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["bert", "llama", "minilm"])
@pytest.mark.quick("bert-dtype0")
def test_two_precisions_of_one_model_do_not_differ_and_a_changed_head_does_in_both(name: str, dtype: torch.dtype):
    model = tiny(name).model
    one, low = scan(model), scan(model, dtype=dtype)
    found = attemper.compare(one, low)
    assert any(head.pairs["normalized_entropy"][0] != head.pairs["normalized_entropy"][1] for head in found.heads)
    assert (found.beyond, found.judged, found.texts) == ((), found.heads, "same")
    assert found.summary().startswith(
        f"None of {len(found.heads)} heads differs beyond rounding; mean normalised entropy "
    )
    changed = with_one_longer_head(model, name)
    for other in (scan(changed), scan(changed, dtype=dtype)):
        layers = {(head.layer, head.head) for head in attemper.compare(one, other).beyond}
        assert (1, 1) in layers
        assert not {place for place in layers if place[0] == 0}
        assert not {head for layer, head in layers if layer == 1} - {1}


@pytest.mark.quick("blocked")
@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_backends_of_one_precision_do_not_differ(backend: str):
    model = tiny("bert").model
    other = attemper.scan(model, batches(), backend=backend).reading
    found = attemper.compare(scan(model), other)
    assert found.beyond == ()
    assert max(head.floors["normalized_entropy"] or 0 for head in found.heads) < 1e-4


@pytest.mark.slow("takes many seconds")
def test_another_text_of_one_kind_does_not_differ_and_a_changed_head_does():
    model = tiny("bert").model
    one, other = scan(model, batches(0, 24)), scan(model, batches(1, 24))
    found = attemper.compare(one, other)
    assert (found.texts, found.beyond) == ("other", ())
    assert len(found.judged) == len(found.heads)
    assert "None of 16 heads differs beyond rounding and the spread of batches; " in found.summary()
    assert all(head.floors["max_logit"] is None for head in found.heads)
    changed = attemper.compare(one, scan(with_one_longer_head(model, "bert"), batches(1, 24)))
    assert (1, 1) in {(head.layer, head.head) for head in changed.beyond}


def test_a_floor_of_other_texts_is_a_quantile_of_the_standard_errors():
    model = tiny("bert", layers=1).model
    one, other = scan(model, batches(0)), scan(model, batches(1, 12))
    found = {head.head: head for head in attemper.compare(one, other).heads}
    rounding = {head.head: head for head in attemper.compare(one, replace(other, text_digest=one.text_digest)).heads}
    for before, after in zip(one.heads, other.heads, strict=True):
        first, second = ((head.standard_errors or {})["first_token_mass"] ** 2 for head in (before, after))
        freedom = (first + second) ** 2 / (first**2 / 7 + second**2 / 11)
        chance = floor.CHANCE / (len(ALWAYS) * len(one.heads))
        expected = float(student(chance, freedom)) * (first + second) ** 0.5
        known = (rounding[before.head].floors["first_token_mass"] or 0.0) + expected
        assert found[before.head].floors["first_token_mass"] == pytest.approx(known, rel=0.01)


def student(chance: float, freedom: float) -> Any:
    """Both tails of Student's t, by its distribution."""

    def beyond(t: Any) -> Any:
        return mpmath.betainc(freedom / 2, 0.5, 0, freedom / (freedom + t * t), regularized=True) - chance

    return mpmath.findroot(beyond, (3.0, 8.0), solver="bisect", tol=1e-12)


def said(one: Reading, other: Reading) -> str:
    return attemper.compare(one, other).summary()


def test_what_is_not_known_is_said_and_nothing_is_judged():
    model = tiny("bert", layers=1).model
    one, other = scan(model), scan(model, batches(1))
    few = scan(model, batches(1, 3))
    unknown = "and how far that moves heads is not known: both scans need 4 batches or more"
    assert said(one, few).startswith("4 heads, 4 differ; ")
    assert unknown in said(one, few)
    assert attemper.compare(one, few).judged == ()
    old = replace(other, text_digest=None)
    assert "; whether both read the same text is not known." in said(one, old)
    assert attemper.compare(one, old).texts == "unknown"
    assert attemper.compare(one, replace(old, tokens=old.tokens + 1)).texts == "other"
    blank = replace(other, dtype=None, text_digest=one.text_digest)
    assert "; how far rounding moves heads is not known, because a side does not say its precision." in said(one, blank)
    assert attemper.compare(one, replace(blank, dtype="float8_e4m3fn")).judged == ()


def test_two_models_read_one_text_even_if_it_has_no_ids():
    layer = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x = torch.randn(2, 8, 16)
    assert attemper.compare(layer, copy.deepcopy(layer), [(x, x, x)]).texts == "same"


def test_sampled_rows_count_by_the_spread_of_rows():
    model = tiny("bert", layers=1).model
    readings = []
    for batch in batches(0, 2):
        with attemper.watch(model, every=1, rows=8) as watch:
            watch.step()
            model(**batch)
            watch.step()
            readings.append(watch.table().reading)
    found = attemper.compare(*readings)
    assert readings[0].sampled_rows == 8
    assert all((head.floors["normalized_entropy"] or 0) > 1e-3 for head in found.heads)
    assert all(head.floors["effective_tokens"] is None for head in found.heads)
    assert "beyond rounding and the spread of sampled rows; " in found.summary()
    assert ", 8 rows of each sequence, " in str(found)


def test_a_number_that_came_or_went_is_beyond_and_one_that_was_not_asked_for_is_not():
    one = scan(tiny("bert", layers=1).model)
    site = one.sites[0]
    heads = (replace(site.heads[0], normalized_entropy=None), *site.heads[1:])
    found = attemper.compare(one, replace(one, sites=(replace(site, heads=heads),)))
    assert [head.head for head in found.beyond] == [0]
    heads = tuple(replace(head, self_weight=0.5) for head in site.heads)
    assert attemper.compare(one, replace(one, sites=(replace(site, heads=heads),))).beyond == ()


def test_other_normalizers_than_softmax_are_not_judged():
    one = scan(tiny("bert", layers=1).model)
    sparse = replace(one, sites=tuple(replace(site, normalizer="sparsemax") for site in one.sites))
    assert attemper.compare(sparse, sparse).judged == ()


def test_every_statistic_that_is_compared_has_a_rule_or_is_named_as_without_one():
    assert set(floor._MOVED) | NOT_KNOWN | {"max_logit"} == set(STATISTICS)


def test_a_document_has_the_sides_and_the_counts():
    one = scan(tiny("bert", layers=1).model)
    document = attemper.compare(one, one, names=("a", "b")).to_dict()
    assert (document["judged"], document["beyond"], document["texts"]) == (4, 0, "same")
    assert document["sides"]["before"] == {
        **{name: getattr(one, name) for name in ("dtype", "text", "text_digest", "date", "tokens", "sampled_rows")},
        "name": "a",
    }
    assert set(document["heads"][0]["max_logit"]) == {"before", "after", "change", "floor"}
    assert isinstance(attemper.compare(one, one), Comparison)
