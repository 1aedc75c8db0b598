"""The blocked kernel under every way of cutting: rows, keys and chunks of heads must leave no trace in results or gradients."""

from dataclasses import replace

import pytest

from tests import agreement, cases

pytestmark = pytest.mark.usefixtures("poisoned_empty")

KEY_BLOCKS = (1, 3, 16, 32, 64, 2048)


@pytest.mark.parametrize(**cases.by_name)
def test_tiles_of_two_rows_and_three_keys_change_nothing(case: cases.Case, tiled):
    tiled(2, 3, 1)
    agreement.assert_agreement(replace(case, names=cases.MERGED), "blocked")


@pytest.mark.parametrize(**cases.by_name)
def test_tiles_of_whole_rows_change_nothing(case: cases.Case, tiled):
    tiled(3, 5, 60)
    agreement.assert_agreement(replace(case, names=("gini", "key_mass", "entropy")), "blocked")


@pytest.mark.parametrize("keys", KEY_BLOCKS)
@pytest.mark.parametrize(**cases.ragged_by_name)
def test_key_blocks_of_any_size_agree_on_ragged_shapes(case: cases.Case, keys: int, tiled):
    tiled(2, keys, 1 << 18)
    agreement.assert_agreement(case, "blocked")


@pytest.mark.parametrize(**cases.ragged_by_name)
def test_the_reference_agrees_on_ragged_shapes(case: cases.Case):
    agreement.assert_agreement(case, "reference")


@pytest.mark.parametrize("elements", [1, 40, 200, 1 << 18])
@pytest.mark.parametrize("name", ["all at once", "grouped heads, mask per head", "sink, empty rows"])
def test_chunks_of_batch_and_heads_change_nothing(name: str, elements: int, tiled):
    tiled(4, 7, elements)
    case = next(case for case in cases.CASES if case.name == name)
    agreement.assert_agreement(replace(case, names=cases.MERGED), "blocked")
