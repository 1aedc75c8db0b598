"""The blocked kernel on sizes that divide nothing, and tiles of its own choice; tests/laws draws tiles of any size."""

import pytest
import torch

from tests.support import agreement, cases

pytestmark = pytest.mark.usefixtures("poisoned_empty")

KEY_BLOCKS = (1, 3, 16, 32, 64, 2048)


FULL = pytest.mark.slow("the full size of what runs smaller by default")


def _ragged_blocks():
    """Every block size on the short rows; on the long ones only two each by default, all of them with ``--all``."""
    for number, case in enumerate(cases.RAGGED):
        for place, keys in enumerate(KEY_BLOCKS):
            quick = (
                (case.keys < 100 and keys > 1 and (number + place) % 3 == 0)
                or (keys > 16 and (number + place) % 6 == 0)
                or case.keys == 96
            )
            yield pytest.param(case, keys, id=f"{case.name}, blocks of {keys}", marks=[] if quick else FULL)


@pytest.mark.hostile("blocked")
@pytest.mark.parametrize(("case", "keys"), list(_ragged_blocks()))
@pytest.mark.turns(2)
def test_key_blocks_of_any_size_agree_on_ragged_shapes(case: cases.Case, keys: int, tiled):
    tiled(2, keys, 1 << 18)
    agreement.assert_agreement(case, "blocked")


@pytest.mark.hostile("reference")
@pytest.mark.parametrize(**cases.ragged_by_name)
@pytest.mark.quick("K=97")
def test_the_reference_agrees_on_ragged_shapes(case: cases.Case):
    agreement.assert_agreement(case, "reference")


@pytest.mark.slow("takes seconds")
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
