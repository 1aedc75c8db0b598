"""Models that pass torch's ``CausalBias`` to SDPA: every look and every act reads it as causality, aligned as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import attemper
from attemper import InputError

BIASES = {"top-left": causal_upper_left, "bottom-right": causal_lower_right}
both = pytest.mark.parametrize("alignment", BIASES)


class Model(nn.Module):
    """Attention of 4 queries over 6 keys, with the mask that ``make`` makes."""

    num_heads = 2

    def __init__(self, make: Callable[[int, int], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = self.make(query.shape[-2], key.shape[-2])
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


class Own(Model):
    """The same by our own function."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attemper.attention(query, key, value, self.make(query.shape[-2], key.shape[-2])).output


class Tapped(Model):
    """Attention that nobody sees, but for the tap beside it."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attemper.tap(query, key, self.make(query.shape[-2], key.shape[-2]), name="here")
        return value


def batch() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(2, 2, 4, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)


def ruled(alignment: str) -> dict[str, Any]:
    return {"is_causal": True, "causal_alignment": alignment}


def per_head(scan: Any) -> list[float]:
    return [head.entropy_nats for head in scan.sites[0].heads]


@both
@pytest.mark.parametrize("kind", [Model, Own, Tapped])
def test_scan_and_watch_measure_what_it_lets_see(kind: type[Model], alignment: str):
    tensors = batch()
    model = kind(BIASES[alignment])
    wanted = attemper.attention_statistics(*tensors[:2], **ruled(alignment)).entropy.mean((0, 2)).tolist()
    with attemper.watch(model) as watch:
        model(*tensors)
    for found in (attemper.scan(model, [tensors]), watch.table()):
        assert found.skipped == ()
        assert per_head(found) == pytest.approx(wanted, rel=1e-6)
    if kind is Model:  # queries without a batch, too
        alone = attemper.scan(model, [tuple(part[0] for part in tensors)])
        first = attemper.attention_statistics(tensors[0][:1], tensors[1][:1], **ruled(alignment)).entropy
        assert per_head(alone) == pytest.approx(first.mean((0, 2)).tolist(), rel=1e-6)


ACTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a temperature": ({"temperature": 2.0}, {"temperature": 2.0}),
    "a temperature of the length": ({"temperature": attemper.nn.LengthTemperature(3)}, {}),
    "sparsemax": ({"normalizer": "sparsemax"}, {"normalizer": "sparsemax"}),
    "scalable softmax": ({"normalizer": "scalable_softmax"}, {"normalizer": "scalable_softmax"}),
}
"""What a model is tempered with, and the options by which our function gives the same."""


@both
@pytest.mark.parametrize("name", ACTS)
def test_what_is_tempered_sees_the_same_keys(name: str, alignment: str):
    tensors, (given, options) = batch(), ACTS[name]
    if not options:
        seen = attemper.attention_statistics(*tensors[:2], **ruled(alignment)).visible_keys
        options = {"temperature": attemper.functional.length_temperature(seen.float(), 3)}
    model = Model(BIASES[alignment])
    with attemper.temper(model, **given):
        found = model(*tensors)
    torch.testing.assert_close(found, attemper.attention(*tensors, **options, **ruled(alignment)).output)


@both
def test_a_penalty_is_that_of_the_visible_keys(alignment: str):
    query, key, value = batch()
    model = Model(BIASES[alignment]).train()
    leaf = query.requires_grad_()
    penalty = attemper.regularize(model, attemper.EntropyBonus(1.0))
    (found,) = torch.autograd.grad(penalty.attach(0 * model(leaf, key, value).sum()), leaf)
    penalty.remove()
    entropy = attemper.attention_statistics(leaf, key, **ruled(alignment)).entropy.mean()
    torch.testing.assert_close(found, torch.autograd.grad(-entropy, leaf)[0])


def test_one_for_other_sizes_is_read_as_torch_reads_it():
    tensors = batch()
    upper = attemper.scan(Model(lambda *_: causal_upper_left(3, 9)), [tensors])
    wanted = attemper.attention_statistics(*tensors[:2], is_causal=True).entropy.mean((0, 2)).tolist()
    assert per_head(upper) == pytest.approx(wanted, rel=1e-6)
    # One row that stands for all queries.
    lower = Model(lambda *_: causal_lower_right(1, 6))
    with pytest.raises(InputError, match=r"Model: its .* was made for 1 x 6 \(queries x keys\), and .* \(4, 6\)"):
        attemper.scan(lower, [tensors])


class Visible(Tensor):
    """A mask that SDPA takes as it is, of a class that might mean anything."""


def test_another_subclass_is_skipped_by_name_and_not_acted_on():
    tensors = batch()
    model = Model(lambda queries, keys: torch.ones(queries, keys, dtype=torch.bool).as_subclass(Visible))
    two = nn.ModuleList([model, Model(causal_upper_left)])
    two.forward = lambda *given: [part(*given) for part in two]  # pyright: ignore[reportAttributeAccessIssue]
    scan = attemper.scan(two, [tensors])
    assert [site.name for site in scan.sites] == ["1"]
    (skipped,) = scan.skipped
    assert skipped.name == "0"
    assert skipped.reason.startswith("its mask is a Visible, a subclass of Tensor")
    with attemper.temper(model, normalizer="sparsemax"), pytest.raises(InputError, match="its mask is a Visible"):
        model(*tensors)
