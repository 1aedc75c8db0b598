"""Columns of a run are those of its samples, wherever they are read from."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from attemper.results.run import open_run
from attemper.store.ranks import columns
from tests.support.runs import written
from tests.support.samples import sample, samples, sites

SITE = ("layers.1.attn", "self", "train")


def check(folder: Path, most: int) -> None:
    """Every column holds what the samples from its step to the next one are."""
    run = open_run(folder)
    found = columns(run.ranks, "max_logit", SITE, most)
    history = run.history("max_logit", SITE)
    assert len(found.steps) <= most
    assert (np.diff(found.steps) > 0).all()
    ends = [*np.searchsorted(history.steps, found.steps), len(history)]
    for column, (start, end) in enumerate(itertools.pairwise(ends)):
        part = history.values[start:end]
        np.testing.assert_allclose(found.least[column], np.nanmin(part, 0), rtol=1e-3)
        np.testing.assert_allclose(found.mean[column], np.nanmean(part, 0), rtol=1e-3)
        np.testing.assert_allclose(found.largest[column], np.nanmax(part, 0), rtol=1e-3)


@pytest.fixture(scope="module", params=[1, 5, 300, pytest.param(1700, marks=pytest.mark.slow("takes a second"))])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of so many samples."""
    path = tmp_path_factory.mktemp("run")
    written(path, samples(request.param, every=3))
    return path


def test_columns_are_those_of_the_samples(folder: Path) -> None:
    for most in (1, 7, 60, 300):
        check(folder, most)


def test_columns_leave_out_what_was_replaced(tmp_path: Path) -> None:
    written(tmp_path, samples(300))
    written(tmp_path, (sample(step) for step in range(200, 550)))
    for most in (8, 40):
        check(tmp_path, most)


@pytest.mark.slow("takes many seconds")
def test_columns_of_a_thinned_run_know_the_least_and_largest_of_what_went(tmp_path: Path) -> None:
    taken = written(tmp_path, samples(1500, labels=sites(2, 6)), max_bytes=150_000)
    run = open_run(tmp_path)
    assert len(run) < 1000
    assert "thinned" in run.remarks[0]
    found = columns(run.ranks, "max_logit", SITE, 20)
    first = np.stack([one.values[2, 6:] for one in taken[: int(found.steps[1])]])
    np.testing.assert_allclose(found.largest[0], first.max(0), rtol=1e-3)
    np.testing.assert_allclose(found.least[0], first.min(0), rtol=1e-3)


@pytest.mark.slow("takes many seconds")
def test_columns_of_a_site_that_came_late_and_of_one_that_two_ranks_have(tmp_path: Path) -> None:
    late = (sample(step, sites(1) if step < 300 else sites(2)) for step in range(700))
    written(tmp_path / "a", late)
    found = columns(open_run(tmp_path / "a").ranks, "max_logit", SITE, 24)
    known = np.asarray(~np.isnan(found.mean).any(1))
    assert found.steps[known].min() in range(250, 301)
    assert known[found.steps >= 304].all()
    written(tmp_path / "b", samples(300), rank=0)
    written(tmp_path / "b", samples(400), rank=1)
    check(tmp_path / "b", 20)
