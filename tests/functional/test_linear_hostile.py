"""Linear attention where it could go wrong: features of 0 or below, exponents of 1e4, NaN, autocast, compilation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from attemper import InputError
from attemper.functional import LinearState, linear_attention
from tests.functional.linear_oracle import given, levels_where_asked, quadratic  # noqa: F401

pytestmark = pytest.mark.each

NAMED = ("elu", "relu", "exp")


def tensors(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, 3, tokens, size).to(dtype) for size in (4, 4, 5))
    return q, k, v


@pytest.mark.hostile("measures")
@pytest.mark.parametrize("causal", [False, True])
def test_a_denominator_of_0_gives_0_and_is_flagged(causal: bool):
    q, k, v = tensors(20)
    q[0, 0, 3:6] = -1.0  # relu makes 0 of it
    k[1, 2, :7] = -1.0
    inputs = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
    got = linear_attention(*inputs, feature_map="relu", is_causal=causal, chunk_size=4)
    none = torch.zeros(2, 3, 20, dtype=torch.bool)
    none[0, 0, 3:6] = True
    if causal:
        none[1, 2, :7] = True
    assert (got.output[none] == 0).all()
    assert not got.valid[none].any()
    weights = q.relu() @ k.relu().mT
    assert torch.equal(got.valid, ((weights.tril() if causal else weights).sum(-1) > 0))
    grads = torch.autograd.grad(got.output.square().sum(), inputs)
    assert all(torch.isfinite(grad).all() for grad in grads)
    assert (grads[0][none] == 0).all()
    torch.testing.assert_close(got.output.double(), quadratic(*inputs, "relu", causal=causal), rtol=1e-4, atol=1e-5)


@pytest.mark.slow("takes a second")
@pytest.mark.hostile("measures")
def test_where_signed_features_cannot_be_looked_at_they_make_their_rows_invalid():
    def signed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        found = linear_attention(q, k, v, feature_map=lambda x: x, is_causal=True)
        return found.output, found.valid

    q, k, v = (tensor.abs() for tensor in tensors(9))
    k[0, 0, 4, 2] = -1e-3
    output, valid = torch.compile(signed, backend="aot_eager", fullgraph=True)(q, k, v)
    assert not valid[0, 0, 4:].any()
    assert output[0, 0, 4:].isnan().all()
    valid[0, 0, 4:] = True
    assert valid.all(), "and only those"


OFFSETS: dict[str, tuple[float, float]] = {
    "1e4 in q": (1e4, 0.0), "1e4 in k": (0.0, 1e4), "1e4 in both": (1e4, 1e4), "-1e4 in both": (-1e4, -1e4),
    "opposite": (3e4, -3e4),
}  # fmt: skip


@pytest.mark.hostile("measures")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("offset", OFFSETS)
def test_exponents_of_any_size_are_as_exact_as_their_inputs(offset: str, causal: bool):
    q, k, v = tensors(70)
    q, k = q * 3 + OFFSETS[offset][0], k * 3 + OFFSETS[offset][1]
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    got = linear_attention(*inputs, feature_map="exp", is_causal=causal, chunk_size=16)
    assert got.valid.all()
    error = (got.output.double() - quadratic(q, k, v, "exp", causal=causal)).abs().max()
    assert error < 3e-6 * v.abs().max()
    assert all(torch.isfinite(grad).all() for grad in torch.autograd.grad(got.output.sum(), inputs))


@pytest.mark.hostile("measures")
@pytest.mark.parametrize("causal", [False, True])
def test_exponents_that_are_far_apart(causal: bool):
    """Of feature and feature, key and key: a product that takes one maximum for all would be 0 / 0."""
    q, k, v = tensors(70)
    q, k = q * 1e4, k * 1e4
    got = linear_attention(q, k, v, feature_map="exp", is_causal=causal, chunk_size=16)
    assert got.valid.all()
    torch.testing.assert_close(got.output.double(), quadratic(q, k, v, "exp", causal=causal), rtol=1e-5, atol=1e-5)
    crossed = torch.tensor([[[[1000.0, 0.0]]]]), torch.tensor([[[[0.0, 1000.0], [0.0, -5.0]]]])
    one = linear_attention(*crossed, torch.tensor([[[[1.0], [3.0]]]]), feature_map="exp").output
    # e^1000 (1 + 1) of two keys on the first feature, e^1000 of the first key on the second.
    torch.testing.assert_close(one.flatten(), torch.tensor([(1 * 2 + 3 * 1) / 3]))


@pytest.mark.hostile("measures")
@pytest.mark.parametrize("jump", [200.0, 1e4, -1e4])
def test_a_jump_inside_a_chunk_takes_nothing_from_the_rows_before_it(jump: float):
    q, k, v = tensors(64)
    k[:, :, 37:] += jump
    got = linear_attention(q, k, v, feature_map="exp", is_causal=True, chunk_size=64)
    torch.testing.assert_close(got.output.double(), quadratic(q, k, v, "exp", causal=True), rtol=1e-5, atol=1e-5)
    state = linear_attention(*(tensor[:, :, :37] for tensor in (q, k, v)), feature_map="exp", is_causal=True).state
    rest = (tensor[:, :, 37:] for tensor in (q, k, v))
    after = linear_attention(*rest, feature_map="exp", is_causal=True, state=state).output
    torch.testing.assert_close(after, got.output[:, :, 37:], rtol=1e-5, atol=1e-5)


@pytest.mark.hostile("measures")
def test_elu_keeps_its_digits_far_below_0():
    q, k, v = tensors(30)
    got = linear_attention(q - 30, k - 30, v)
    want = quadratic(q - 30, k - 30, v, "elu")
    torch.testing.assert_close(got.output.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.hostile("measures")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", NAMED)
def test_a_visible_key_that_is_not_finite_is_flagged_in_the_rows_that_see_it(name: str, bad: float, causal: bool):
    q, k, v = tensors(20)
    q, k = q.abs() + 0.1, k.abs() + 0.1  # no row is empty for relu
    k[0, 1, 9, 2] = bad
    got = linear_attention(q, k, v, feature_map=name, is_causal=causal, chunk_size=8)
    sees = torch.zeros(2, 3, 20, dtype=torch.bool)
    sees[0, 1, 9 if causal else 0 :] = True
    assert torch.equal(got.valid, ~sees)
    assert torch.isfinite(got.output[~sees]).all()


@pytest.mark.hostile("measures")
@pytest.mark.parametrize("name", NAMED)
def test_a_query_that_is_not_finite_is_flagged_alone(name: str):
    q, k, v = tensors(20)
    q, k = q.abs() + 0.1, k.abs() + 0.1
    q[1, 0, 5, 0] = math.nan
    got = linear_attention(q, k, v, feature_map=name, is_causal=True, chunk_size=8)
    assert not got.valid[1, 0, 5]
    assert int((~got.valid).sum()) == 1
    assert torch.isfinite(got.output[got.valid]).all()


@pytest.mark.hostile("measures")
@pytest.mark.parametrize("name", NAMED)
def test_autocast_changes_nothing(name: str):
    q, k, v = tensors(50)
    want = linear_attention(q, k, v, feature_map=name, is_causal=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = linear_attention(q, k, v, feature_map=name, is_causal=True)
    assert torch.equal(got.output, want.output)


@pytest.mark.parametrize("name", [*NAMED, "softplus"])
def test_nothing_is_read_back_from_a_device(name: str):
    """Tensors on ``meta`` hold no numbers: whatever reads one fails."""
    q, k, v = (tensor.to("meta") for tensor in tensors(20))
    mask = torch.ones(2, 20, dtype=torch.bool, device="meta")
    first = linear_attention(q, k, v, feature_map=given(name), is_causal=True, mask=mask)
    assert linear_attention(q, k, v, feature_map=given(name), state=first.state).output.shape == (2, 3, 20, 5)


@pytest.mark.parametrize(("name", "causal"), [("elu", False), ("relu", True), ("exp", True), ("softplus", True)])
@pytest.mark.slow("a compiler takes seconds")
def test_it_compiles_to_one_graph(name: str, causal: bool):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def call(q: Tensor, k: Tensor, v: Tensor, state: LinearState) -> tuple[Tensor, LinearState]:
        found = linear_attention(q, k, v, feature_map=given(name), is_causal=causal, chunk_size=2, state=state)
        return found.output, found.state

    compiled = torch.compile(call, backend=counter, fullgraph=True)
    state = linear_attention(*tensors(3), feature_map=given(name)).state
    for _ in range(2):
        q, k, v = tensors(4)
        inputs = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
        (got, got_state), (want, want_state) = compiled(*inputs, state), call(*inputs, state)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(tuple(got_state), tuple(want_state))
        grads = (torch.autograd.grad(output.square().sum(), inputs) for output in (got, want))
        for mine, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(mine, theirs)
    assert counter.frame_count == 1


STATE = (torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 4), torch.zeros(2, 3, 4))
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown map": ({"feature_map": "softmax"}, r"one of 'elu', 'relu', 'exp', or a function .* got 'softmax'"),
    "features of another shape": ({"feature_map": lambda x: x.sum(-1)}, r"must give a tensor \[2, 3, 5, features\]"),
    "no tensor of features": ({"feature_map": lambda x: 1.0}, "got float"),
    "integer features": ({"feature_map": lambda x: x.relu().int()}, "floating numbers, got torch.int32"),
    "no features": ({"feature_map": lambda x: x[..., :0]}, "gives q the size 0 and k 0"),
    "signed features": (
        {"feature_map": lambda x: x - 1},
        r"negative features \(the lowest is -1.*'elu', 'relu', 'exp'",
    ),
    "three dimensions": ({"q": torch.zeros(2, 5, 4)}, r"q\) must be a tensor \[batch, heads, tokens, size\]"),
    "no tensor": ({"v": [1.0]}, r"v\) must be a tensor .* got list"),
    "integers": ({"q": torch.zeros(2, 3, 5, 4, dtype=torch.int64)}, r"q=...\) must be float16"),
    "two types": ({"k": torch.zeros(2, 3, 5, 4).double()}, "q is torch.float32 on cpu but k is torch.float64"),
    "two sizes": ({"k": torch.zeros(2, 3, 5, 3)}, r"k must be \[2, heads, keys, 4\]"),
    "two lengths": ({"v": torch.zeros(2, 3, 4, 4)}, "v the same but for its last size"),
    "heads": ({"q": torch.zeros(2, 4, 5, 4), "enable_gqa": True}, r"query heads \(4\) cannot share key heads \(3\)"),
    "heads unsaid": (
        {"q": torch.zeros(2, 6, 5, 4)},
        "q has 6 heads and k 3. If 2 query heads share .* pass enable_gqa=True",
    ),
    "causal, Q != K": ({"q": torch.zeros(2, 3, 2, 4), "is_causal": True}, "got 2 and 5. To decode"),
    "a float mask": ({"mask": torch.zeros(2, 5)}, r"bool tensor \[batch, keys\] = \[2, 5\].* got torch.float32"),
    "a mask of pairs": ({"mask": torch.ones(5, 5, dtype=torch.bool)}, "differs from query to query cannot be honoured"),
    "chunk of 0": ({"chunk_size": 0}, r"chunk_size=...\) must be an int of at least 1 or None, got 0"),
    "a state of no kind": ({"state": torch.zeros(2)}, "a LinearState; got Tensor"),
    "a state of another map": (
        {"feature_map": "relu", "state": LinearState(*STATE, "elu")},
        "was made with the feature map 'elu', and this call has 'relu'",
    ),
    "a state of another map than a function": (
        {"feature_map": torch.relu, "state": LinearState(*STATE, "elu")},
        "this call has 'a function'",
    ),
    "a state of another size": (
        {"state": LinearState(torch.zeros(2, 3, 4, 9), torch.zeros(2, 3, 4), torch.zeros(2, 3, 4))},
        r"values must be \[2, 3, 4, 4\], torch.float32, on cpu, got \[2, 3, 4, 9\]",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told(mistake: str):
    changed, message = MISTAKES[mistake]
    call: dict[str, Any] = {name: torch.zeros(2, 3, 5, 4) for name in "qkv"} | changed
    with pytest.raises(InputError, match=f"(?s)linear_attention.*{message}"):
        linear_attention(call.pop("q"), call.pop("k"), call.pop("v"), **call)
