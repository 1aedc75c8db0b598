"""Linear attention held against its quadratic form in float64: maps, masks, chunks, parts, derivatives, its page."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given as cases
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from attemper.functional import LinearState, linear, linear_attention
from tests.functional.linear_oracle import MAPS, assert_within, given, levels_where_asked, quadratic  # noqa: F401

pytestmark = [pytest.mark.each, pytest.mark.turns(2)]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def tensors(
    queries: int, keys: int | None = None, *, heads: int = 4, groups: int = 4, size: int = 5, values: int = 3,
    dtype: torch.dtype = torch.float32, spread: float = 1.5,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    keys = queries if keys is None else keys
    q, k = (torch.randn(2, h, n, size) * spread for h, n in ((heads, queries), (groups, keys)))
    return q.to(dtype), k.to(dtype), torch.randn(2, groups, keys, values).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_it_is_the_quadratic_form(name: str, causal: bool, dtype: torch.dtype):
    q, k, v = tensors(150, dtype=dtype)
    # Keys of which each is larger than the one before move a running maximum at every step.
    k = k.sort(2).values
    got = linear_attention(q, k, v, feature_map=given(name), is_causal=causal)
    assert got.output.dtype == dtype
    assert got.state.values.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert got.valid.shape == q.shape[:3]
    if name != "softplus" or dtype == torch.float32 or dtype == torch.float64:
        # A function is given q and k as they came, and rounds as their type does.
        assert_within(got.output, q, k, v, name, causal=causal)
    else:
        close = {torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
        torch.testing.assert_close(
            got.output.double(), quadratic(q, k, v, name, causal=causal), rtol=0, atol=close * float(v.abs().max())
        )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_tensors_without_heads_are_one_head(name: str, causal: bool):
    q, k, v = tensors(7, heads=1, groups=1)
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    whole = linear_attention(q, k, v, feature_map=given(name), is_causal=causal, mask=mask)
    plain = [tensor[:, 0] for tensor in (q, k, v)]
    got = linear_attention(*plain, feature_map=given(name), is_causal=causal, mask=mask)
    assert torch.equal(got.output, whole.output[:, 0])
    assert torch.equal(got.valid, whole.valid[:, 0])
    assert all(torch.equal(part, want) for part, want in zip(got.state, whole.state, strict=True))
    if causal:
        halves = [[tensor[:, :3] for tensor in plain], [tensor[:, 3:] for tensor in plain]]
        first = linear_attention(*halves[0], feature_map=given(name), is_causal=True, mask=mask[:, :3])
        rest = linear_attention(
            *halves[1], feature_map=given(name), is_causal=True, mask=mask[:, 3:], state=first.state
        )
        torch.testing.assert_close(torch.cat((first.output, rest.output), 1), got.output)


@pytest.mark.parametrize("name", MAPS)
def test_it_is_the_recurrence_token_by_token(name: str):
    q, k, v = tensors(40, dtype=torch.float64)
    want = quadratic(q, k, v, name, causal=True)
    torch.testing.assert_close(linear_attention(q, k, v, feature_map=given(name), is_causal=True).output, want)
    state, rows = None, []
    for i in range(40):
        row, state = linear_attention(
            *(part[:, :, i : i + 1] for part in (q, k, v)), feature_map=given(name), is_causal=True, state=state
        )
        rows.append(row)
    torch.testing.assert_close(torch.cat(rows, 2), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", MAPS)
def test_a_long_sequence_is_worked_on_in_parts_that_do_not_show(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linear, "_PART_ROWS", 1)
    q, k, v = tensors(100, dtype=torch.float64)
    mask = torch.rand(2, 100) < 0.8
    got = linear_attention(q, k, v, feature_map=given(name), is_causal=True, mask=mask, chunk_size=6)
    want = quadratic(q, k, v, name, causal=True, mask=mask)
    torch.testing.assert_close(got.output, want, rtol=1e-12, atol=1e-12)
    monkeypatch.undo()
    whole = linear_attention(q, k, v, feature_map=given(name), is_causal=True, mask=mask, chunk_size=6)
    assert torch.equal(got.valid, whole.valid)
    for one, two in zip(got.state, whole.state, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("name", MAPS)
def test_query_heads_share_key_heads(name: str, groups: int, causal: bool):
    q, k, v = tensors(37, heads=6, groups=groups)
    got = linear_attention(q, k, v, feature_map=given(name), is_causal=causal, enable_gqa=True, chunk_size=8)
    assert got.state.values.shape == (2, groups, 5, 3)
    assert_within(got.output, q, k, v, name, causal=causal)


@pytest.mark.parametrize("name", MAPS)
def test_keys_in_parts_are_all_keys(name: str):
    q, k, v = tensors(4, 30)
    state = linear_attention(q[:, :, :0], k[:, :, :11], v[:, :, :11], feature_map=given(name)).state
    got = linear_attention(q, k[:, :, 11:], v[:, :, 11:], feature_map=given(name), state=state)
    assert_within(got.output, q, k, v, name)


@pytest.mark.parametrize("name", MAPS)
def test_a_state_goes_on_with_some_of_its_sequences(name: str):
    q, k, v = tensors(9)
    options: dict[str, Any] = {"feature_map": given(name), "is_causal": True}
    state = linear_attention(*(part[:, :, :8] for part in (q, k, v)), **options).state
    picked = torch.tensor([1, 1, 0])
    values, keys, shift = (part[picked] for part in state)
    again = LinearState(values, keys, shift)
    last = linear_attention(*(part[picked, :, 8:] for part in (q, k, v)), state=again, **options).output
    torch.testing.assert_close(last, linear_attention(q, k, v, **options).output[picked, :, 8:])


def test_a_state_holds_its_own_memory():
    q, k, v = tensors(512)
    for name in ("elu", "exp"):
        state = linear_attention(q, k, v, feature_map=name, is_causal=True, chunk_size=16).state
        for part in state:
            assert part.untyped_storage().nbytes() == part.numel() * 4, "no other chunk's sums stay alive with it"


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_padding_is_not_there(name: str, causal: bool, side: str):
    q, k, v = tensors(30)
    real = slice(12, 30) if side == "left" else slice(0, 18)
    mask = torch.zeros(2, 30, dtype=torch.bool)
    mask[:, real] = True
    for tensor in (k, v):
        tensor[:, :, ~mask[0]] = torch.nan
    options: dict[str, Any] = {"feature_map": given(name), "is_causal": causal, "chunk_size": 8}
    got = linear_attention(q, k, v, mask=mask, **options)
    alone = linear_attention(*(tensor[:, :, real] for tensor in (q, k, v)), **options)
    torch.testing.assert_close(got.output[:, :, real], alone.output)
    for one, two in zip(got.state, alone.state, strict=True):
        torch.testing.assert_close(one, two)
    if causal and side == "left":
        assert not got.valid[:, :, :12].any(), "they see nothing"
        assert (got.output[:, :, :12] == 0).all()
    else:
        assert torch.equal(got.valid[:, :, real], alone.valid)
        assert got.valid[:, :, real].any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_a_sequence_that_sees_nothing_is_0_beside_one_that_sees(name: str, causal: bool):
    q, k, v = (tensor.requires_grad_() for tensor in tensors(20))
    mask = torch.ones(2, 20, dtype=torch.bool)
    full = linear_attention(q, k, v, feature_map=given(name), is_causal=causal, mask=mask)
    mask[1] = False
    got = linear_attention(q, k, v, feature_map=given(name), is_causal=causal, mask=mask)
    assert torch.equal(got.output[0], full.output[0])
    assert full.valid[0].any()
    assert not got.valid[1].any()
    assert (got.output[1] == 0).all()
    got.output.square().sum().backward()
    for tensor in (q, k, v):
        assert tensor.grad is not None
        assert (tensor.grad[1] == 0).all()
        assert torch.isfinite(tensor.grad[0]).all()
        assert (tensor.grad[0] != 0).any()
    after = linear_attention(q, k, v, feature_map=given(name), is_causal=causal, state=got.state)
    assert torch.isfinite(after.output).all(), "a state without keys is a state to go on from"


@pytest.mark.parametrize("shape", [(0, 4, 5, 5), (2, 0, 5, 5), (2, 4, 0, 0), (2, 4, 4, 0)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_without_keys_rows_are_0_and_not_valid_and_empty_tensors_give_empty_results(
    name: str, causal: bool, shape: tuple[int, int, int, int]
):
    batch, heads, queries, keys = shape
    q, k, v = (torch.ones(batch, heads, tokens, 3) for tokens in (queries, keys, keys))
    got = linear_attention(q, k, v, feature_map=given(name), is_causal=causal and queries == keys)
    assert got.output.shape == (batch, heads, queries, 3)
    assert got.valid.shape == (batch, heads, queries)
    assert got.state.values.shape == (batch, heads, 3, 3)
    assert not keys or got.valid.all()
    assert keys or not (got.valid.any() or got.output.any())


@settings(max_examples=25, deadline=None)
@cases(
    seed=st.integers(0, 2**31), tokens=st.integers(1, 50), cut=st.floats(0, 1), chunk=st.integers(1, 20),
    name=st.sampled_from(("elu", "relu", "exp", "softplus")),
)  # fmt: skip
def test_parts_of_any_length_in_chunks_of_any_size(seed: int, tokens: int, cut: float, chunk: int, name: str):
    torch.manual_seed(seed)
    q, k, v = tensors(tokens, dtype=torch.float64, spread=10.0)
    place = round(cut * tokens)
    options: dict[str, Any] = {"feature_map": given(name), "is_causal": True, "chunk_size": chunk}
    first = linear_attention(*(tensor[:, :, :place] for tensor in (q, k, v)), **options)
    second = linear_attention(*(tensor[:, :, place:] for tensor in (q, k, v)), state=first.state, **options)
    got = torch.cat((first.output, second.output), 2)
    torch.testing.assert_close(got, quadratic(q, k, v, name, causal=True), rtol=1e-10, atol=1e-10)
    valid = torch.cat((first.valid, second.valid), 2)
    # A row is a mean of the values it sees.
    lowest, highest = v.cummin(2).values, v.cummax(2).values
    inside = (got >= lowest - 1e-12) & (got <= highest + 1e-12)
    assert inside[valid].all()


# --- derivatives, and what they keep in memory ---


def leaves(
    tokens: int, dtype: torch.dtype = torch.float64, heads: int = 2, groups: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    sizes = ((heads, 2), (groups, 2), (groups, 2))
    q, k, v = (torch.randn(1, h, tokens, size, dtype=dtype, requires_grad=True) for h, size in sizes)
    return q, k, v


def doubled(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(tensor.detach().double().requires_grad_() for tensor in (q, k, v))  # type: ignore[return-value]


def in_two_parts(name: str, mask: Tensor, causal: bool) -> Callable[..., Tensor]:
    """The output of two calls, the second with the first one's state, so that every path of a gradient is taken."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options: dict[str, Any] = {
            "feature_map": given(name), "is_causal": causal, "enable_gqa": True, "chunk_size": 2,
        }  # fmt: skip
        first = linear_attention(*(part[:, :, :2] for part in (q, k, v)), mask=mask[:, :2], **options)
        rest = (part[:, :, 2:] for part in (q, k, v))
        return torch.cat(
            (first.output, linear_attention(*rest, mask=mask[:, 2:], state=first.state, **options).output), 2
        )

    return function


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.quick("False", "exp by levels-True")
@pytest.mark.turns(1)
def test_first_and_second_derivatives(name: str, causal: bool, derivatives_agree: Callable[..., bool]):
    function = in_two_parts(name, torch.tensor([[True, False, True, True, True]]), causal)
    inputs = leaves(5)
    assert derivatives_agree(function, inputs)


def magnitudes(q: Tensor, k: Tensor, v: Tensor, upstream: Tensor, name: str, causal: bool) -> tuple[Tensor, ...]:
    """What each gradient is a sum of, in absolute numbers: ``|g| w (|v_j| + |o_i|) / Z``.

    Features and their derivatives are positive. A gradient is rounded relative to these, not to itself: with one key a
    gradient is 0, of terms that cancel.
    """
    phi_q, phi_k = MAPS[name](q), MAPS[name](k)
    weights = phi_q @ phi_k.mT
    weights = weights.tril() if causal else weights
    total = weights.sum(-1, keepdim=True).detach()
    total = total.masked_fill(total == 0, torch.inf)
    output = (weights @ v / total).detach().abs()
    terms = (weights @ v.abs() + weights.sum(-1, keepdim=True) * output) / total * upstream.abs()
    return tuple(grad.abs() for grad in torch.autograd.grad(terms.sum(), (q, k, v)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.turns(1)
def test_gradients_in_float32_are_those_of_the_quadratic_form(name: str, causal: bool):
    tokens = 70
    inputs = leaves(tokens, torch.float32, heads=2, groups=2)
    upstream = torch.randn(1, 2, tokens, 2)
    got = torch.autograd.grad(
        linear_attention(*inputs, feature_map=given(name), is_causal=causal, chunk_size=16).output, inputs, upstream
    )
    doubles = doubled(*inputs)
    want = torch.autograd.grad(quadratic(*doubles, name, causal=causal), doubles, upstream.double())
    # No sum is longer than the tokens, and no term is rounded more than some twenty times on its way.
    roundings = (tokens + 20) * torch.finfo(torch.float32).eps / 2
    for mine, truth, size in zip(got, want, magnitudes(*doubles, upstream.double(), name, causal), strict=True):
        assert ((mine.double() - truth).abs() <= roundings * size).all()
        assert (mine != 0).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["elu", "relu", "exp"])
@pytest.mark.turns(1)
def test_gradients_come_in_the_type_of_the_inputs(name: str, dtype: torch.dtype):
    inputs = leaves(40, dtype)
    grads = torch.autograd.grad(
        linear_attention(*inputs, feature_map=name, is_causal=True, enable_gqa=True).output.float().sum(), inputs
    )
    doubles = doubled(*inputs)
    want = torch.autograd.grad(quadratic(*doubles, name, causal=True).sum(), doubles)
    for mine, truth in zip(grads, want, strict=True):
        assert mine.dtype == dtype
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(mine.double(), truth, rtol=unit, atol=4 * unit)


def kept_bytes(name: str, tokens: int) -> int:
    """What the forward pass keeps for the backward pass."""
    held: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    inputs = leaves(tokens, torch.float32)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = linear_attention(*inputs, feature_map=name, is_causal=True, enable_gqa=True, chunk_size=16).output
    assert output.requires_grad
    return sum(held.values())


@pytest.mark.parametrize("name", ["elu", "relu", "exp"])
@pytest.mark.turns(1)
def test_what_is_kept_for_the_backward_pass_grows_as_the_tokens(name: str):
    assert kept_bytes(name, 2048) < 2.1 * kept_bytes(name, 1024)


# --- the page ---

PAGE = Path(__file__).parents[2] / "docs" / "linear-attention.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_code_of_the_page_runs_as_it_stands_and_gives_what_the_page_says():
    text = PAGE.read_text("utf-8")
    names: dict[str, Any] = {"__name__": "page"}
    found = list(BLOCK.finditer(text))
    assert len(found) == 2
    for match in found:
        line = text[: match.start(1)].count("\n")
        exec(compile("\n" * line + match[1], "docs/linear-attention.md", "exec"), names)
    assert len(names["rows"]) == 11
    assert names["state"].values.shape == (2, 8, 64, 64)
    torch.testing.assert_close(names["padded"].output[1, :, :700], names["whole"].output[1, :, :700])
    torch.testing.assert_close(names["padded"].output[0], names["whole"].output[0])
