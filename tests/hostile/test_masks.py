"""Hostile inputs, table "Masks and shapes": rows that see nothing, masks that are none, numbers out of place."""

import math

import pytest
import torch
from torch import Tensor

from tests.support import cases
from tests.support.calls import attended, had

pytestmark = [pytest.mark.each, pytest.mark.hostile, pytest.mark.usefixtures("poisoned_empty")]

MIN = torch.finfo(torch.float32).min
B, H, Q, K, D = 2, 3, 6, 9, 8


def tensors(queries: int = Q, keys: int = K, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (queries, keys, keys)
    query, key, value = (torch.randn(B, H, n, D, dtype=dtype) for n in shapes)
    return query * 2, key, value


ROW_MASKS = {
    "bool": lambda seen: seen,
    "-inf": lambda seen: torch.zeros(seen.shape).masked_fill(~seen, -torch.inf),
    "finfo.min": lambda seen: torch.zeros(seen.shape).masked_fill(~seen, MIN),
    "finfo.min twice": lambda seen: torch.zeros(seen.shape).masked_fill(~seen, MIN) * 2,
    "half the finfo.min of float16": lambda seen: torch.zeros(seen.shape, dtype=torch.float16).masked_fill(
        ~seen, -32768.0
    ),
    "finfo.min of bfloat16": lambda seen: torch.zeros(seen.shape, dtype=torch.bfloat16).masked_fill(
        ~seen, torch.finfo(torch.bfloat16).min
    ),
}


@pytest.mark.parametrize("softcap", [None, 5.0], ids=["", "softcap"])
@pytest.mark.parametrize("kind", ROW_MASKS)
@pytest.mark.turns(2)
def test_a_row_with_no_visible_key_has_zero_output_and_zero_gradient(kind: str, softcap: float | None, backend: str):
    row = 2
    seen = torch.rand(1, 1, Q, K) < 0.7
    seen[..., 0] = True
    unmasked, masked = seen.clone(), seen.clone()
    masked[:, :, row] = False
    results, grads = [], []
    for visible in (masked, unmasked):
        torch.manual_seed(1)
        leaves = [tensor.requires_grad_() for tensor in tensors()]
        output, stats = attended(backend, *leaves, ROW_MASKS[kind](visible), softcap=softcap)
        (output.sum() + stats.entropy.sum() + stats.lse.sum()).backward()
        results.append((output, stats))
        grads.append([leaf.grad for leaf in leaves])
    output, stats = results[0]
    assert torch.equal(output[:, :, row], torch.zeros(B, H, D))
    for name in stats:
        expected = -math.inf if name in ("lse", "max_logit") else 0
        assert (stats[name][:, :, row] == expected).all(), name
    assert not stats.valid[:, :, row].any()
    assert stats.empty[:, :, row].all()
    assert not stats.empty.sum() > B * H
    assert (grads[0][0][:, :, row] == 0).all()
    assert all(torch.isfinite(grad).all() for grad in grads[0])
    others = torch.arange(Q) != row
    assert others.sum() == Q - 1
    assert torch.equal(output[:, :, others], results[1][0][:, :, others])
    for name in stats:
        assert torch.equal(stats[name][:, :, others], results[1][1][name][:, :, others]), name
    assert torch.equal(grads[0][0][:, :, others], grads[1][0][:, :, others])


@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
def test_when_every_row_is_masked_nothing_is_nan_and_every_mean_is_missing(sink: bool, backend: str):
    leaves = [tensor.requires_grad_() for tensor in tensors()]
    options = {"sink_logits": torch.randn(H)} if sink else {}
    output, stats = attended(backend, *leaves, torch.zeros(Q, K, dtype=torch.bool), **options)
    assert torch.equal(output, torch.zeros(B, H, Q, D))
    assert not stats.valid.any()
    assert (stats.mass == 0).all()
    for name, summary in stats.per_head().items():
        assert torch.isnan(summary.mean).all(), name
        assert torch.equal(summary.count, torch.zeros(H, dtype=torch.float64)), name
        assert torch.equal(summary.empty, torch.full((H,), B * Q, dtype=torch.float64)), name
    assert stats.histogram().sum() == 0
    (output.sum() + sum(stats[n].sum() for n in stats if stats[n].requires_grad)).backward()
    for leaf in leaves:
        assert leaf.grad is not None
        assert (leaf.grad == 0).all()


BIASES = {
    "finfo.min": (MIN, True), "-inf": (-math.inf, True), "1.1 x finfo.min / 2": (1.1 * MIN / 2, True),
    "0.9 x finfo.min / 2": (0.9 * MIN / 2, False), "-1e4": (-1e4, False), "-1e9": (-1e9, False),
}  # fmt: skip


@pytest.mark.parametrize("softcap", [None, 15.0], ids=["", "softcap"])
@pytest.mark.parametrize("name", BIASES)
@pytest.mark.turns(2)
def test_finfo_min_is_a_mask_and_minus_1e4_is_a_bias(name: str, softcap: float | None, backend: str):
    number, hides = BIASES[name]
    query, key, value = tensors()
    bias = torch.zeros(Q, K)
    bias[:, 3:] = number
    output, stats = attended(backend, query, key, value, bias, softcap=softcap)
    assert (stats.visible_keys == (3 if hides else K)).all()
    # Far below the rest, a biased key takes no weight either way: what changes is that it counts.
    clean, same = attended(backend, query, key[:, :, :3], value[:, :, :3], softcap=softcap)
    torch.testing.assert_close(stats.entropy, same.entropy, rtol=0, atol=1e-6)
    torch.testing.assert_close(output, clean, rtol=0, atol=1e-6)
    whole = torch.full((Q, K), number)
    _, stats = attended(backend, query, key, value, whole, softcap=softcap)
    assert stats.empty.all() == hides
    assert stats.valid.all() != hides
    if not hides:
        assert (stats.visible_keys == K).all()
        assert ((stats.entropy >= 0) & (stats.entropy.double() <= math.log(K))).all()


OF_ROWS = tuple(name for name in cases.NAMES if name != "key_mass")
HIDING = {
    "bool": ({"attn_mask": torch.arange(K) != 4}, slice(None)),
    "additive": ({"attn_mask": torch.zeros(Q, K).index_fill(1, torch.tensor(4), -torch.inf)}, slice(None)),
    "causal": ({"is_causal": True}, slice(0, 4)),
    "window": ({"window_size": (1, 1)}, slice(0, 3)),
}


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("how", HIDING)
@pytest.mark.parametrize("where", ["key", "value"])
def test_what_stands_at_a_masked_key_or_value_reaches_no_statistic(where: str, how: str, number: float, backend: str):
    options, rows = HIDING[how]
    options = {
        "causal_alignment": "bottom-right" if "attn_mask" in options else "top-left",
        "spans": [(3, 4)],
    } | options
    query, key, value = tensors()
    clean_output, clean = attended(backend, query, key, value, stats=had(backend, OF_ROWS), **options)
    (key if where == "key" else value)[:, :, 4] = number
    output, stats = attended(backend, query, key, value, stats=had(backend, OF_ROWS), **options)
    assert stats.valid[:, :, rows].all()
    for name in stats:
        assert torch.equal(stats[name][:, :, rows], clean[name][:, :, rows]), name
    if where == "key":
        assert torch.equal(output[:, :, rows], clean_output[:, :, rows])
    elif how == "bool":
        # Documented: a hidden value is multiplied by a weight of 0, as PyTorch does.
        assert torch.isnan(output).all()


BAD = {
    "NaN in a key": lambda q, k: k.index_fill_(2, torch.tensor(3), math.nan),
    "inf in a key": lambda q, k: k.index_fill_(2, torch.tensor(3), math.inf),
    "-inf in a key": lambda q, k: k.index_fill_(2, torch.tensor(3), -math.inf),
}


@pytest.mark.parametrize("masked", [False, True], ids=["", "with a mask"])
@pytest.mark.parametrize("how", BAD)
def test_a_bad_visible_key_spoils_its_rows_only_and_is_counted(how: str, masked: bool, backend: str, tiled):
    tiled(2, 2, 1 << 18)
    query, key, value = tensors()
    mask = torch.ones(Q, K, dtype=torch.bool) if masked else None
    _, clean = attended(backend, query, key, value, mask, is_causal=True)
    BAD[how](query, key)
    _, stats = attended(backend, query, key, value, mask, is_causal=True)
    bad = torch.arange(Q) >= 3
    assert stats.nonfinite[:, :, bad].all()
    assert not stats.valid[:, :, bad].any()
    assert stats.valid[:, :, ~bad].all()
    assert not (stats.entropy[:, :, bad] == 0).any()
    for name in stats:
        assert torch.equal(stats[name][:, :, ~bad], clean[name][:, :, ~bad]), name
    for name, summary in stats.per_head().items():
        assert torch.equal(summary.nonfinite, torch.full((H,), B * 3.0, dtype=torch.float64))
        if name != "visible_keys":
            assert torch.isfinite(summary.mean).all(), name


@pytest.mark.parametrize("how", ["NaN in a query", "bias of inf", "NaN in a bias", "float32 overflow"])
def test_a_row_with_a_score_that_is_not_finite_is_never_shown_as_sharp(how: str, backend: str):
    query, key, value = tensors()
    bias = None
    if how == "NaN in a query":
        query[:, :, 2] = math.nan
    elif how == "float32 overflow":
        query[:, :, 2] = 1e25
        key[:, :, 5] = 1e25
    else:
        bias = torch.zeros(Q, K)
        bias[2, 5] = math.inf if how == "bias of inf" else math.nan
    _, stats = attended(backend, query, key, value, bias)
    rows = torch.arange(Q) == 2
    assert stats.nonfinite[:, :, rows].all()
    assert stats.valid[:, :, ~rows].all()
    assert not stats.nonfinite[:, :, ~rows].any()
    assert torch.isnan(stats.entropy[:, :, rows]).all()
    assert (stats.visible_keys == K).all()
