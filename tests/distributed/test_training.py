"""Watching training that is spread over two processes of gloo: what is read, and that nobody notices.

All cases run in one launch of ``worker.py`` under torchrun; each test asks what its case gave in both processes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.ranks import torchrun

pytestmark = [
    pytest.mark.long("starts several processes"),
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch has no gloo on this platform"),
]

WORKER = "tests.distributed.worker"
Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Of both processes: case -> what came out."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    pytest.importorskip("lightning")
    return torchrun(WORKER, tmp_path_factory.mktemp("workers"), seconds=600)


def of(results: Results, case: str) -> list[Any]:
    """What a case gave, in the order of ranks."""
    return [result[case] for result in results]


@pytest.mark.parametrize(
    "case", ["ddp", "module of ddp", "ddp with a mask by place", "fsdp2", "ddp with checkpointing"]
)
def test_a_reading_is_that_of_the_model_in_one_process_on_this_process_part_of_the_batch(
    results: Results, case: str
) -> None:
    both = of(results, case)
    for one in both:
        assert one["found"] == one["expected"]
        assert [site["name"] for site in one["found"]["sites"]] == ["layers.0", "layers.1"]
        assert one["found"]["model"] == "Model"
        assert one["found"]["tokens"] == (32 if "mask" in case else 40)
    assert both[0]["found"]["sites"] != both[1]["found"]["sites"]


@pytest.mark.parametrize("case", ["training ddp", "training fsdp2", "training ddp with checkpointing"])
def test_losses_parameters_and_random_numbers_are_bit_identical_and_only_our_hooks_go(
    results: Results, case: str
) -> None:
    for one in of(results, case):
        assert one == {"compared": 23, "equal": 23, "sampled": 3}


def test_a_process_that_watches_alone_keeps_none_of_the_others_waiting(results: Results) -> None:
    first, second = of(results, "only rank 0")
    assert first == [{"compared": 23, "equal": 23, "sampled": 3}] * 2
    assert second == [{"compared": 23, "equal": 23, "sampled": 0}] * 2


@pytest.mark.parametrize(
    "case",
    [
        "compiled inside ddp", "compiled around ddp", "compiled blocks in ddp",
        "compiled blocks in ddp with checkpointing", "compiled blocks in fsdp2",
        "blocks in fsdp2 as torchtitan compiles", "fsdp2 that writes a parameter",
        "fsdp2 that shards its root again",
    ],
)  # fmt: skip
def test_steps_with_shadow_passes_on_every_rank_are_those_without(results: Results, case: str) -> None:
    for one in of(results, f"training {case}"):
        assert one["right"], one


def test_a_sharded_model_that_not_all_ranks_watch_has_no_shadow_pass(results: Results) -> None:
    first, second = of(results, "fsdp2 watched by rank 0")
    assert "not all ranks watch it on the same steps: open the watch on every rank" in first
    assert not second


def test_ranks_that_sample_other_steps_of_a_sharded_model_are_refused_by_one_error_on_each(results: Results) -> None:
    first, second = of(results, "fsdp2 watched unlike")
    assert first == second
    assert "rank 0: every=1, step 0 of a new run; rank 1: every=2, step 0 of a new run" in first


def test_ranks_that_have_not_met_meet_again_for_the_next_watch(results: Results) -> None:
    assert of(results, "fsdp2 watched by rank 0, then by all") == [[0, 1], [0, 1]]


@pytest.mark.parametrize("case", ["compiled ddp", "module of compiled ddp"])
def test_taps_in_a_compiled_ddp_stay_in_one_graph_and_count_every_micro_batch(results: Results, case: str) -> None:
    for one in of(results, case):
        assert one == {"graphs": 1, "sampled": 2, "names": ["tap.0", "tap.1"], "rows": [80, 80]}


def test_a_tap_beside_a_seen_attention_is_one_site_under_ddp_with_the_name_it_has_compiled(results: Results) -> None:
    for one in of(results, "ddp tapped"):
        assert one == {"names": ["tap.0", "tap.1"], "rows": [80, 80]}


@pytest.mark.parametrize("case", ["heads split", "heads split, tapped"])
def test_of_split_heads_each_process_reads_its_own(results: Results, case: str) -> None:
    first, second = of(results, case)
    found = [*first["found"], *second["found"]]
    assert first["whole"] == second["whole"]
    assert [entropy for _, entropy in found] == [entropy for _, entropy in first["whole"]]
    assert [head for head, _ in found] == [0, 1, 2, 3]


def test_dtensors_that_are_not_split_are_read_whole(results: Results) -> None:
    for one in of(results, "nothing split"):
        assert one["found"] == one["whole"]


def test_split_sequences_are_skipped_with_the_reason(results: Results) -> None:
    for one in of(results, "tokens split"):
        assert (
            "Parallel: its queries, keys or masks are DTensors placed as ('S(2)',): only heads may be" in one["error"]
        )


def test_a_tap_on_split_sequences_says_what_it_needs(results: Results) -> None:
    for one in of(results, "tokens split, tapped"):
        assert one["error"].startswith("tap(name='tap'): its queries, keys or masks are DTensors placed as ('S(2)',)")


def test_parts_of_sequences_under_context_parallelism_are_skipped_with_the_reason(results: Results) -> None:
    for one in of(results, "context parallel"):
        assert one["skipped"] == [["tap", "context parallelism spreads its sequences over processes"]]
        assert one["sites_afterwards"] == 1


def test_the_trainer_reads_all_ranks_reports_in_the_main_process_and_trains_the_same(results: Results) -> None:
    first, second = of(results, "trainer")
    names = ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert first == {"equal": True, "names": names, "tokens": 80}
    assert second == {"equal": True, "names": None, "tokens": None}


def test_lightning_reads_all_ranks_and_reports_in_the_main_process(results: Results) -> None:
    first, second = of(results, "lightning")
    assert first == {"steps": [0, 2], "names": ["net.layers.0", "net.layers.1"], "hooks": 0}
    assert second == {"steps": [], "names": None, "hooks": 0}


def test_learned_temperatures_and_a_penalty_train_as_in_one_process(results: Results) -> None:
    both = of(results, "ddp tempered")
    for one in both:
        assert any(name.endswith("log_temperature") for name in one["found"])
        for name, gradient in one["expected"].items():
            got, want = torch.tensor(one["found"][name]), torch.tensor(gradient)
            assert torch.allclose(got, want, rtol=1e-4, atol=1e-6 * (1 + want.abs().max().item())), name
            assert want.abs().max() > 0, name
        assert "on the model before it is wrapped" in one["refused"]
    assert both[0]["found"] == both[1]["found"]
