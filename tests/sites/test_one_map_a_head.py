"""A site's weights are [queries, keys] of tokens, one map for each head; the rest is named under skipped, and why."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from attemper.errors import InputError
from attemper.monitor.scan import ScanOptions, block_scan
from tests.support.attention import Attention

FACTOR = "its softmaxes are multiplied with each other"
DIFFERENCE = "what its softmaxes give is subtracted"
PART = r"its weights are changed between the softmax and the values \(getitem\)"


def landmarks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Nystrom's approximation, its last factor first or last to meet something."""
    few_q, few_k = (part.unflatten(2, (4, -1)).mean(3) for part in (q, k))
    third = (few_q @ k.mT).softmax(-1) @ v
    first, second = (q @ few_k.mT).softmax(-1), (few_q @ few_k.mT).softmax(-1)
    inverse = second.mT / second.sum(-2).max()
    inverse = inverse @ (2 * torch.eye(4) - second @ inverse)
    return first @ inverse @ third


def landmarks_by_pinv(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    few_q, few_k = (part.unflatten(2, (4, -1)).mean(3) for part in (q, k))
    inverse = torch.linalg.pinv((few_q @ few_k.mT).softmax(-1))
    return (q @ few_k.mT).softmax(-1) @ inverse @ ((few_q @ k.mT).softmax(-1) @ v)


def difference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    one, two = (F.scaled_dot_product_attention(q, k, part) for part in (v, v.flip(1)))
    return one - 0.3 * two


def difference_of_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    one, two = F.scaled_dot_product_attention(q, k, v).chunk(2, 1)
    made = torch.cat((one, two), -1)
    made -= 0.3 * torch.cat((two, one), -1)
    return made.view(*q.shape)


def difference_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    one, two = ((part @ k.mT).softmax(-1) @ v for part in (q, q.flip(1)))
    return F.layer_norm(one, (8,)).sub(0.3 * F.layer_norm(two, (8,)))


def part_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The first rows by a softmax that can be read, the others by one that cannot."""
    first, rest = ((part @ k.mT).softmax(-1) for part in (q[:, :, :4], q[:, :, 4:]))
    return torch.cat((first @ v, rest[..., :8] @ v[:, :, :8] + rest[..., 8:] @ v[:, :, 8:]), 2)


def part_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return part_after(q.flip(2), k, v).flip(2)


NONE: dict[str, tuple[Any, str]] = {
    "landmarks": (landmarks, FACTOR),
    "landmarks by pinv": (landmarks_by_pinv, FACTOR),
    "difference": (difference, DIFFERENCE),
    "difference of heads": (difference_of_heads, DIFFERENCE),
    "difference by hand": (difference_by_hand, DIFFERENCE),
    "part after": (part_after, PART),
    "part before": (part_before, PART),
}


def _read(model: nn.Module, batch: Any) -> Iterator[Callable[[], attemper.Scan]]:
    yield lambda: attemper.scan(model, [batch, batch])
    with attemper.watch(model) as watch:
        for _ in range(2):
            model(**batch) if isinstance(batch, dict) else model(batch)
    yield watch.table


@pytest.mark.parametrize("name", NONE)
def test_weights_that_are_no_map_of_a_head_are_named_once_never_counted_and_not_taken(name: str) -> None:
    attend, reason = NONE[name]
    model = nn.Sequential(Attention(F.scaled_dot_product_attention), Attention(attend)).eval()
    for read in _read(model, torch.randn(2, 16, 32)):
        reading = read()
        assert [site.name for site in reading.sites] == ["0"]
        (skipped,) = reading.skipped
        assert skipped.name == "1"
        assert re.match(reason, skipped.reason)
    model, batch = nn.Sequential(Attention(attend)).eval(), torch.randn(2, 16, 32)
    with pytest.raises(InputError, match=f"0: {reason}"):
        attemper.fingerprint(model, [batch])
    with pytest.raises(InputError, match=f"0: {reason}"):
        attemper.pattern(model, batch, head=0, sequence=0)


def residual(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return v - F.scaled_dot_product_attention(q, k, v)


def centred(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    found = F.scaled_dot_product_attention(q, k, v)
    return found - found.mean(2, keepdim=True)


def gated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ (v * q.softmax(-1))


def joined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v) + 0.5 * F.scaled_dot_product_attention(q, k.flip(1), v)


@pytest.mark.parametrize(("attend", "calls"), [(residual, 1), (centred, 1), (gated, 1), (joined, 2)])
def test_what_is_subtracted_or_multiplied_otherwise_is_read(attend: Any, calls: int) -> None:
    model = Attention(attend).eval()
    for read in _read(model, torch.randn(2, 16, 32)):
        reading = read()
        assert len(reading.sites) == calls
        assert reading.skipped == ()


def test_layers_between_two_attentions_make_their_difference_something_else() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = (Attention(F.scaled_dot_product_attention) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x) - self.two(x)

    assert [site.name for site in attemper.scan(Towers().eval(), [torch.randn(2, 16, 32)]).sites] == ["one", "two"]


def test_a_module_that_is_read_whole_and_later_in_part_is_named_and_no_longer_counted() -> None:
    def by_length(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (part_after if q.shape[2] > 16 else F.scaled_dot_product_attention)(q, k, v)

    model = nn.Sequential(Attention(F.scaled_dot_product_attention), Attention(by_length)).eval()
    reading = attemper.scan(model, [torch.randn(2, 16, 32), torch.randn(2, 24, 32)])
    assert [site.name for site in reading.sites] == ["0"]
    assert [skip.name for skip in reading.skipped] == ["1"]
    taken = attemper.fingerprint(model, [torch.randn(2, 16, 32), torch.randn(2, 24, 32)])
    assert ([site.name for site in taken.sites], list(taken.skipped)) == (["0"], ["1"])
    with block_scan(model, ScanOptions()) as reader:
        for tokens in (16, 24):
            reader.read([torch.randn(2, tokens, 32)])
    part = reader.part({}, None)
    assert [key[0] for segment in part.segments for key in segment.sites] == ["0"]
    assert "1" in {skip.name for skip in part.skipped}


def test_a_tap_beside_one_of_the_maps_is_read_as_it_was_asked_for() -> None:
    def tapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attemper.tap(q, k, name="first map")
        return difference(q, k, v)

    model = nn.Sequential(Attention(tapped)).eval()
    reading = attemper.scan(model, [torch.randn(2, 16, 32)])
    assert [site.name for site in reading.sites] == ["first map"]
    assert [skip.name for skip in reading.skipped] == ["0"]


class Windows(nn.Module):
    """Attention inside of windows, whose axis stands before that of heads or behind it."""

    def __init__(self, order: str, by_hand: bool) -> None:
        super().__init__()
        self.order, self.by_hand, self.num_heads = order, by_hand, 2
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, [B, heads, windows, tokens, size]."""
        return tuple(part.unflatten(-1, (2, 16)).unflatten(1, (3, 8)).permute(0, 3, 1, 2, 4)
                     for part in self.qkv(x).chunk(3, -1))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        if self.order == "windows, heads":
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        made = (q @ k.mT / 4).softmax(-1) @ v if self.by_hand else F.scaled_dot_product_attention(q, k, v)
        made = made.transpose(1, 2) if self.order == "windows, heads" else made
        return self.out(made.permute(0, 2, 3, 1, 4).flatten(1, 2).flatten(2))


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("order", ["heads, windows", "windows, heads"])
def test_windows_are_no_heads_wherever_their_axis_stands(order: str, by_hand: bool) -> None:
    model, x = Windows(order, by_hand).eval(), torch.randn(2, 24, 32)
    q, k, _ = model.parts(x)
    weights = (q @ k.mT / 4).softmax(-1).double()
    expected = -torch.xlogy(weights, weights).sum(-1).mean((0, 2, 3))
    for read in _read(model, x):
        (site,) = read().sites
        assert [head.entropy_nats for head in site.heads] == pytest.approx(expected.tolist(), abs=1e-5)
        assert {head.rows for head in site.heads} <= {2 * 24, 4 * 24}  # of one pass or two


@pytest.mark.parametrize("order", ["heads, windows", "windows, heads"])
def test_heads_with_windows_behind_them_are_tempered_each_by_its_own_temperature(order: str) -> None:
    model, x = Windows(order, by_hand=False).eval(), torch.randn(2, 24, 32)
    factors = torch.tensor([0.5, 2.0])
    attemper.temper(model, temperature=attemper.nn.FixedTemperature(factors))
    q, k, v = model.parts(x)
    made = (q @ k.mT / 4 / factors.view(2, 1, 1, 1)).softmax(-1) @ v
    expected = model.out(made.permute(0, 2, 3, 1, 4).flatten(1, 2).flatten(2))
    assert torch.allclose(model(x), expected, atol=1e-5)


class DepthMix(nn.Module):
    """For each token a learned mix of the outputs of layers, by the function that attends."""

    def __init__(self, queries: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(queries, 32))

    def forward(self, x: Tensor) -> Tensor:
        layers = torch.stack((x, 2 * x, x.flip(1)), 2)
        return F.scaled_dot_product_attention(self.query.expand(*x.shape[:2], -1, -1), layers, layers).mean(2)


def mixed_through_the_registry() -> nn.Module:
    tf = pytest.importorskip("transformers")

    class Mix(tf.PreTrainedModel):
        config_class = tf.PretrainedConfig

        def __init__(self) -> None:
            super().__init__(tf.PretrainedConfig())
            self.query, self.num_key_value_groups = nn.Parameter(torch.randn(3, 32)), 1

        def forward(self, x: Tensor) -> Tensor:
            layers = torch.stack((x, 2 * x, x.flip(1)), 2)
            query = self.query.expand(*x.shape[:2], -1, -1)
            function = tf.AttentionInterface().get_interface("sdpa", None)
            return function(self, query, layers, layers, None, is_causal=False)[0]

    return Mix()


@pytest.mark.parametrize("mix", [lambda: DepthMix(1), lambda: DepthMix(3), mixed_through_the_registry])
def test_a_mix_of_layers_for_each_token_has_no_heads_and_is_named(mix: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(Attention(F.scaled_dot_product_attention), mix()).eval()
    for read in _read(model, torch.randn(2, 16, 32)):
        reading = read()
        assert [site.name for site in reading.sites] == ["0"]
        (skipped,) = reading.skipped
        assert skipped.name == "1"
        assert skipped.reason.startswith("its queries are the same along the axis of heads,")
