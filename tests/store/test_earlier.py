"""Whether what a folder held is a run of the model that is written there now."""

from __future__ import annotations

import pytest

from attemper.readings.sample import SiteLabel
from attemper.store.fragment import Fragment
from attemper.store.opening import Earlier
from tests.support.samples import sample, sites

MODULES = {"layers.0.attn", "layers.1.attn", "layers.2.attn"}


def earlier(**about: object) -> Earlier:
    """Of a run of two sites with three heads each, in which a third one was expected."""
    fragment = Fragment(None)
    fragment.append(sample(9))
    fragment.describe({"model": "Tiny", **about})
    fragment.cover({("layers.2.attn", "self", "train"): "not seen"})
    return Earlier.of(fragment.tables(), 9)


def label(name: str, heads: int = 3, mode: str = "train") -> SiteLabel:
    return SiteLabel(name, "self", mode, 0, "full", "softmax", heads)


@pytest.mark.parametrize(
    "seen",
    [
        sites(),
        sites(1),
        sites(2, mode="eval"),
        sites(3),
        (label("layers.0.attn"), label("layers.0.attn#2")),
    ],
)
def test_other_modes_fewer_sites_and_one_that_was_expected_are_of_the_same_model(seen):
    assert earlier().is_of("Tiny", seen, MODULES)


@pytest.mark.parametrize(
    ("model", "seen", "modules"),
    [
        ("Other", sites(), MODULES),
        ("Tiny", sites(2, heads=4), MODULES),
        ("Tiny", sites(4), MODULES | {"layers.3.attn"}),
        ("Tiny", sites(1), {"layers.0.attn"}),
        ("Tiny", (label("blocks.0"),), {"blocks.0"}),
    ],
)
def test_another_class_other_heads_and_other_sites_are_another_model(model, seen, modules):
    assert not earlier().is_of(model, seen, modules)


def test_a_run_that_watched_only_some_sites_may_go_on_with_more():
    assert earlier(sites=["layers.0"]).is_of("Tiny", sites(4), MODULES | {"layers.3.attn"})
    assert earlier(sites=["layers.0"]).is_of("Tiny", sites(1), MODULES)


def test_the_warning_says_what_stood_there_and_what_to_do():
    said = earlier().difference("Other", sites(1), MODULES, 0) or ""
    assert said.startswith(" holds a run of another model: Tiny with 2 sites and 6 heads, up to step 9. ")
    assert "This one is of Other with 1 site and 3 heads." in said
    assert "Give each run a folder of its own" in said
