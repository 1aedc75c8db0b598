"""Blocks of samples: joined ones are those of all their samples."""

from __future__ import annotations

import numpy as np
import pytest

from attemper.store import pyramid


def drawn(seed: int, missing: float) -> np.ndarray:
    generator = np.random.default_rng(seed)
    values = generator.standard_normal((64, 8, 3)).astype(np.float32)
    values[generator.random(values.shape) < missing] = np.nan
    return values


@pytest.mark.parametrize("missing", [0.0, 0.3, 0.95, 1.0])
def test_blocks_hold_least_mean_largest_and_count(missing):
    values = drawn(0, missing)
    found = pyramid.blocks(values)
    known = np.ma.masked_invalid(values.astype(np.float64))
    for place, expected in [
        (pyramid.LEAST, known.min(1)),
        (pyramid.MEAN, known.mean(1)),
        (pyramid.LARGEST, known.max(1)),
    ]:
        np.testing.assert_allclose(found[:, place], np.ma.filled(expected, np.nan), rtol=1e-6, atol=1e-6)
    assert np.array_equal(found[:, pyramid.COUNT], (~np.isnan(values)).sum(1))


@pytest.mark.parametrize("missing", [0.0, 0.5, 0.97, 1.0])
def test_joined_blocks_are_the_blocks_of_all_their_samples(missing):
    values = drawn(1, missing)
    found = pyramid.join(pyramid.blocks(values), 4)
    np.testing.assert_allclose(found, pyramid.blocks(values.reshape(16, 32, 3)), rtol=1e-5, atol=1e-6)


def test_infinities_stay():
    values = np.array([[[1.0], [np.inf]], [[-np.inf], [np.inf]]], np.float32)
    found = pyramid.join(pyramid.blocks(values), 2)
    assert found[0, pyramid.LEAST, 0] == -np.inf
    assert found[0, pyramid.LARGEST, 0] == np.inf


def test_no_sample_is_nothing():
    empty_blocks = pyramid.empty_blocks(2, 3)
    assert np.isnan(empty_blocks[:, :3]).all()
    assert not empty_blocks[:, pyramid.COUNT].any()
    values = drawn(2, 0.2)
    both = np.concatenate([pyramid.blocks(values), pyramid.empty_blocks(64, 3)])
    np.testing.assert_array_equal(pyramid.join(both, 64)[0], pyramid.join(pyramid.blocks(values), 64)[0])


@pytest.mark.parametrize(
    ("samples", "level"), [(100, 0), (9_599, 0), (9_600, 5), (38_399, 5), (38_400, 7), (1_000_000, 11)]
)
def test_a_picture_of_300_columns_needs_a_level_with_as_many_blocks(samples, level):
    assert pyramid.level_for(samples, 300) == level
    assert not level or 300 <= samples >> level < 1_200 + 4
