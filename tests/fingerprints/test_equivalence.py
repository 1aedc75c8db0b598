"""The same function in other weights is no fault, and hides none."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch

import attemper
from attemper.fingerprints.file import LATER
from tests.support.equal_models import ARCHITECTURES, CHANGES, REAL, transformed, whole


@lru_cache(maxsize=4)
def base(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> attemper.Fingerprint:
    """The fingerprint of a model in its own weights."""
    model = whole(name, seed, dtype)
    return attemper.fingerprint(model.model, [model.batch])


def other(name: str, change: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> attemper.Fingerprint | None:
    """The fingerprint of the same function in other weights."""
    model = transformed(name, CHANGES[change][0], seed, dtype)
    return None if model is None else attemper.fingerprint(model.model, [model.batch])


QUICK = [
    ("llama", "permuted and smoothed", "float32"),
    ("llama", "stream rotated", "bfloat16"),
    ("opt", "rotated everywhere", "float32"),
    ("bert", "values scaled", "float32"),
]
"""Those of which one transform each is shown by default."""
EVERY = [(name, change, dtype) for name in ARCHITECTURES for change in CHANGES for dtype in ("float32", "bfloat16")]


def check(name: str, change: str, dtype: str, seed: int = 0) -> None:
    b = other(name, change, seed, getattr(torch, dtype))
    if b is None:
        return
    a = base(name, seed)
    for found in (attemper.explain(a, b), attemper.explain(b, a)):
        assert not found.is_fault, found.message
        named = {one.kind for one in found.also}
        assert named >= {*CHANGES[change][1]}, found.message
        if named:
            assert found.kind == "equivalent", found.message
            assert found.value is None


@pytest.mark.parametrize(("name", "change", "dtype"), QUICK)
def test_the_same_function_in_other_weights_is_named_and_no_fault(name: str, change: str, dtype: str):
    check(name, change, dtype)


@pytest.mark.slow("takes many seconds")
@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_every_transform_is_no_fault(name: str):
    for own, change, dtype in EVERY:
        if own == name:
            for seed in (0, 1):
                check(name, change, dtype, seed)


def faulty(name: str, change: str, fault: str, at: int, dtype: str) -> None:
    """A real fault in a model of other weights is found, from either side, at its site."""
    model = transformed(name, CHANGES[change][0], 0, getattr(torch, dtype))
    if model is None or (fault == "scale" and not hasattr(model.layers[at].module, "scaling")):
        return
    with torch.no_grad():
        REAL[fault].apply(model.layers[at])
    a, b = base(name), attemper.fingerprint(model.model, [model.batch])
    site = at + REAL[fault].shift
    # A projection behind values whose scale it does not take back stands in the same block as they.
    sites = {a.sites[site].name, *([a.sites[at].name] if change.startswith("values") else [])}
    for found in (attemper.explain(a, b), attemper.explain(b, a)):
        assert found.is_fault, found.message
        assert found.site in sites, found.message
        if len(sites) == 1 and fault != "heads of queries":
            assert found.kind in REAL[fault].kinds, found.message


@pytest.mark.parametrize(
    ("name", "change", "fault", "at", "dtype"),
    [
        ("llama", "smoothed", "scale", 1, "float32"),
        ("llama", "groups permuted", "values", 2, "float32"),
        ("opt", "stream rotated", "output projection", 1, "float32"),
    ],
)
def test_a_real_fault_behind_or_beside_a_transform_is_found(name: str, change: str, fault: str, at: int, dtype: str):
    faulty(name, change, fault, at, dtype)


@pytest.mark.slow("takes many seconds")
@pytest.mark.parametrize("fault", [fault for fault in REAL if fault != "queries"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "opt"])
def test_no_transform_hides_a_fault(name: str, fault: str):
    for change in CHANGES:
        for at in (1, 2):
            for dtype in ("float32", "bfloat16"):
                faulty(name, change, fault, at, dtype)


def test_what_is_behind_the_last_attention_is_a_fault_of_its_own():
    model = whole("llama")
    with torch.no_grad():
        REAL["mlp"].apply(model.layers[-1])
    found = attemper.explain(base("llama"), attemper.fingerprint(model.model, [model.batch]))
    assert (found.kind, found.site, found.stage) == ("output", "model.layers.3.self_attn", "model output")
    assert "what the model gives differs by" in found.message
    assert found.is_fault


def test_an_output_projection_that_does_not_follow_its_heads_is_a_fault():
    model = whole("llama")
    with torch.no_grad():
        for part in (model.layers[1].q, model.layers[1].k, model.layers[1].v):
            part.weight.copy_(part.weight.roll(len(part.weight) // 2, 0).clone())
    found = attemper.explain(base("llama"), attemper.fingerprint(model.model, [model.batch]))
    assert (found.kind, found.site) == ("head_order", "model.layers.1.self_attn")


def old(found: attemper.Fingerprint) -> attemper.Fingerprint:
    """As files of before version 3 keep it."""
    sites = [replace(site, **{name: getattr(site, name) * np.nan for name in LATER}) for site in found.sites]
    return replace(found, sites=tuple(sites), output=None)


@pytest.mark.parametrize("change", ["smoothed", "values scaled", "groups permuted"])
def test_files_that_cannot_tell_say_so(change: str):
    b = other("llama", change)
    assert b is not None
    for pair in ((old(base("llama")), b), (b, old(base("llama")))):
        found = attemper.explain(*pair)
        assert found.is_fault
        assert "one file does not say whether other weights take it back: take both" in found.message


def test_an_equivalent_pair_of_which_one_does_not_tell_what_the_model_gives_says_so():
    b = other("llama", "keys scaled")
    assert b is not None
    found = attemper.explain(old(base("llama")), b)
    assert found.kind == "equivalent"
    assert "what the model gives was not kept in both" in found.message
