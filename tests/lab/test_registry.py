"""The registry: every name runs, the same seed gives the same records, and wrong names list the right ones."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import pytest
import torch

from attemper.errors import InputError
from attemper.lab import EXPERIMENTS, run
from tests.support.experiments import Run

OF_NUMBERS = ("scaling", "saturation", "temperature", "entropy")
SLOW = pytest.mark.slow("takes many seconds")
AGAIN = [
    pytest.param(name, marks=[] if name == "entropy" else SLOW)
    for name in EXPERIMENTS
    if name not in ("complexity", "regularization")  # one measures times, of the other --long has the same twice
]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_name_is_a_file_with_a_function_of_that_name_and_a_seed(name: str):
    function = getattr(import_module(f"attemper.lab.{name}"), name)
    parameters = inspect.signature(function).parameters
    assert list(parameters) == ["seed"]
    assert parameters["seed"].kind is inspect.Parameter.KEYWORD_ONLY
    assert parameters["seed"].default == 0


@pytest.mark.parametrize("name", AGAIN)
def test_a_second_run_gives_the_same_records_bit_for_bit_and_moves_no_generator_of_the_process(
    name: str, experiment: Run
):
    before = torch.get_rng_state()
    assert run(name, seed=0).to_dict() == experiment(name).to_dict()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.long("takes a minute")
@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name != "complexity"])
def test_the_number_of_threads_changes_no_bit_and_is_left_as_it_was(name: str, experiment: Run):
    """Complexity computes nothing but what it measures, with the threads of the process."""
    threads = torch.get_num_threads()
    with_one = experiment(name).to_json()
    assert torch.get_num_threads() == threads == 1
    try:
        torch.set_num_threads(2)
        assert run(name).to_json() == with_one
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow("takes a second")
@pytest.mark.parametrize("name", AGAIN)
def test_another_seed_draws_other_numbers(name: str, experiment: Run):
    other = experiment(name, seed=1)
    assert other.seed == 1
    same = other.to_dict()["tables"] == experiment(name).to_dict()["tables"]
    assert same == (name == "representation"), "which draws nothing"


@pytest.mark.parametrize("name", OF_NUMBERS)
def test_tables_and_charts_are_named_once_said_and_labelled(name: str, experiment: Run):
    result = experiment(name)
    assert result.name == name
    assert result.question.endswith("?")
    titles = [table.title for table in result.tables]
    assert len(set(titles)) == len(titles)
    for table in result.tables:
        assert table.see.endswith((".", ")"))
        assert table.rows
        assert not table.measured
    for chart in result.charts:
        assert chart.x.label
        assert chart.y.label
        assert all(len(series.x) == len(series.y) for series in chart.series)
        assert all(not series.errors or len(series.errors) == len(series.x) for series in chart.series)


def test_a_wrong_name_lists_the_right_ones():
    with pytest.raises(InputError, match=r"must be one of 'scaling', .*'regularization'; got 'scalling'"):
        run("scalling")


ANYTHING: Any = 1.5


@pytest.mark.parametrize("seed", [-1, ANYTHING, True, "0"])
def test_a_seed_that_is_no_whole_number_is_refused(seed: Any):
    with pytest.raises(InputError, match="lab scaling: seed must be an int of at least 0, got"):
        run("scaling", seed=seed)
