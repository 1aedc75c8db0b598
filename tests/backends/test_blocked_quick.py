"""The fast part of the kernel's tests: what ``python -m tests.mutants`` runs against each broken kernel."""

import math
from dataclasses import replace

import pytest
import torch

import attemper
from attemper.statistics import NAMES
from tests.support import agreement, cases
from tests.support.calls import attended

pytestmark = pytest.mark.usefixtures("poisoned_empty")

WHOLE_ROWS = ("entropy", "gini", "key_mass")
QUICK = [
    case
    for case in cases.CASES
    if case.name
    in (
        "ascending causal",
        "causal bottom-right",
        "causal window bottom-right",
        "bottom-right, more rows than keys",
        "mask with empty rows",
        "left padding",
        "bias",
        "grouped heads, mask per head",
        "softcap, bias",
        "sink, empty rows",
        "temperature everywhere",
        "three first tokens",
        "all at once",
        "mask one key wide",
        "bias one key wide",
        "bfloat16",
    )
]


@pytest.mark.parametrize("case", QUICK, ids=[case.name for case in QUICK])
@pytest.mark.quick("ascending", "rows", "bias", "all at once", "bfloat16")
@pytest.mark.turns(2)
def test_small_tiles_agree_with_the_oracle(case: cases.Case, tiled):
    tiled(2, 3, 40)
    agreement.assert_agreement(replace(case, names=cases.MERGED), "blocked")


@pytest.mark.parametrize("name", ["mask with empty rows", "all at once"])
def test_whole_rows_agree_with_the_oracle(name: str, tiled):
    tiled(3, 5, 60)
    case = next(case for case in QUICK if case.name == name)
    agreement.assert_agreement(replace(case, names=WHOLE_ROWS), "blocked")


@pytest.mark.parametrize("masked", [False, True], ids=["visible", "masked"])
def test_a_nan_in_a_key_spoils_the_rows_that_see_it_and_no_others(masked: bool, tiled):
    tiled(2, 2, 40)
    query, key = torch.randn(1, 2, 5, 3), torch.randn(1, 2, 5, 3)
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[:, 3] = not masked
    clean = attemper.attention_statistics(query, key, mask, True, stats=NAMES, spans=[(1, 3)], backend="blocked")
    key[:, :, 3] = math.nan
    stats = attemper.attention_statistics(query, key, mask, True, stats=NAMES, spans=[(1, 3)], backend="blocked")
    bad = torch.zeros(5, dtype=torch.bool) if masked else torch.arange(5) >= 3
    assert torch.equal(stats.nonfinite, bad.expand(1, 2, 5))
    for name in stats:
        if name == "key_mass":
            continue
        assert torch.equal(stats[name][:, :, ~bad], clean[name][:, :, ~bad]), name
        if name not in ("visible_keys", "support_size"):
            assert torch.isnan(stats[name][:, :, bad]).all(), name
    torch.testing.assert_close(stats.key_mass.sum(-1), torch.full((1, 2), float((~bad).sum())))


def test_a_nan_in_a_masked_key_leaves_the_gradients_of_values_as_they_are(tiled):
    tiled(2, 2, 40)
    query, key, value = (torch.randn(1, 2, 5, 3, requires_grad=True) for _ in range(3))
    spoilt = key.detach().clone().index_fill_(2, torch.tensor(3), math.nan)
    grads = []
    for keys in (key.detach(), spoilt):
        output = attemper.attention(query, keys, value, torch.arange(5) != 3, backend="blocked").output
        grads.append(torch.autograd.grad(output.square().sum(), value)[0])
    assert torch.equal(*grads)


def test_gradients_of_rows_without_keys_are_zero_even_below_infinite_gradients(tiled):
    tiled(2, 2, 40)
    leaves = [torch.randn(1, 1, 4, 3, requires_grad=True) for _ in range(3)]
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1] = False
    output, stats = attended("blocked", *leaves, mask, stats=("lse", "entropy"))
    above = torch.zeros(1, 1, 4)
    above[..., 1] = math.inf
    grads = torch.autograd.grad(
        [output, stats.lse, stats.entropy], leaves, [above[..., None].expand(output.shape), above, above]
    )
    for grad in grads:
        assert (grad == 0).all()


def test_dropout_draws_each_place_for_itself(tiled):
    tiled(2, 3, 1)
    ones = torch.ones(1, 8, 64, 1)
    value = torch.eye(9)[None, None].expand(1, 8, 9, 9)
    kept = attemper.attention(ones, ones[:, :, :9], value, dropout_p=0.5, backend="blocked").output * 9 / 2
    torch.testing.assert_close(kept.round(), kept, rtol=0, atol=1e-5)
    assert abs(kept.mean().item() - 0.5) < 0.04
    # No two tiles or blocks share their draws: patterns of 2 x 3 places, of which there are 64, spread evenly.
    patterns = kept.round().view(8, 32, 2, 3, 3).permute(0, 1, 3, 2, 4).reshape(-1, 6) @ 2.0 ** torch.arange(6)
    assert torch.bincount(patterns.long(), minlength=64).max() <= 12 + 20
    per_block = kept.round().view(8, 32, 2, 3, 3)
    assert not any(torch.equal(per_block[:, :, :, 0], per_block[:, :, :, other]) for other in (1, 2))
    assert not torch.equal(per_block[:, 0], per_block[:, 1])
