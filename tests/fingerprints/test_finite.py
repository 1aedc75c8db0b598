"""Numbers that are not finite, and vectors that are all zero, are faults, never within rounding."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import attemper
from attemper.fingerprints.encoding import round_rows
from attemper.fingerprints.record import Fingerprint
from tests.support.engine_models import tiny, tokens
from tests.support.engine_pairs import clean

NAN, INF = float("nan"), float("inf")
BERT, LLAMA = "encoder.layer.1.attention.self", "layers.1.self_attn"


def _with(architecture: str, weight: str, number: float, dtype: torch.dtype = torch.float32) -> Fingerprint:
    """Of a model with one number of a weight that is not finite, or with all of them 0."""
    model = tiny(architecture, dtype=dtype).model
    part = dict(model.named_parameters())[weight]
    with torch.no_grad():
        if number:
            part[0, 0] = number
        else:
            part.zero_()
    return attemper.fingerprint(model, [tokens()])


def _edited(run: Fingerprint, site: int, name: str, number: float, row: int = 3) -> Fingerprint:
    """With one number of a stage that is not finite, of one row."""
    values = getattr(run.sites[site], name).copy()
    values[(0, row, 0) if values.ndim == 3 else (row, 0)] = number
    sites = list(run.sites)
    sites[site] = replace(sites[site], **{name: values})
    return replace(run, sites=tuple(sites))


@pytest.mark.quick("k_proj.weight-weights-layers.1.self_attn-q and k-heads 0, 1 of 4-nan", "model output--inf")
@pytest.mark.parametrize("number", [NAN, INF])
@pytest.mark.parametrize(
    ("architecture", "weight", "kind", "site", "stage", "heads"),
    [
        ("bert", f"{BERT}.query.weight", "weights", BERT, "q and k", "heads 0 of 4"),
        ("llama", f"{LLAMA}.k_proj.weight", "weights", LLAMA, "q and k", "heads 0, 1 of 4"),
        ("llama", f"{LLAMA}.v_proj.weight", "values", LLAMA, "head output", "heads 0, 1 of 4"),
        ("llama", f"{LLAMA}.o_proj.weight", "weights", LLAMA, "attention output", ""),
        ("bert", "encoder.layer.0.output.dense.weight", "input", BERT, "residual", ""),
        ("bert", "encoder.layer.3.output.dense.weight", "output", "encoder.layer.3.attention.self", "model output", ""),
    ],
)
def test_one_weight_that_is_not_finite_is_a_fault_at_its_site(architecture, weight, kind, site, stage, heads, number):
    a, b = clean(architecture, False), _with(architecture, weight, number)
    for pair, words in (((a, b), r"0 of \d+ of run a and [1-9]\d* of"), ((b, a), r"[1-9]\d* of \d+ of run a and 0 of")):
        found = attemper.explain(*pair)
        assert (found.kind, found.site, found.stage, found.value) == (kind, site, stage, None)
        assert found.is_fault
        assert found.extent.endswith(heads)
        assert re.search(words, found.message), found.message
        assert "are not finite" in found.message
        assert "one file does not say" not in found.message
        assert all(one.times.get(stage) is None for one in found.runs.sites if one.site == site)
    both = attemper.explain(b, b)
    assert (both.kind, both.value) == ("too_small", None)
    assert "at the same places: from here on, differences cannot be seen" in both.message


@pytest.mark.quick("nan", "final-scores-inf")
@pytest.mark.parametrize("number", [NAN, INF])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("residual", "input"), ("input", "input"), ("query", "weights"), ("raw", "weights"), ("final", "scores")),
        *(("output", "values"), ("attended", "weights"), ("change", "weights")),
    ],
)
@pytest.mark.turns(2)
def test_one_number_of_a_stage_that_is_not_finite_is_a_fault(name: str, kind: str, number: float):
    a = clean("bert", False)
    b = _edited(a, 2, name, number)
    for pair in ((a, b), (b, a)):
        found = attemper.explain(*pair)
        assert (found.kind, found.site) == (kind, a.sites[2].name)
        assert f"({name})" in found.message
    assert attemper.explain(b, b).kind == "too_small"
    assert name == "final" or attemper.explain(a, _edited(a, 2, name, -number)).kind == kind  # -inf hides a key there
    # Others in run b than in run a.
    assert attemper.explain(b, _edited(b, 2, name, number, row=5)).kind == kind
    # A stage behind it that one run alone has.
    assert attemper.explain(b, _edited(b, 2, "change", number, row=5)).kind == "weights"


def test_the_output_of_the_model_that_is_not_finite_is_a_fault():
    a = clean("bert", False)
    assert a.output is not None
    sketch = a.output.sketch.copy()
    sketch[4] = NAN
    b = replace(a, output=replace(a.output, sketch=sketch))
    for pair in ((a, b), (b, a)):
        assert attemper.explain(*pair).kind == "output"
    assert "9 of 288 of run b" in attemper.explain(a, b).message
    assert attemper.explain(b, b).kind == "too_small"


def test_a_stage_that_one_run_did_not_see_is_not_taken_for_one_that_is_not_finite():
    a = clean("bert", False)
    for name in ("residual", "input", "output", "attended", "change"):
        sites = [replace(site, **{name: np.full_like(getattr(site, name), NAN)}) for site in a.sites]
        assert attemper.explain(a, replace(a, sites=tuple(sites))).kind in ("none", "rounding"), name
        one = (sites[0], *a.sites[1:])  # at one site alone
        assert attemper.explain(a, replace(a, sites=one)).kind in ("none", "rounding"), name


def test_an_earlier_difference_comes_first():
    a = clean("llama", False)
    b = _with("llama", f"{LLAMA}.q_proj.weight", NAN)
    sites = list(b.sites)
    sites[0] = replace(sites[0], query=2 * sites[0].query, raw=2 * sites[0].raw)
    assert attemper.explain(a, replace(b, sites=tuple(sites))).site == "layers.0.self_attn"


def test_infinite_numbers_survive_16_bits_and_the_file(tmp_path: Path):
    rows = np.array([[1.0, INF, 2.0], [1.0, NAN, 2.0], [3.0, -1.0, 2.0]], np.float32)
    np.testing.assert_array_equal(round_rows(rows), rows)
    a = attemper.fingerprint(tiny("llama", dtype=torch.bfloat16).model, [tokens()])
    b = _with("llama", f"{LLAMA}.v_proj.weight", INF, torch.bfloat16)
    loaded = attemper.open(b.save(tmp_path / "b.safetensors"))
    assert attemper.explain(a, loaded) == attemper.explain(a, b)
    assert attemper.explain(a, b).kind == "values"


@pytest.mark.quick("k_proj")
@pytest.mark.parametrize("weight", ["q_proj", "k_proj"])
def test_a_projection_or_heads_of_zeros_are_told_by_their_vectors(weight: str):
    a, b = clean("llama", False), _with("llama", f"{LLAMA}.{weight}.weight", 0.0)
    which = {"q_proj": "queries", "k_proj": "keys"}[weight]
    for pair, run in (((a, b), "b"), ((b, a), "a")):
        found = attemper.explain(*pair)
        assert (found.kind, found.site, found.stage, found.value) == ("not_loaded", LLAMA, "q and k", None)
        assert f"{which} of run {run} are all zero" in found.message
        assert not found.also
    assert attemper.explain(b, b).kind == "none"
    model = tiny("bert").model
    name = {"q_proj": "query", "k_proj": "key"}[weight]
    part = dict(model.named_parameters())
    with torch.no_grad():
        part[f"{BERT}.{name}.weight"][:32] = 0
        part[f"{BERT}.{name}.bias"][:32] = 0
    found = attemper.explain(clean("bert", False), attemper.fingerprint(model, [tokens()]))
    assert (found.kind, found.value) == ("not_loaded", None)
    assert found.extent.endswith("heads 0 of 4") or found.extent.endswith("heads 0, 1 of 4"), found.extent
    assert f"{which} of run b are all zero" in found.message
