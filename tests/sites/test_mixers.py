"""Layers without attention weights are told by what they compute, and are named in readings."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from attemper.readings.labels import LAYER_KINDS, by_reason, kind_of, reason_of
from attemper.readings.reading import Reading, Skipped
from attemper.sites.mixers import MIXINGS, UNREAD, Mixers
from attemper.sites.names import names_of


def chunk_gated_delta_rule(x: Tensor) -> Tensor:
    return x.cumsum(1)


selective_scan = rwkv_linear_attention = chunk_gated_delta_rule


class ShortConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 3, groups=8, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.mT).mT


class Parameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.A_log, self.D = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1) * self.A_log.exp() + self.D


class Delta(Parameters, ShortConvolution):
    """Has a convolution and the parameters of a state space, too: its first kind counts."""

    def forward(self, x: Tensor) -> Tensor:
        return chunk_gated_delta_rule(self.conv(x.mT).mT)


class States(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)

    def mix(self, x: Tensor) -> Tensor:
        return selective_scan(x)


class Rwkv(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return rwkv_linear_attention(x)


class LightningAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ (x.mT @ x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


class Fourier(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fftn(x).real


class ExpAttention(nn.Module):
    """Weights that are normalised without a softmax, which nothing follows."""

    def forward(self, x: Tensor) -> Tensor:
        weights = (x @ x.mT / 9).exp()
        return weights / weights.sum(-1, keepdim=True) @ x


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


class Model(nn.Module):
    def __init__(self, *mixers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mixers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


KINDS = {
    Delta: "delta rule",
    States: "state space",
    Parameters: "state space",
    Rwkv: "linear attention",
    LightningAttention: "linear attention",
    Recurrent: "recurrence",
    Fourier: "Fourier transform",
    ShortConvolution: "convolution",
    ExpAttention: UNREAD,
}


def test_every_kind_has_its_reason_and_the_other_way_round() -> None:
    assert list(LAYER_KINDS) == [*(mixing.kind for mixing in MIXINGS), UNREAD]
    assert [kind_of(reason_of(kind)) for kind in LAYER_KINDS] == list(LAYER_KINDS)
    assert kind_of("its softmax runs over channels, not over tokens") is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_without_attention_weights_is_named_with_its_kind(kind: type[nn.Module]) -> None:
    model = Model(Attention(), kind()).eval()
    for reading in (attemper.scan(model, [torch.randn(2, 9, 8)]), read(model)):
        assert [site.name for site in reading.sites] == ["layers.0"]
        assert [(skip.name, skip.kind) for skip in reading.skipped] == [("layers.1", KINDS[kind])]


def read(model: nn.Module, **options: Any) -> attemper.Scan:
    with torch.no_grad(), attemper.watch(model, **options) as watch:
        model(torch.randn(2, 9, 8))
    return watch.table()


def test_what_did_not_run_and_what_lies_in_attention_is_not_named() -> None:
    class Convolved(ShortConvolution):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return F.scaled_dot_product_attention(x, x, x)

    model = Model(Convolved(), Attention()).eval()
    model.unused = States()
    assert read(model).skipped == ()


def test_only_wanted_layers_are_named() -> None:
    assert read(Model(Attention(), States()), sites=["layers.0"]).skipped == ()


def test_the_outermost_of_several_is_named_as_the_first_kind_inside() -> None:
    block = Model(States(), ShortConvolution())
    block.conv = nn.Conv1d(8, 8, 3, groups=8)  # makes the block itself a convolution
    outer = Model(block)
    mixers = Mixers(names_of(outer))
    assert mixers.unread(set(outer.modules()), ()) == {"layers.0": "state space"}
    assert mixers.unread(set(block.layers), ()) == {}


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (
            Model(States(), States(), States(), Recurrent()),
            r"(?s)none to measure: its layers mix tokens without weights over keys\..*"
            r"layers\.\* \(0 to 2\): state space: ",
        ),
        (Model(ExpAttention()), r"(?s)put attemper\.tap.*layers\.0: no softmax: its name says"),
    ],
)
def test_a_model_without_attention_is_an_error_that_names_the_kinds_or_what_may_attend(
    model: nn.Module, told: str
) -> None:
    with pytest.raises(attemper.InputError, match=told):
        attemper.scan(model.eval(), [torch.randn(2, 9, 8)])


def test_the_kind_stands_in_the_table_in_json_and_beside_the_frame() -> None:
    scan = attemper.scan(Model(Attention(), States(), States()).eval(), [torch.randn(2, 9, 8)])
    assert "skipped layers.* (1, 2): state space: " in " ".join(str(scan).split())
    document: Any = json.loads(scan.to_json())
    assert [entry["kind"] for entry in document["skipped"]] == ["state space"] * 2
    assert Reading.from_dict(document).skipped == scan.skipped
    assert scan.to_pandas().attrs["skipped"] == document["skipped"]
    # What attends has no kind.
    assert Skipped("a", "its mask is a NestedMask").to_dict() == {"name": "a", "reason": "its mask is a NestedMask"}


def test_names_of_a_stack_with_one_reason_are_one_line() -> None:
    pairs = [("layers.0.a", "x"), ("layers.1.a", "x"), ("layers.2.a", "x"), ("layers.1.b", "x"), ("layers.7.a", "x")]
    assert by_reason(pairs) == [("layers.*.a (0 to 2, 7)", "x"), ("layers.1.b", "x")]
    assert by_reason([("layers.1.a", "x"), ("layers.1.a#2", "x")]) == [("layers.1.a", "x"), ("layers.1.a#2", "x")]


class Softmaxed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT).softmax(-1) @ x


class AxialAttention(Model):
    """Its own name says attention, and what attends is inside."""


class HAttention1D(ExpAttention):
    """Says attention before its dimensions."""


def test_a_model_whose_own_name_says_attention_holds_the_calls_inside_it() -> None:
    reading = read(AxialAttention(Softmaxed()))
    assert [site.name for site in reading.sites] == ["layers.0"]
    assert reading.skipped == ()


def test_a_class_that_says_attention_before_its_dimensions_is_named() -> None:
    (skipped,) = read(Model(Softmaxed(), HAttention1D())).skipped
    assert skipped.name == "layers.1"
    assert skipped.reason.startswith(UNREAD)
