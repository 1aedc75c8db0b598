"""Which ranks a group is of, and what one process makes of ``reduce=``; processes are in tests/distributed."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import attemper
from attemper.distributed.data_parallel import Coordinate, _kind, data_parallel_group, is_distributed, weight_ranks
from tests.sites.own_models import Own


@pytest.mark.parametrize(
    ("shape", "data"),
    [
        ((4, 2, 8), 1),  # pipeline, data, tensor
        ((4, 32, 8), 1),
        ((1, 16, 1), 1),
        ((2, 1, 4), 1),
        ((3, 5, 1), 1),
    ],
)
def test_groups_of_a_mesh_are_numbered_by_pipeline_and_tensor_coordinate(shape: tuple[int, ...], data: int) -> None:
    ranks = torch.arange(torch.tensor(shape).prod().item()).view(shape)
    groups = ranks.movedim(data, -1)
    for pipeline, tensor in itertools.product(range(shape[0]), range(shape[2])):
        found = Coordinate.of(groups[pipeline, tensor].tolist())
        expected = pipeline * shape[2] + tensor if shape[data] > 1 else groups[pipeline, tensor, 0].item()
        assert found.number == expected
        if shape[data] > 1:
            assert (found.pipeline, found.tensor) == (pipeline, tensor)


def test_two_groups_never_have_the_same_number() -> None:
    for groups in ([[0, 3], [1, 2]], [[0, 1, 5], [2, 3, 4]], [[0], [1], [2]], [[0, 4], [1, 5], [2, 6], [3, 7]]):
        numbers = [Coordinate.of(group).number for group in groups]
        assert len(set(numbers)) == len(groups), groups


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("dp", "data"), ("dp_replicate", "data"), ("dp_shard", "data"), ("fsdp", "data"), ("replicate", "data"),
        ("shard", "data"), ("dp0", "data"), ("data", "data"), ("tp", "other"), ("pp", "other"), ("cp", "other"),
        ("ep", "other"), ("tensor", "other"), ("dp_shard_cp", None), ("dp_cp", None), ("x", None),
    ],
)  # fmt: skip
def test_names_of_mesh_dimensions_say_whether_ranks_along_them_read_other_examples(name: str, kind: str | None) -> None:
    assert _kind(name) == kind


def test_one_process_has_no_group_and_reduce_changes_nothing_but_that_steps_are_told() -> None:
    assert not is_distributed()
    assert data_parallel_group(nn.Linear(2, 2)) is None
    layer = nn.TransformerEncoderLayer(16, 2)
    assert weight_ranks(layer, [layer.self_attn], "data") == []
    readings = []
    for reduce in (None, "data"):
        torch.manual_seed(0)
        model = Own()
        x = torch.randn(2, 12, 32)
        with attemper.watch(model, reduce=reduce) as watch:
            model(x)
            watch.step()
        readings.append([site.to_dict() for site in watch.table().sites])
        assert "ranks" not in repr(watch)
    assert readings[0] == readings[1]


@pytest.mark.parametrize("reduce", ["tensor", 1, True, ["dp"]])
@pytest.mark.parametrize(
    "made", [attemper.watch, attemper.QKClip, lambda model, **options: attemper.Thermostat(model, 1.0, **options)]
)
def test_what_reduce_cannot_be_is_refused(made: Any, reduce: object) -> None:
    with pytest.raises(attemper.InputError, match=r'\(reduce=\.\.\.\) must be "data", a process group'):
        made(nn.TransformerEncoderLayer(16, 2), reduce=reduce)


def test_the_group_of_another_rank_is_told_as_such() -> None:
    with pytest.raises(attemper.InputError, match=r"the group of another rank: each rank names its own"):
        attemper.watch(nn.Linear(2, 2), reduce=-100)  # type: ignore[arg-type]
