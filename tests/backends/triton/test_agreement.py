"""The Triton kernels against the oracle: every feature, however it is cut into blocks; sizes that divide nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support import agreement, cases

pytestmark = pytest.mark.usefixtures("poisoned_empty")

CASES = [case for case in cases.CASES if case.dtype != torch.float64]
SIZES = [case for case in cases.RAGGED if max(case.size, case.width) <= 256]


RAGGED = "K=97, D=3, E=5, ascending"
FULL = pytest.mark.long("more cases in Triton's interpreter")


@FULL
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_blocks_of_four_rows_and_keys_change_nothing(case: cases.Case, tiled):
    tiled(4, 4)
    agreement.assert_agreement(replace(case, names=cases.MERGED), "triton")


@pytest.mark.hostile("triton")
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=[] if case.name == RAGGED else FULL) for case in SIZES]
)
def test_ragged_shapes_agree(case: cases.Case, tiled):
    tiled(4, 64)
    agreement.assert_agreement(case, "triton")


@pytest.mark.parametrize("name", ["ascending causal", "causal window bottom-right", "all at once", "bfloat16"])
@pytest.mark.quick("all at once")
def test_blocks_of_the_interpreters_own_choice_agree(name: str):
    case = next(case for case in CASES if case.name == name)
    agreement.assert_agreement(replace(case, names=cases.MERGED, batch=2), "triton")
