"""Statistics from states, and merging as it is used: decoding split over the keys, in the types that models run in."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import attemper
from attemper.call.formulas import at_most, log_count
from attemper.call.merging import merge
from attemper.statistics import ONE_PASS, Column, state_columns
from tests.support import budgets, oracle

pytestmark = pytest.mark.each

NAMES = ONE_PASS + ("entropy_with_sink", "support_size")


def split(
    cuts: list[int], query: Tensor, key: Tensor, value: Tensor, mask: Tensor, backend: str, **options: Any
) -> attemper.types.AttentionOutput:
    """Attention part by part over the keys, joined from the left."""
    edges = [0, *cuts, key.shape[2]]
    parts = [
        attemper.attention(
            query,
            key[:, :, a:b],
            value[:, :, a:b],
            mask[..., a:b],
            stats=NAMES,
            backend=backend,
            **(options if a == 0 else {}),
        )
        for a, b in pairwise(edges)
    ]
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.merge(part)
    return whole


@pytest.mark.parametrize("cuts", [[1], [8], [16], [5, 6], [3, 3, 9], list(range(1, 17))], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decoding_split_over_the_keys_gives_the_whole(dtype: torch.dtype, cuts: list[int], backend: str):
    query, key, value = (torch.randn(2, 4, n, 8).to(dtype) for n in (3, 17, 17))
    mask = torch.rand(2, 1, 3, 17) < 0.7
    mask[1, :, 2] = False
    sink = torch.randn(4)
    got = split(cuts, query * 2, key, value, mask, backend, sink_logits=sink)
    call = oracle.inputs(query * 2, key, value, mask, sink_logits=sink)
    want = oracle.forward(call)
    slacks = budgets.result_slacks(call, want, dtype)
    assert got.stats is not None
    for name in NAMES:
        if name in oracle.INTEGERS:
            assert got.stats[name].tolist() == want[name].tolist(), name
        else:
            # Each merge reads and writes a state of float32: 3 roundings more, of a number and of what it is made of.
            size = torch.from_numpy(abs(want["max_logit"]).astype("float64")).nan_to_num(posinf=0.0).max().item() + 1
            more = 3 * len(cuts) * budgets.unit(dtype) * (size + float(abs(want["logit_variance"]).max()) + 17)
            eager = torch.from_numpy(want[name].astype("float64"))
            budgets.assert_within(name, got.stats[name], want[name], eager, 2 * slacks[name] + more)
    # The parts' outputs are rounded to their type, once each and once more at every merge.
    rounding = (1 + len(cuts)) * max(budgets.UNIT[dtype], budgets.unit(dtype) * 8) * float(value.double().abs().max())
    eager = torch.from_numpy(want["output"].astype("float64"))
    budgets.assert_within("output", got.output, want["output"], eager, 2 * slacks["output"] + rounding)
    assert got.output.dtype == dtype


def test_the_first_token_of_a_merge_stands_in_the_first_part_unless_that_is_padding(backend: str):
    query, key = torch.zeros(2, 1, 2, 4), torch.zeros(2, 1, 6, 4)
    mask = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    mask[1, ..., :3] = False
    got = split([3], query, key, key, mask, backend)
    assert got.stats is not None
    assert got.stats.first_token_mass[0].flatten().tolist() == pytest.approx([1 / 6] * 2)
    assert got.stats.first_token_mass[1].flatten().tolist() == pytest.approx([1 / 3] * 2)


def test_merging_states_takes_the_empty_row_as_identity_however_low_the_other_maximum_is():
    columns = state_columns(("logit_variance", "effective_tokens", "first_token_mass"))
    nothing = {column: torch.zeros(1, 1, 1) for column in columns}
    nothing[Column.MAXIMUM] = torch.full((1, 1, 1), -torch.inf)
    for maximum in (-1e30, -1e5, 0.0, 1e30):
        row = {column: torch.full((1, 1, 1), 0.25) for column in columns} | {
            Column.VISIBLE_KEYS: torch.full((1, 1, 1), 3.0)
        }
        row[Column.MAXIMUM] = torch.full((1, 1, 1), maximum)
        for both in (merge(row, nothing), merge(nothing, row)):
            for column in columns:
                torch.testing.assert_close(both[column], row[column], rtol=1e-6, atol=1e-7, msg=column.name)
    both = merge(nothing, nothing)
    assert both[Column.MAXIMUM].item() == -torch.inf
    assert all(both[column].item() == 0 for column in columns if column != Column.MAXIMUM)


def test_the_bound_of_entropy_is_never_above_the_true_logarithm():
    for dtype in (torch.float32, torch.float64):
        n = torch.cat([torch.arange(0, 5000), 2 ** torch.arange(13, 24)]).to(dtype)
        bound = log_count(n)
        exact = torch.where(n > 0, n, 1.0).double().log()
        assert (bound.double() <= exact).all()
        assert (exact - bound.double() <= exact * torch.finfo(dtype).eps).all()


def test_cutting_at_a_bound_keeps_the_gradient():
    value = torch.tensor([1.0, 3.0], requires_grad=True)
    cut = at_most(value, torch.tensor([2.0, 2.0]))
    assert cut.tolist() == [1.0, 2.0]
    (grad,) = torch.autograd.grad(cut.sum(), value)
    assert grad.tolist() == [1.0, 1.0]
