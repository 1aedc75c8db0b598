"""Heads that are split over processes keep their numbers in the whole model: in readings, alarms, and stored runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attemper
from tests.support.exact_entropies import exact_entropies
from tests.support.ranks import torchrun

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch has no gloo on this platform")
WORKER = "tests.distributed.tensor_parallel_worker"
SITES = ["model.layers.0.self_attn", "model.layers.1.self_attn"]


def saved_llama(folder: Path, key_heads: int) -> None:
    """Writes a tiny Llama of four query heads, as the worker loads it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": key_heads}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder / f"llama-{key_heads}")


def assert_parts_of_the_whole(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Of four heads two processes have two each, with the numbers, in both senses, that they have in one process."""
    assert [head[1] for head in first["found"]] == [0, 1, 0, 1]
    assert [head[1] for head in second["found"]] == [2, 3, 2, 3]
    whole = {(name, head): values for name, head, *values in first["whole"]}
    for name, head, *values in (*first["found"], *second["found"]):
        np.testing.assert_allclose(values, whole[name, head], rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("workers")
    for key_heads in (4, 2):
        saved_llama(folder, key_heads)
    return torchrun(WORKER, folder, "tp_plan", "grouped keys", "stored"), folder


@pytest.mark.slow("starts several processes")
def test_ranks_of_a_tensor_parallel_model_number_their_heads_as_the_whole_model_does(
    results: tuple[list[dict[str, Any]], Path], seen: Any
) -> None:
    first, second = (one["tp_plan"] for one in results[0])
    assert_parts_of_the_whole(first, second)
    exact = exact_entropies(results[1] / "llama-4", torch.tensor(first["ids"]))
    errors = [abs(entropy - exact[site, head]) for site, head, entropy, _ in (*first["found"], *second["found"])]
    assert max(errors) < 1e-6
    seen("transformers", 'Llama, tp_plan="auto" on two ranks', "registry, sdpa", error_nats=max(errors))
    first, second = (one["grouped keys"] for one in results[0])
    assert_parts_of_the_whole(first, second)


@pytest.mark.slow("starts several processes")
def test_taps_that_cuda_graphs_replay_number_their_heads_as_the_whole_model_does(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    found = [one["taps in graphs"] for one in torchrun(WORKER, tmp_path, "taps in graphs")]
    assert found == [{"backend": "triton", "heads": [0, 1, 2]}, {"backend": "triton", "heads": [3, 4, 5]}]


@pytest.mark.slow("starts several processes")
def test_a_stored_run_of_two_ranks_shows_each_site_once_with_all_its_heads(
    results: tuple[list[dict[str, Any]], Path],
) -> None:
    found, folder = results
    assert [one["stored"]["heads"] for one in found] == [[0, 1, 0, 1], [2, 3, 2, 3]]
    for one, heads in zip(found, ((0, 1), (2, 3)), strict=True):
        assert one["stored"]["alarms"] == [[name, head] for name in SITES for head in heads]
    stored = attemper.open(folder / "run")
    assert [(site.name, site.heads, site.first_head) for site in stored.sites] == [(name, 4, 0) for name in SITES]
    assert len(list((folder / "run").glob("fragment-*.sqlite"))) == 2
    entropies = stored.history("entropy").values
    assert entropies.shape == (3, 2, 4)
    assert not np.isnan(entropies).any()
    assert not stored.remarks
    rung = stored.alarms()
    assert {(alarm.site, alarm.head) for alarm in rung} >= {(name, head) for name in SITES for head in range(4)}
