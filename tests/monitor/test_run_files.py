"""The file of a run that a watch wrote: whole by itself, and kept when it is resumed or damaged."""

import logging
import sqlite3
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import attemper
from attemper.store.series import _align


def train(store: object, steps: range, heads: int = 4, **options: object) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, heads, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(2, 40, 32)
    with attemper.watch(model, store=store, **options) as watch:  # type: ignore[arg-type]
        for step in steps:
            model(x)
            watch.step(step)
        watch.mean("entropy")


def test_a_closed_run_is_one_file_even_if_the_watch_was_read(tmp_path: Path) -> None:
    train(tmp_path / "a", range(5))
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["fragment-0.sqlite"]
    assert len(attemper.open(tmp_path / "a").steps) == 5


def test_what_people_say_of_a_run_is_kept_as_it_is_and_when_it_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    train(attemper.Store(path, name="a/b", tags=("/clip",), notes="~3e-4 peak, 1/2 of it"), range(3))
    train(path, range(3, 5))
    run = attemper.open(path)
    assert (run.name, run.tags, run.notes) == ("a/b", ("/clip",), "~3e-4 peak, 1/2 of it")
    assert run.steps.tolist() == [0, 1, 2, 3, 4]


def test_a_limit_that_never_rings_is_read_back_as_a_number(tmp_path: Path) -> None:
    train(tmp_path / "a", range(3), limits={"logits": float("inf")})
    assert not [alarm for alarm in attemper.open(tmp_path / "a").alarms() if alarm.kind == "logits"]


def test_a_site_that_lost_heads_keeps_the_history_of_all(tmp_path: Path) -> None:
    train(tmp_path / "a", range(3), heads=8)
    train(tmp_path / "a", range(3, 5), heads=4)
    values = attemper.open(tmp_path / "a").history("entropy").values
    assert values.shape == (5, 2, 8)
    assert np.isnan(values[3:, :, 4:]).all()
    assert not np.isnan(values[:3]).any()


@pytest.mark.slow("takes seconds")
def test_a_damaged_run_does_not_stop_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path / "a", range(130))
    connection = sqlite3.connect(tmp_path / "a" / "fragment-0.sqlite")
    connection.execute("UPDATE cold SET numbers = zeroblob(20)")
    connection.commit()
    connection.close()
    with caplog.at_level(logging.WARNING, "attemper"):
        torch.manual_seed(0)
        model = nn.MultiheadAttention(32, 4, batch_first=True)
        with attemper.watch(model, store=tmp_path / "a") as watch:
            model(*[torch.randn(2, 40, 32)] * 3)
            watch.step(130)
    assert (
        len([record for record in caplog.records if "earlier samples of the run in a cannot be read" in record.message])
        == 1
    )


def test_two_samples_of_one_step_are_not_taken_for_two_steps() -> None:
    values = np.array([[10.0], [20.0], [30.0]], np.float32)
    wanted, rows = np.array([0, 1, 2]), np.array([0, 0, 2])
    found = _align(wanted, rows, 3, [(wanted, values)])
    np.testing.assert_array_equal(found, np.array([[20.0], [np.nan], [30.0]], np.float32))
