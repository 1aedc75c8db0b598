"""The blocked kernel however it is cut: tiles of rows, keys and heads leave no trace in results or gradients."""

from dataclasses import replace

import pytest
import torch

from tests.support import agreement, cases

pytestmark = pytest.mark.usefixtures("poisoned_empty")

KEY_BLOCKS = (1, 3, 16, 32, 64, 2048)


@pytest.mark.parametrize(**cases.by_name)
def test_tiles_of_two_rows_and_three_keys_change_nothing(case: cases.Case, tiled):
    tiled(2, 3, 1)
    agreement.assert_agreement(replace(case, names=cases.MERGED), "blocked")


@pytest.mark.parametrize(**cases.by_name)
@pytest.mark.quick("mask", "window", "bias", "grouped", "causal", "one", "all at once", "empty")
def test_tiles_of_whole_rows_change_nothing(case: cases.Case, tiled):
    tiled(3, 5, 60)
    agreement.assert_agreement(replace(case, names=("gini", "key_mass", "entropy")), "blocked")


FULL = pytest.mark.slow("the full size of what runs smaller by default")


def _ragged_blocks():
    """Every block size on the short rows; on the long ones only two each by default, all of them with ``--all``."""
    for number, case in enumerate(cases.RAGGED):
        for place, keys in enumerate(KEY_BLOCKS):
            quick = (
                (case.keys < 100 and keys > 1)
                or (keys > 16 and (number + place) % 2 == 0)
                or (keys, case.keys) == (1, 97)
            )
            yield pytest.param(case, keys, id=f"{case.name}, blocks of {keys}", marks=[] if quick else FULL)


@pytest.mark.hostile("blocked")
@pytest.mark.parametrize(("case", "keys"), list(_ragged_blocks()))
def test_key_blocks_of_any_size_agree_on_ragged_shapes(case: cases.Case, keys: int, tiled):
    tiled(2, keys, 1 << 18)
    agreement.assert_agreement(case, "blocked")


@pytest.mark.hostile("reference")
@pytest.mark.parametrize(**cases.ragged_by_name)
def test_the_reference_agrees_on_ragged_shapes(case: cases.Case):
    agreement.assert_agreement(case, "reference")


@pytest.mark.parametrize("elements", [1, 40, 200, 1 << 18])
@pytest.mark.parametrize("name", ["all at once", "grouped heads, mask per head", "sink, empty rows"])
def test_chunks_of_batch_and_heads_change_nothing(name: str, elements: int, tiled):
    tiled(4, 7, elements)
    case = next(case for case in cases.CASES if case.name == name)
    agreement.assert_agreement(replace(case, names=cases.MERGED), "blocked")


@pytest.mark.parametrize("masked", [pytest.param(False, id="causal", marks=FULL), pytest.param(True, id="masked")])
def test_tiles_of_the_kernels_own_choice_agree_on_rows_that_need_several(masked: bool):
    options = (
        {"attn_mask": torch.arange(1100) >= 600} if masked else {"is_causal": True, "causal_alignment": "bottom-right"}
    )
    case = cases.Case(
        f"own tiles {masked}", batch=1, heads=2, groups=1, rows=140, keys=1100, size=4, width=2, ascending=not masked,
        options=options, names=cases.ONE_PASS,
    )  # fmt: skip
    agreement.assert_agreement(case, "blocked")
