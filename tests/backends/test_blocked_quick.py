"""The fast part of the kernel's tests: what ``python -m tests.mutants`` runs against each broken kernel."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import attemper
from attemper.statistics import NAMES
from tests.support import agreement, cases, oracle
from tests.support.calls import attended, packed

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


def of_scores(scores: Tensor) -> attemper.types.AttentionStats:
    query, key = (torch.zeros(1, 1, n, 1, dtype=scores.dtype) for n in scores.shape)
    return attended("blocked", query, key, key, scores).stats


@pytest.mark.parametrize("block", [1, 3, 16])
def test_masked_first_blocks_leave_the_entropy_of_the_rest(block: int, tiled):
    tiled(2, block, 1 << 18)
    scores = torch.randn(3, 40)
    scores[:, :21] = -math.inf
    want = torch.distributions.Categorical(logits=scores[:, 21:].double()).entropy()
    torch.testing.assert_close(of_scores(scores).entropy[0, 0].double(), want, rtol=0, atol=5e-6)


def test_one_key_far_above_the_rest_leaves_a_small_true_entropy(tiled):
    tiled(1, 32, 1 << 18)
    scores = torch.full((1, 1024), -20.0)
    scores[0, 700] = 0.0
    want = oracle.precise_entropy(scores[0].tolist())
    assert abs(of_scores(scores).entropy.item() / want - 1) <= 0.01


def test_scores_very_far_apart_leave_every_gradient_finite(tiled):
    tiled(2, 2, 40)
    leaves = [torch.randn(1, 2, 4, 3, requires_grad=True) for _ in range(3)]
    output, stats = attended("blocked", *leaves, temperature=1e-30)
    names = [name for name in stats if stats[name].requires_grad and "logit" not in name and name != "lse"]
    (output.sum() + sum(stats[name].sum() for name in names) + stats.logit_variance.sum()).backward()
    for leaf in leaves:
        assert leaf.grad is not None
        assert torch.isfinite(leaf.grad).all()


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


def test_the_gradient_of_dropout_uses_the_weights_that_were_dropped(tiled, full_size: bool):
    tiled(2, 3, 8)
    leaves = [torch.randn(1, 2, n, 2, dtype=torch.float64, requires_grad=True) for n in (4, 5, 5)]

    def call(*tensors: Tensor) -> Tensor:
        torch.manual_seed(11)
        return attemper.attention(*tensors, dropout_p=0.5, backend="blocked").output

    assert torch.autograd.gradcheck(call, leaves, fast_mode=not full_size)


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


def test_ties_for_the_maximum_send_its_gradient_to_the_lowest_key(tiled):
    tiled(1, 2, 4)
    bias = torch.tensor([[0.0, 2.0, 1.0, 2.0, 2.0]], requires_grad=True)
    (grad,) = torch.autograd.grad(of_scores(bias).max_logit.sum(), bias)
    assert grad.tolist() == [[0.0, 1.0, 0.0, 0.0, 0.0]]


def test_sampled_rows_read_as_they_do_among_all(tiled):
    tiled(2, 3, 40)
    query, key = torch.randn(1, 2, 9, 3), torch.randn(1, 2, 12, 3)
    options: dict[str, Any] = {"is_causal": True, "causal_alignment": "bottom-right", "window_size": (4, 0)}
    options["backend"] = "blocked"
    names = ("all", "mean_distance")
    whole = attemper.attention_statistics(query, key, stats=names, **options)
    part = attemper.attention_statistics(query, key, stats=names, rows=4, **options)
    for name in part:
        torch.testing.assert_close(part[name], whole[name][:, :, part.rows], rtol=1e-5, atol=1e-6, msg=name)


def test_packed_documents_equal_a_loop_over_documents():
    tensors = [torch.randn(7, 2, 3, requires_grad=True) for _ in range(3)]
    temperature = (torch.rand(1, 2, 7) + 0.5).requires_grad_()
    sink = torch.randn(2, requires_grad=True)
    offsets = torch.tensor([0, 3, 3, 7])
    options = {"is_causal": True, "stats": ("entropy", "mean_distance", "key_mass"), "sink_logits": sink}
    whole = packed("blocked", *tensors, offsets, offsets, temperature=temperature, **options)
    loss = torch.zeros(())
    for rows in (slice(0, 3), slice(3, 7)):
        own = [tensor[rows].transpose(0, 1)[None] for tensor in tensors]
        one = attended("blocked", *own, temperature=temperature[:, :, rows], **options)
        torch.testing.assert_close(whole.output[rows], one.output[0].transpose(0, 1))
        for name in one.stats:
            torch.testing.assert_close(whole.stats[name][:, :, rows], one.stats[name], msg=name)
        loss = loss + one.output.square().sum() + one.stats.entropy.sum()
    leaves = [*tensors, temperature, sink]
    grads = torch.autograd.grad(whole.output.square().sum() + whole.stats.entropy.sum(), leaves)
    for got, want in zip(grads, torch.autograd.grad(loss, leaves), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
