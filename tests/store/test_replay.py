"""Samples come back as they were taken."""

from __future__ import annotations

import numpy as np
import pytest

from attemper.store.compaction import CHUNK
from attemper.store.fragment import Fragment, replay
from tests.support.samples import NAMES, sample, sites


@pytest.mark.parametrize(("first", "last"), [(0, 10_000), (100, 140), (128, 255), (300, 300), (400, 500)])
def test_samples_between_two_numbers_are_those_that_were_taken(first, last):
    evaluation = sites(1, 2, "eval")
    taken = [sample(step, evaluation if step % 5 == 2 else None, NAMES[: 3 + step % 2]) for step in range(3 * CHUNK)]
    fragment = Fragment(None, bits=None)
    for one in taken:
        fragment.append(one)
        if one.step < 2 * CHUNK:
            fragment.fold()
    found = list(replay(fragment.tables(), first, last))
    assert len(found) == len(taken[first : last + 1])
    for one, expected in zip(found, taken[first : last + 1], strict=True):
        assert (one.step, one.time, one.tokens) == (expected.step, expected.time, expected.tokens)
        assert (one.sites, one.quantities) == (expected.sites, expected.quantities)
        assert np.array_equal(one.values, expected.values)


def test_of_a_thinned_run_those_that_are_left_come_back():
    fragment = Fragment(None, bits=None, max_bytes=120_000)
    for step in range(12 * CHUNK):
        fragment.append(sample(step))
        fragment.fold()
    found = list(replay(fragment.tables(), 0, 10_000))
    assert CHUNK < len(found) < 12 * CHUNK
    for one in found:
        assert np.array_equal(one.values, sample(one.step).values)
