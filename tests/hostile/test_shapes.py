"""Hostile inputs, table "Masks and shapes": alignments, empty dimensions, grouped heads, layouts, documents."""

import math
from typing import Any

import pytest
import torch

from tests.support import cases
from tests.support.calls import attended, had, packed, skip_without

pytestmark = [pytest.mark.each, pytest.mark.hostile, pytest.mark.usefixtures("poisoned_empty")]


@pytest.mark.parametrize("empty", ["B", "H", "Q", "K", "D", "E", "B and K", "Q and K"])
@pytest.mark.turns(2)
def test_an_empty_dimension_gives_empty_results_and_gradients(empty: str, backend: str):
    size = {
        name: 0 if name in empty.split(" and ") else n for name, n in zip("BHQKDE", (2, 3, 4, 5, 6, 7), strict=True)
    }
    query = torch.randn(size["B"], size["H"], size["Q"], size["D"], requires_grad=True)
    key = torch.randn(size["B"], size["H"], size["K"], size["D"], requires_grad=True)
    value = torch.randn(size["B"], size["H"], size["K"], size["E"], requires_grad=True)
    spans = torch.ones(size["K"], dtype=torch.bool)
    output, stats = attended(backend, query, key, value, stats=had(backend, cases.NAMES), spans=spans, is_causal=True)
    assert output.shape == (size["B"], size["H"], size["Q"], size["E"])
    for name in stats:
        assert stats[name].shape == (size["B"], size["H"], size["K"] if name == "key_mass" else size["Q"]), name
        assert not torch.isnan(stats[name]).any(), name
    if empty == "K":
        assert stats.empty.all()
        assert (output == 0).all()
    for summary in stats.per_head().values():
        assert summary.mean.shape == (size["H"],)
    (output.sum() + sum(stats[n].sum() for n in stats if stats[n].requires_grad)).backward()
    for leaf in (query, key, value):
        assert leaf.grad is not None
        assert leaf.grad.shape == leaf.shape
        assert torch.isfinite(leaf.grad).all()


def _transposed(shape, dtype=torch.float32):
    return torch.randn(shape[0], shape[2], shape[1], shape[3], dtype=dtype).transpose(1, 2)


def _chunk(shape):
    return torch.randn(shape[0], shape[2], 3, shape[1], shape[3]).permute(2, 0, 3, 1, 4)[1]


def _expanded(shape):
    return torch.randn(1, 1, shape[2], shape[3]).expand(shape)


def _strided_last(shape):
    return torch.randn(*shape[:3], shape[3] * 2)[..., ::2]


def _reversed_storage(shape):
    return torch.randn(*reversed(shape)).permute(3, 2, 1, 0)


def _odd_strides(shape):
    """Size-1 dimensions whose strides mean nothing."""
    assert shape[0] == shape[1] == 1
    return torch.as_strided(torch.randn(shape[2] * shape[3]), shape, (7, 1_000_003, shape[3], 1))


LAYOUTS = {
    "transposed": (_transposed, (2, 3)), "chunk of a packed qkv": (_chunk, (2, 3)),
    "expanded, stride 0": (_expanded, (2, 3)),
    "strided last dimension": (_strided_last, (2, 3)), "reversed storage": (_reversed_storage, (2, 3)),
    "size 1 with odd strides": (_odd_strides, (1, 1)),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.quick("reference", "blocked", "native", "triton-expanded")
@pytest.mark.turns(2)
def test_a_memory_layout_changes_neither_results_nor_gradients(layout: str, backend: str, tiled):
    tiled(2, 4, 40)
    make, (batch, heads) = LAYOUTS[layout]
    tensors = [make((batch, heads, n, 8)) for n in (5, 9, 9)]
    assert not all(tensor.is_contiguous() for tensor in tensors) or layout == "size 1 with odd strides"
    results = []
    for copies in (tensors, [tensor.contiguous().clone() for tensor in tensors]):
        leaves = [tensor.detach().requires_grad_() for tensor in copies]
        output, stats = attended(backend, *leaves, is_causal=True, causal_alignment="bottom-right")
        grad = torch.linspace(-1, 1, output.numel()).view(output.shape)
        loss = [output, stats.entropy, stats.logit_variance]
        torch.autograd.backward(loss, [grad, torch.ones(stats.entropy.shape), torch.ones(stats.entropy.shape)])
        results.append([output, *(stats[name] for name in stats), *(leaf.grad for leaf in leaves)])
    assert len(results[0]) == 4 + 11
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("alignment", ["top-left", "bottom-right"])
@pytest.mark.parametrize("stats", ["all", ("entropy", "gini", "key_mass", "mean_distance")], ids=["all", "by name"])
@pytest.mark.quick("reference", "blocked", "native")
def test_packed_documents_equal_a_loop_over_documents(alignment: str, stats, backend: str):
    stats = stats if stats == "all" else had(backend, stats)
    lengths_q, lengths_k = (76, 34, 146, 0, 1), (70, 40, 146, 0, 3)
    query, key = torch.randn(sum(lengths_q), 4, 8), torch.randn(sum(lengths_k), 2, 8)
    value, sink = torch.randn(sum(lengths_k), 2, 5), torch.randn(4)
    temperature = torch.rand(1, 4, sum(lengths_q)) + 0.5
    leaves = [tensor.requires_grad_() for tensor in (query, key, value, sink, temperature)]
    offsets = [torch.tensor([0, *lengths]).cumsum(0) for lengths in (lengths_q, lengths_k)]
    options = {
        "is_causal": True, "causal_alignment": alignment, "enable_gqa": True, "softcap": 20.0, "stats": stats,
        "window_size": (100, 0), "first_tokens": 2, "sink_logits": sink,
    }  # fmt: skip
    output, measured = packed(backend, query, key, value, *offsets, temperature=temperature, **options)
    outputs, rows = [], {name: [] for name in measured}
    for i in range(5):
        place_q, place_k = (slice(int(o[i]), int(o[i + 1])) for o in offsets)
        own = (t[place].transpose(0, 1)[None] for t, place in ((query, place_q), (key, place_k), (value, place_k)))
        one, alone = attended(backend, *own, temperature=temperature[:, :, place_q], **options)
        outputs.append(one[0].transpose(0, 1))
        for name in alone:
            rows[name].append(alone[name])
    torch.testing.assert_close(output, torch.cat(outputs), rtol=1e-5, atol=1e-6)
    smooth = [name for name in rows if measured[name].requires_grad]
    for name in rows:
        torch.testing.assert_close(measured[name], torch.cat(rows[name], 2), rtol=1e-5, atol=1e-5, msg=name)
    losses = (
        output.square().sum() + sum(measured[n].nan_to_num(neginf=0.0).sum() for n in smooth),
        torch.cat(outputs).square().sum() + sum(torch.cat(rows[n], 2).nan_to_num(neginf=0.0).sum() for n in smooth),
    )
    grads = [torch.autograd.grad(loss, leaves) for loss in losses]
    for name, one, two in zip(("query", "key", "value", "sink", "temperature"), *grads, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"d{name}: {text}")


def test_a_row_with_one_visible_key_is_as_sharp_as_can_be(backend: str):
    query, key, value = (torch.randn(2, 3, 4, 8) for _ in range(3))
    _, stats = attended(backend, query, key, value, torch.eye(4, dtype=torch.bool))
    assert (stats.entropy == 0).all()
    assert not torch.signbit(stats.entropy).any()
    for name, number in (
        ("effective_tokens", 1),
        ("max_weight", 1),
        ("logit_variance", 0),
        ("visible_keys", 1),
        ("mass", 1),
    ):
        assert (stats[name] == number).all(), name
    assert torch.equal(stats.lse, stats.max_logit)
    assert torch.equal(stats.mean_logit, stats.max_logit)
    summary = stats.per_head()
    assert (summary["normalized_entropy"].count == 0).all()
    assert torch.isnan(summary["normalized_entropy"].mean).all()
    assert (summary["entropy"].count == 8).all()
    assert stats.histogram().sum() == 0


def test_dropout_changes_no_statistic_and_leaves_the_output_unbiased(backend: str):
    skip_without(backend, "dropout")
    runs = 4000
    query, key, value = torch.randn(1, 1, 3, 8), torch.randn(1, 1, 6, 8), torch.randn(1, 1, 6, 2)
    expected, stats = attended(backend, query, key, value)
    many = [tensor.expand(runs, -1, -1, -1) for tensor in (query, key, value)]
    torch.manual_seed(3)
    output, dropped = attended(backend, *many, dropout_p=0.5)
    for name in stats:
        assert torch.equal(dropped[name], stats[name].expand(runs, -1, -1)), name
    assert len(output.unique(dim=0)) > runs / 2
    error = (output.mean(0) - expected[0]).abs() / (output.std(0) / math.sqrt(runs))
    assert error.max() < 4.5, f"the mean output is off by {error.max():.1f} standard errors"
    torch.manual_seed(3)
    assert torch.equal(attended(backend, *many, dropout_p=0.5)[0], output)
    assert not torch.equal(attended(backend, *many, dropout_p=0.5)[0], output)
    assert (attended(backend, query, key, value, dropout_p=1.0)[0] == 0).all()


@pytest.mark.parametrize("what", ["query", "key", "value"])
def test_offsets_beyond_two_to_the_31_elements_reach_the_right_numbers(what: str, backend: str, monkeypatch):
    monkeypatch.undo()
    # Pages that nobody touches cost nothing: 2^31 + 2^12 halves of virtual memory, a few kilobytes of real memory.
    storage = torch.empty(2**31 + 2**12, dtype=torch.float16)
    far = torch.as_strided(storage, (3, 1, 4, 8), (2**30, 8, 8, 1))
    near = torch.randn(3, 1, 4, 8).to(torch.float16)
    far.copy_(near)
    tensors: dict[str, Any] = {name: torch.randn(3, 1, 4, 8).to(torch.float16) for name in ("query", "key", "value")}
    expected, same = attended(backend, **(tensors | {what: near}))
    output, stats = attended(backend, **(tensors | {what: far}))
    assert torch.equal(output, expected)
    for name in stats:
        assert torch.equal(stats[name], same[name]), name


@pytest.mark.parametrize("rules", [{"window_size": (7, -1)}, {"is_causal": True}, {}], ids=str)
def test_no_queries_under_a_mask_with_rows_see_no_keys(rules: dict[str, Any], backend: str):
    key = torch.randn(1, 2, 5, 4)
    mask = torch.ones(1, 2, 0, 5, dtype=torch.bool)
    found = attended(backend, key[:, :, :0], key, key, mask, normalizer="scalable_softmax", **rules)
    assert found.output.shape == (1, 2, 0, 4)
    assert found.stats.visible_keys.shape == (1, 2, 0)


def test_without_keys_the_gradient_of_a_sink_is_exactly_zero(backend: str):
    query, sink = torch.randn(1, 2, 3, 4), torch.zeros(2, requires_grad=True)
    empty = query[:, :, :0]
    stats = attended(backend, query, empty, empty, sink_logits=sink, stats=("entropy", "entropy_with_sink")).stats
    (grad,) = torch.autograd.grad(stats.entropy_with_sink.sum() + stats.entropy.sum(), sink)
    assert torch.equal(grad, torch.zeros(2))
