"""What ``attn_mask`` may be: torch's ``CausalBias`` is read as the rule that it is, other subclasses are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left

import attemper
from attemper import InputError
from attemper.call.request import Options, request_of
from tests.support.calls import attended

SIZES = {"square": (5, 5), "fewer queries": (3, 6), "more queries": (6, 3)}
BIASES = {"top-left": causal_upper_left, "bottom-right": causal_lower_right}


class Named(Tensor):
    """A subclass of which nobody here knows what it means."""


def tensors(queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, 3, queries, 8), torch.randn(2, 3, keys, 8), torch.randn(2, 3, keys, 4)


def bias_of(alignment: str, queries: int, keys: int) -> CausalBias:
    return BIASES[alignment](queries, keys)


def unwritten(bias: CausalBias) -> CausalBias:
    """The same, with NaN where nobody may look."""
    torch.Tensor.fill_(bias, torch.nan)
    return bias


def marks(alignment: str, queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries if alignment == "bottom-right" else 0)


pytestmark = [pytest.mark.each, pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")]
both = pytest.mark.parametrize("alignment", BIASES)
sizes = pytest.mark.parametrize("shape", SIZES.values(), ids=SIZES)


@both
@sizes
def test_a_causal_bias_gives_the_output_and_statistics_of_its_triangle(
    alignment: str, shape: tuple[int, int], backend: str
):
    q, k, v = tensors(*shape)
    seen = marks(alignment, *shape)
    bias = unwritten(bias_of(alignment, *shape))
    output, stats = attended(backend, q, k, v, bias)
    rows = seen.any(-1)
    torch.testing.assert_close(output[:, :, rows], F.scaled_dot_product_attention(q, k, v, seen)[:, :, rows])
    assert bool((output[:, :, ~rows] == 0).all())
    assert torch.equal(stats.visible_keys, seen.sum(-1).expand(2, 3, -1))
    alone = attemper.attention_statistics(q, k, bias, backend=backend)
    torch.testing.assert_close(alone.entropy, stats.entropy)
    torch.testing.assert_close(attemper.functional.dense_weights(q, k, attn_mask=bias) > 0, seen.expand(2, 3, -1, -1))


@both
@sizes
def test_it_is_read_as_the_options_and_never_written_as_a_tensor(alignment: str, shape: tuple[int, int]):
    q, k, v = tensors(*shape)
    call = request_of("attention", q, k, v, bias_of(alignment, *shape), Options()).problem
    assert call.mask is None
    assert call.right == 0
    assert call.bottom_right is (alignment == "bottom-right" and shape[0] != shape[1])


@both
@pytest.mark.parametrize(
    "options",
    [
        {"window_size": (2, 1)},
        {"window_size": (2, 1), "causal_alignment": "bottom-right"},
    ],
    ids=str,
)
@sizes
def test_it_intersects_with_windows_of_either_alignment(
    alignment: str, options: dict[str, Any], shape: tuple[int, int], backend: str
):
    q, k, v = tensors(*shape)
    found = attended(backend, q, k, v, bias_of(alignment, *shape), **options)
    wanted = attended(backend, q, k, v, marks(alignment, *shape), **options)
    torch.testing.assert_close(found.output, wanted.output)
    assert torch.equal(found.stats.visible_keys, wanted.stats.visible_keys)


@both
def test_beside_is_causal_it_is_refused_as_by_sdpa(alignment: str):
    q, k, v = tensors(6, 6)
    bias = bias_of(alignment, 6, 6)
    with pytest.raises(ValueError, match="should not be used with causal=True"):
        torch.nn.functional.scaled_dot_product_attention(q, k, v, bias, is_causal=True)
    for call in (
        lambda: attemper.attention(q, k, v, bias, is_causal=True),
        lambda: attemper.attention_statistics(q, k, bias, is_causal=True),
        lambda: attemper.functional.dense_weights(q, k, attn_mask=bias, is_causal=True),
        lambda: attemper.tap(q, k, bias, is_causal=True, name="site"),
    ):
        with pytest.raises(
            InputError, match=r"\(is_causal=True\) beside an attn_mask that is a CausalBias.*Leave is_c"
        ):
            call()


def test_one_for_other_sizes_is_refused():
    q, k, v = tensors(3, 6)
    with pytest.raises(InputError, match=r"CausalBias of \(3, 5\) \(queries, keys\); the call has \(3, 6\)"):
        attemper.attention(q, k, v, causal_upper_left(3, 5))


@pytest.mark.parametrize("kind", [Named, type("Learned", (nn.Parameter,), {})])
def test_another_subclass_is_refused_by_name(kind: Any):
    q, k, v = tensors(3, 6)
    mask = torch.zeros(3, 6).as_subclass(kind)
    for call in (
        lambda: attemper.attention(q, k, v, mask),
        lambda: attemper.attention_statistics(q, k, mask),
        lambda: attemper.functional.dense_weights(q, k, attn_mask=mask),
        lambda: attemper.tap(q, k, mask, name="site"),
    ):
        with pytest.raises(InputError, match=rf"attn_mask=\.\.\.\) is a {kind.__name__}, a subclass of Tensor"):
            call()


def test_a_parameter_is_a_mask_and_is_differentiated(backend: str):
    q, k, v = tensors(3, 6)
    mask = nn.Parameter(torch.randn(3, 6))
    attemper.attention(q, k, v, mask, backend=backend).output.square().sum().backward()
    assert mask.grad is not None
    assert bool((mask.grad != 0).any())


def test_a_compiled_call_reads_it_too():
    q, k, v = tensors(3, 6)

    def attention(bias: Tensor) -> Tensor:
        return attemper.attention(q, k, v, bias, backend="blocked").output

    bias = causal_lower_right(3, 6)
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(bias), attention(bias))
