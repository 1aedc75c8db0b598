"""``QKClip`` and ``Thermostat`` on a model that is spread over processes act as on the whole model in one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.ranks import torchrun

pytestmark = [
    pytest.mark.long("starts several processes"),
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch has no gloo on this platform"),
]

WORKER = "tests.distributed.control_worker"
TWO, FOUR = ("ddp", "fsdp", "tp"), ("fsdp x tp", "copies x tp", "fsdp with copies")
Results = list[dict[str, Any]]


def cases(*spread: str) -> list[str]:
    kinds = ("clip {}", "clip unnamed {}", "held {} head", "held {} layer")
    return [kind.format(name) for name in spread for kind in kinds]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("two")
    more = ("held DTensors", "lone failure", "without a batch", "without a batch, unnamed", "flat")
    return torchrun(WORKER, folder, *cases(*TWO), *more)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return torchrun(WORKER, tmp_path_factory.mktemp("four"), *cases(*FOUR), "scaled rows", processes=4)


def assert_clipped_as_in_one_process(results: Results, spread: str) -> None:
    for rank in results:
        found, expected = rank[f"clip {spread}"]["found"], rank[f"clip {spread}"]["expected"]
        assert found["clipped"] == expected["clipped"] > 8
        assert list(found["weights"]) == list(expected["weights"])
        for name, weight in expected["weights"].items():
            np.testing.assert_allclose(found["weights"][name], weight, rtol=0, atol=1e-6)
        for step, other in zip(found["factors"], expected["factors"], strict=True):
            assert list(step) == list(other)
            for site, gamma in other.items():
                np.testing.assert_allclose(step[site], gamma, rtol=0, atol=1e-6)


def assert_held_as_in_one_process(results: Results, spread: str, per: str) -> None:
    heads: dict[str, dict[int, float]] = {}
    for place, rank in enumerate(results):
        found, expected = rank[f"held {spread} {per}"]["found"], rank[f"held {spread} {per}"]["expected"]
        for site, whole in expected.items():
            assert (len(set(whole)) == 1) == (per == "layer")
            first = place % 2 * 2 if spread.endswith("tp") else 0
            np.testing.assert_allclose(found[site], whole[first:][: len(found[site])], rtol=0, atol=1e-6)
            heads.setdefault(site, {}).update(enumerate(found[site], first))
    assert [(site, sorted(seen)) for site, seen in heads.items()] == [
        ("layers.0", [0, 1, 2, 3]),
        ("layers.1", [0, 1, 2, 3]),
    ]


@pytest.mark.parametrize("spread", [*TWO, *(f"unnamed {name}" for name in TWO)])
def test_on_two_ranks_clipped_weights_are_those_of_one_process(two: Results, spread: str) -> None:
    assert_clipped_as_in_one_process(two, spread)


@pytest.mark.parametrize("spread", [*FOUR, *(f"unnamed {name}" for name in FOUR)])
def test_on_data_and_tensor_parallel_ranks_clipped_weights_are_those_of_one_process(four: Results, spread: str) -> None:
    assert_clipped_as_in_one_process(four, spread)


@pytest.mark.parametrize("per", ["head", "layer"])
@pytest.mark.parametrize("spread", TWO)
def test_on_two_ranks_held_temperatures_are_those_of_one_process(two: Results, spread: str, per: str) -> None:
    assert_held_as_in_one_process(two, spread, per)


@pytest.mark.parametrize("per", ["head", "layer"])
@pytest.mark.parametrize("spread", FOUR)
def test_on_data_and_tensor_parallel_ranks_held_temperatures_are_those_of_one_process(
    four: Results, spread: str, per: str
) -> None:
    assert_held_as_in_one_process(four, spread, per)


def test_queries_that_are_dtensors_are_divided_by_the_temperatures_of_their_heads(two: Results) -> None:
    for place, rank in enumerate(two):
        found, expected = rank["held DTensors"]["found"], rank["held DTensors"]["expected"]
        here = slice(2 * place, 2 * place + 2)
        np.testing.assert_allclose(found["temperatures"], expected["temperatures"][here], rtol=0, atol=1e-6)
        np.testing.assert_allclose(found["output"], expected["output"], rtol=0, atol=1e-6)


def test_parts_of_weights_may_be_uneven_empty_or_along_the_other_dimension(four: Results) -> None:
    for rank in four:
        assert rank["scaled rows"] == [True] * 15


def test_where_one_rank_fails_none_waits_and_no_weight_moves(two: Results) -> None:
    first, second = (rank["lone failure"] for rank in two)
    assert not first["moved"]
    assert not second["moved"]
    assert first["errors"] == ["QKClip: another rank could not clip its heads, see its error."]
    assert second["errors"] == ["no layout"]


@pytest.mark.parametrize("case", ["without a batch", "without a batch, unnamed"])
def test_a_rank_without_a_batch_clips_what_the_others_have_seen(two: Results, case: str) -> None:
    for rank in two:
        found = rank[case]
        assert found["found"] == found["expected"]
        assert found["found"]["clipped"] > 0
        assert ["watch has sampled nothing yet" in error for error in found["errors"]] == [True, True]


def test_flat_pieces_of_weights_are_refused_with_the_reason(two: Results) -> None:
    for rank in two:
        assert "kept as flat pieces (FullyShardedDataParallel, DeepSpeed ZeRO-3), which have no heads" in rank["flat"]
