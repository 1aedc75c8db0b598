"""Softmax by hand: read exactly, or skipped by name; never read wrongly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import attemper
from attemper import InputError
from attemper.sites.tensor_axes import axes_after_reshape
from tests.sites.hand_attention import (
    NOT_SEEN,
    SEEN,
    SIZE,
    Attention,
    Codebook,
    ConvolutionalChannels,
    KeyBias,
    LayerMix,
    LearnedQueries,
    Mixture,
    Pool,
    Unbatched,
)
from tests.sites.own_models import LIBRARY

HAND = "softmax by hand"
REUSED = "scores reused before the product"


def entropy_per_head(weights: Tensor) -> Tensor:
    """Mean entropy of weights [B, H, Q, K], [H], in float64."""
    p = weights.double()
    return -(p * p.clamp(min=1e-300).log()).sum(-1).mean((0, 2)).detach()


def expected(model: Attention, x: Tensor) -> Tensor:
    q, k, _ = (part.double() for part in model.split(x))
    return entropy_per_head((q @ k.transpose(-2, -1) / SIZE**0.5).softmax(-1))


def entropies(scan: attemper.Scan) -> Tensor:
    (site,) = scan.sites
    return torch.tensor([head.entropy_nats for head in site.heads], dtype=torch.float64)


def watched(model: nn.Module, x: Tensor) -> attemper.Scan:
    with attemper.watch(model) as watch:
        model(x)
    assert watch.failures == 0
    return watch.table()


def assert_entropies(model: nn.Module, x: Tensor, wanted: Tensor) -> float:
    """The largest error of the entropies of the only site, which must be small."""
    error = float((entropies(watched(model, x)) - wanted).abs().max())
    assert error < 2e-6
    return error


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", SEEN)
@pytest.mark.quick("-False", "einsum-True")
@pytest.mark.turns(3)
def test_attention_by_hand_is_read_exactly(name: str, inference: bool, seen: Callable[..., None]) -> None:
    model, x = Attention(SEEN[name]), torch.randn(3, 12, 32)
    with torch.inference_mode(inference):
        torch.manual_seed(1)
        before = model(x)
        torch.manual_seed(1)
        with attemper.watch(model) as watch:
            during = model(x)
    assert torch.equal(before, during)
    assert watch.failures == 0
    assert watch.table().skipped == ()
    error = float((entropies(watch.table()) - expected(model, x)).abs().max())
    assert error < 2e-6
    way = "F.scaled_dot_product_attention" if "SDPA" in name or "scaled_dot" in name else HAND
    seen(LIBRARY, name, way, error_nats=error)


@pytest.mark.parametrize(
    ("name", "inference"),
    [(name, inference) for name in NOT_SEEN for inference in (False, True) if (name, inference) != (REUSED, True)],
)
@pytest.mark.quick("-False")
def test_what_would_be_read_wrongly_is_skipped_by_name(name: str, inference: bool, seen: Callable[..., None]) -> None:
    attend, reason = NOT_SEEN[name]
    model, x = Attention(attend), torch.randn(3, 12, 32)
    told = f"(?s)saw no attention in Attention.*Attention: .*{reason}"
    with torch.inference_mode(inference), pytest.raises(InputError, match=told) as error:
        watched(model, x)
    told = str(error.value).rpartition("Attention: ")[2].partition(";")[0]
    seen(LIBRARY, name, "F.scaled_dot_product_attention" if "SDPA" in name else HAND, skipped=told)


def test_heads_that_are_folded_after_the_softmax_are_told_without_a_count() -> None:
    model, x = Attention(SEEN["heads folded after the softmax"]), torch.randn(3, 12, 32)
    del model.num_heads
    assert_entropies(model, x, expected(model, x))


def test_without_version_counters_scores_are_read_from_a_copy() -> None:
    model, x = Attention(NOT_SEEN[REUSED][0]), torch.randn(3, 12, 32)
    with torch.inference_mode():
        assert_entropies(model, x, expected(model, x))


@pytest.mark.parametrize("tokens", [SIZE, 1, 2])
@pytest.mark.parametrize("name", SEEN)
@pytest.mark.quick("-8", "einsum-")
@pytest.mark.turns(3)
def test_sizes_that_coincide_change_nothing(name: str, tokens: int) -> None:
    model, x = Attention(SEEN[name]), torch.randn(4, tokens, 32)
    assert_entropies(model, x, expected(model, x))


@pytest.mark.parametrize("tokens", [SIZE, 2])
@pytest.mark.parametrize(
    "name", ["softmax over channels", "softmax over channels, SDPA", "softmax of keys over tokens"]
)
def test_channels_are_told_from_tokens_where_there_are_as_many(name: str, tokens: int) -> None:
    model = Attention(NOT_SEEN[name][0])
    with pytest.raises(InputError, match=r"in Attention that it can read\..*\n  Attention: its softmax runs over"):
        watched(model, torch.randn(4, tokens, 32))


class TwoSoftmaxes(nn.Module):
    """Attention in two softmaxes of one module, the first of which cannot be read."""

    def forward(self, x: Tensor) -> Tensor:
        weights = (x @ x.mT).softmax(-1)
        return weights[..., :3] @ x[:, :3] + (x @ x.mT).softmax(-1) @ x


def _untraced(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1).detach()
    torch._foreach_mul_([weights], [torch.ones(12, 12).tril()])  # type: ignore[attr-defined]
    return weights @ v


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Mixture(weight=False), "runs over the outputs of a linear layer"),
        (Mixture(weight=True), "runs over the outputs of a linear layer"),
        (Codebook(), "what its softmax weighs are parameters of the model"),
        (ConvolutionalChannels(), "its softmax runs over channels, not over tokens"),
        (Attention(_untraced), "its scores are overwritten .* or its weights after the softmax"),
        (TwoSoftmaxes(), "its weights are changed between the softmax and the values"),
    ],
    ids=["soft mixture of experts", "soft mixture of experts, by a matrix", "soft look-up in a codebook",
         "channels of a feature map", "weights written without a trace", "a softmax beside one that cannot be read"],
)  # fmt: skip
def test_what_weighs_no_tokens_or_is_read_in_part_is_skipped_by_name(
    model: nn.Module, reason: str, seen: Callable[..., None], request: pytest.FixtureRequest
) -> None:
    x = torch.randn(2, 8, 4, 4) if isinstance(model, ConvolutionalChannels) else torch.randn(2, 12, 32)
    with pytest.raises(InputError, match=f"{type(model).__name__}: .*{reason}") as error:
        watched(model, x)
    assert "#2" not in str(error.value)
    if not isinstance(model, Attention | TwoSoftmaxes):
        seen(LIBRARY, request.node.callspec.id, HAND, skipped=reason)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("view", ["itself", "row", "transposed", "changed"])
def test_a_learned_mix_of_layers_is_skipped_by_name_and_attention_beside_it_is_read(
    view: str, inference: bool, seen: Callable[..., None]
) -> None:
    model, x = LayerMix(view), torch.randn(2, 12, 32)
    with torch.inference_mode(inference):
        table = watched(model, x)
    weights = (x @ x.mT).softmax(-1)[:, None]
    assert float((entropies(table) - entropy_per_head(weights)).abs().max()) < 2e-6
    (skipped,) = table.skipped
    assert "its softmax runs over parameters of the model (a learned mix, of layers say)" in skipped.reason
    seen(LIBRARY, "learned mix of layers", HAND, skipped="its softmax runs over parameters of the model")


@pytest.mark.parametrize(
    "model", [Pool("einsum"), Pool("bmm"), Pool("linear"), Unbatched(), LearnedQueries(), KeyBias()],
    ids=["pooling by einsum", "pooling by bmm", "pooling by nn.Linear", "one head of one sequence", "learned queries",
         "a key bias from nn.Linear"],
)  # fmt: skip
def test_pooling_and_single_heads_are_read_exactly(
    model: nn.Module, seen: Callable[..., None], request: pytest.FixtureRequest
) -> None:
    x = torch.randn(2, 12, 32)
    weights: Tensor = model.weights(x)  # type: ignore[operator]
    error = assert_entropies(model, x, entropy_per_head(weights.reshape(-1, 1, 1, weights.shape[-1])))
    seen(LIBRARY, request.node.callspec.id, HAND, error_nats=error)


@pytest.mark.parametrize(
    ("before", "after", "marked", "found"),
    [
        ((2, 5, 24), (2, 5, 3, 4, 2), {2}, {2, 3, 4}),
        ((2, 5, 4, 2), (2, 5, 8), {2, 3}, {2}),
        ((2, 4, 5, 8), (8, 5, 8), {3}, {2}),
        ((2, 4, 5, 8), (2, 4, 40), {3}, set()),
        ((2, 1, 5), (2, 5, 1), {2}, {1}),
        ((6, 4), (2, 3, 4), {0}, {0, 1}),
        ((0, 4), (4, 0), {0}, set()),
        ((4, 3), (4, 6), {1}, set()),
    ],
)
def test_marked_axes_through_a_change_of_shape(
    before: tuple[int, ...], after: tuple[int, ...], marked: set[int], found: set[int]
) -> None:
    assert axes_after_reshape(before, after, frozenset(marked)) == found


@pytest.mark.parametrize(
    ("piece", "name", "said"),
    [
        ("softmax_by_hand.ByHand._begin", "einsum", "its tensors could not be followed through softmax"),
        ("torch_functions.four_dimensional", "SDPA by keyword", "its arguments could not be read"),
    ],
)
def test_a_reader_that_fails_does_not_end_the_forward_pass(
    piece: str, name: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such axis")

    monkeypatch.setattr(f"attemper.sites.{piece}", broken)
    with pytest.raises(InputError, match=rf"Attention: {said} \(no such axis\)"):
        watched(Attention(SEEN[name]), torch.randn(2, 12, 32))


class HeadsFirst(nn.Module):
    """The weights of the MSA Transformer: heads stand before the batch."""

    def __init__(self, columns: bool) -> None:
        super().__init__()
        self.qkv, self.columns, self.weights = nn.Linear(16, 48), columns, torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 4)) for part in self.qkv(x).chunk(3, -1))  # [rows, tokens, batch, heads, 4]
        shape = "hcnij" if self.columns else "hnij"
        letters = ("icnhd", "jcnhd") if self.columns else ("rinhd", "rjnhd")
        self.weights = torch.einsum(f"{letters[0]},{letters[1]}->{shape}", q, k).softmax(-1)
        return torch.einsum(f"{shape},{letters[1]}->{letters[0]}", self.weights, v)


@pytest.mark.parametrize("columns", [False, True])
def test_heads_that_stand_before_the_batch_are_heads(columns: bool) -> None:
    model = HeadsFirst(columns)
    table = watched(model, torch.randn(3, 5, 2, 16))
    want = torch.special.entr(model.weights.double()).sum(-1).flatten(1).mean(1)
    torch.testing.assert_close(entropies(table), want, atol=1e-6, rtol=0)


class SingleOutput(nn.Module):
    """A mix of the layers so far: at the first layer of one."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh, self.attention = nn.Linear(32, 1), Attention(SEEN[next(iter(SEEN))])

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weigh(x).unflatten(-1, (1, 1)).permute(2, 0, 1, 3).softmax(-1)
        return self.attention(torch.einsum("lbnd,vbnl->vbnd", x[None], weights)[0])


def test_a_softmax_over_the_single_output_of_a_layer_is_no_site() -> None:
    table = watched(SingleOutput(), torch.randn(3, 12, 32))
    assert [site.name for site in table.sites] == ["attention"]
    assert [skip.name for skip in table.skipped] == ["SingleOutput"]
