"""``benchmarks/faults_unseen``: its pairs are what they say, and a number that does not predict is found."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import replace

import pytest
import torch
import transformers
from benchmarks.faults_unseen import __main__ as benchmark
from benchmarks.faults_unseen.evidence import Claim, calls, predicts
from benchmarks.faults_unseen.judging import (
    Clean,
    Said,
    agreement,
    changed,
    judge_fault,
    judge_harmless,
    run_b,
    symmetric,
)
from benchmarks.faults_unseen.models import base, blocks, fresh, inputs, rows
from benchmarks.faults_unseen.specs import HELD_OUT, SPECS, UNFIT
from benchmarks.faults_unseen.subjects import Case, expect
from benchmarks.faults_unseen.tables import report, summary


@pytest.fixture(scope="module")
def clean() -> Clean:
    return Clean("llama")


def case(name: str) -> Case:
    return next(case for case in (*benchmark.FAULTS, *benchmark.HARMLESS) if case.name == name)


def test_there_are_enough_pairs_of_enough_architectures():
    for cases, fewest in ((benchmark.FAULTS, 150), (benchmark.HARMLESS, 200)):
        counts = Counter(name for case in cases for name in case.architectures)
        assert set(counts) <= set(SPECS)
        assert len(counts) >= 8
        assert counts.total() >= fewest
        names = [case.name for case in cases]
        assert len(set(names)) == len(names)


def test_held_out_architectures_have_the_cases_of_their_likeness_that_fit():
    assert not set(HELD_OUT) & set(HELD_OUT.values())
    for cases, fewest in ((benchmark.FAULTS, 40), (benchmark.HARMLESS, 24)):
        for name, like in HELD_OUT.items():
            own = {case.name for case in benchmark.wanted(cases, name, "")}
            missing = {case.name for case in benchmark.wanted(cases, like, "")} - own
            assert len(own) >= fewest
            assert all({case, case.partition("-")[0]} & set(UNFIT[name]) for case in missing)


def test_held_out_architectures_are_counted_apart():
    said = {"pair": "x case float32", "group": "scale", "setting": "float32", "kind": "scale", "best": "scale"}
    nothing = {"false_numbers": [], "asymmetric": False, "overclaims": [], "value": None, "there": "", "back": ""}
    judged = said | nothing
    faults = [
        {**judged, "architecture": "llama", "grade": "right"},
        {**judged, "architecture": "glm", "grade": "wrong"},
    ]
    safe = [{**judged, "architecture": "glm", "grade": "blamed"}]
    text = report(faults, safe, True)
    assert "| held out | 1 | 0 | 0 | 1 | 0 | 0 | 0 |" in text
    assert "| others | 1 | 1 | 0 | 0 | 0 | 0 | 0 |" in text
    assert "| held out | 1 | 0 | 1 | 0 | 0 | 0 |" in text
    counted = summary(faults, safe)
    assert counted["faults"]["held out"]["wrong"] == counted["harmless"]["held out"]["blamed"] == 1
    assert counted["faults"]["others"]["right"] == 1


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
def test_views_of_projections_are_what_the_model_computes_with(name: str):
    if name == "gpt_neox" and "self.lm_head" not in inspect.getsource(transformers.GPTNeoXForCausalLM):
        pytest.skip("GPT-NeoX of this transformers has a head of another name; the benchmark is of the pinned one")
    model = fresh(name)
    block = blocks(SPECS[name], model)[1]
    before = rows(block.module("k")).clone()
    block.weight("k").zero_()
    after = rows(block.module("k"))
    assert int((after != before).any(1).sum()) == block.weight("k").shape[0] * block.weight("k").shape[1]


def llama_claim(factor: float) -> Claim:
    """Run b is run a with the scores of one layer times ``factor``."""
    one = calls(base("llama"), inputs("llama"))["model.layers.1.self_attn"]
    two = replace(one, query=factor * one.query)
    return Claim(one, two, torch.zeros(one.query.shape[1]), True, None)


def test_a_factor_that_makes_run_b_predicts_and_another_does_not():
    claim = llama_claim(0.7)
    assert predicts("scale", 0.7, claim)
    assert not predicts("scale", 0.72, claim)
    assert not predicts("scale", -0.002, claim)
    assert not predicts("window", 12.0, claim)
    assert not predicts("weights", 0.7, claim)


def test_a_factor_does_not_predict_other_weights():
    claim = llama_claim(1.0)
    draw = torch.Generator().manual_seed(0)
    other = replace(claim.b, query=torch.randn(claim.b.query.shape, generator=draw, dtype=torch.float64))
    products = (claim.a.products * other.products).sum() / claim.a.products.square().sum()
    assert not predicts("scale", float(products), replace(claim, b=other))


def test_a_change_that_moves_outputs_is_refused_as_harmless(clean: Clean):
    one, _ = changed("llama", case("scale-one_layer"))
    with pytest.raises(AssertionError, match=r"outputs differ by .*, 0\.0001 is rounding"):
        agreement(one, run_b(one, torch.float32), clean, torch.float32)


def test_the_same_factor_both_ways_is_not_symmetric():
    there, back = (Said("scale", "layer", value, True, "", []) for value in (0.5, 2.0))
    wanted = expect("scale", at="layer")
    assert symmetric(there, back, wanted, True)
    assert not symmetric(there, there, wanted, True)


@pytest.mark.parametrize("name", ["scale-one_layer", "window_of_one_layer", "unloaded_norm"])
@pytest.mark.quick("scale-one_layer")
def test_plain_faults_are_named_with_true_numbers_both_ways(name: str, clean: Clean):
    row = judge_fault("llama", case(name), "float32", clean)
    assert row["grade"] == "right", row
    assert not row["false_numbers"]
    assert not row["asymmetric"]


@pytest.mark.parametrize("name", ["other_kernel", "mlp_neurons_permuted"])
def test_plain_harmless_changes_are_not_blamed(name: str, clean: Clean):
    row = judge_harmless("llama", case(name), "float32", clean)
    assert row is not None
    assert row["grade"] == "right", row
