"""Few queries over many keys: the keys are split, and the parts joined by the law of merging."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attemper.backends.contract import Problem
from attemper.backends.triton import tuning
from tests.support import agreement, cases

pytestmark = pytest.mark.usefixtures("poisoned_empty")

NAMES = (
    "one row", "ascending causal", "causal bottom-right", "causal window bottom-right", "mask with empty rows",
    "left padding", "bias", "grouped heads, mask per head", "softcap, bias", "sink, empty rows",
    "temperature everywhere", "three first tokens", "all at once", "bfloat16", "float16",
)  # fmt: skip
CASES = [case for case in cases.CASES if case.name in NAMES]


@pytest.fixture
def many_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five parts of the few keys that the cases have: some see nothing of a row, and the last ones nothing at all."""
    monkeypatch.setattr(tuning, "splits", lambda problem: 5)


@pytest.mark.slow("takes seconds in Triton's interpreter")
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
@pytest.mark.quick("sink")
def test_five_parts_of_the_keys_agree_with_the_oracle(case: cases.Case, many_splits: None, tiled):
    tiled(0, 4)
    agreement.assert_agreement(replace(case, names=cases.MERGED), "triton", gradients=False)


def test_a_call_with_few_rows_and_many_keys_is_split_and_no_other():
    def splits(batch: int, heads: int, groups: int, rows: int, keys: int) -> int:
        query, key = (torch.empty(batch, *shape, 8, device="meta") for shape in ((heads, rows), (groups, keys)))
        return tuning.splits(Problem(query, key, key, None, torch.ones(1, 1, 1)))

    assert splits(1, 32, 8, 1, 8192) == 32
    assert splits(64, 32, 8, 1, 8192) == 1
    assert splits(1, 32, 8, 1, 500) == 1
    assert splits(1, 1, 1, 1, 1 << 20) == 256
    assert splits(1, 8, 1, 9, 8192) == 1
